"""One version, wherever it is written, and one index of CPU builds."""

import re
import shutil
from pathlib import Path

import pytest

from tests.release import version
from tests.support.paths import ROOT


def test_every_place_has_the_version_of_pyproject() -> None:
    assert version.differing() == [], "`make version` writes it"


def test_the_version_is_written_into_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyproject.toml", *version.PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    project = tmp_path / "pyproject.toml"
    old = version.version()
    project.write_text(project.read_text().replace(f'version = "{old}"', 'version = "9.8.7rc1"'))
    monkeypatch.setattr(version, "ROOT", tmp_path)
    assert len(version.differing()) >= len(version.PLACES)
    assert version.main(["--write"]) == 0
    assert version.differing() == []
    assert "penstock:9.8.7rc1-cpu" in (tmp_path / "docker/compose.yaml").read_text()


def test_the_tags_of_the_images_are_the_same_everywhere() -> None:
    tags = {
        tag
        for name in ("docker/compose.yaml", "docs/docker-and-kubernetes.md")
        for tag in re.findall(r"\bpenstock:\d+\.[\w.-]+", (ROOT / name).read_text(encoding="utf-8"))
    }
    assert tags == {f"penstock:{version.version()}", f"penstock:{version.version()}-cpu"}
