"""One version, wherever it is written."""

import re
import shutil
from pathlib import Path

import pytest

from tests.release import version
from tests.support.paths import ROOT

_IMAGE = re.compile(r"(?:-t|image:|:/cache) (penstock(?:-ray)?(?::[\w.-]+)?)(?![\w-])")


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


def test_an_image_is_named_by_this_version_wherever_it_is_named() -> None:
    files = [
        *(ROOT / "docker").rglob("*"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        ROOT / "Makefile",
    ]
    files.remove(ROOT / "docker/k8s/base/deployment.yaml")  # the overlays set its tag
    images = {
        (str(file), image)
        for file in files
        if file.is_file()
        for image in _IMAGE.findall(file.read_text(encoding="utf-8"))
    }
    number = version.version()
    ours = (f"penstock:{number}", f"penstock:{number}-cpu", f"penstock-ray:{number}")
    assert len(images) >= 6
    assert {each for each in images if each[1] not in ours} == set()
