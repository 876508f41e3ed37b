"""The compiled step is optional."""

import logging
from pathlib import Path

import pytest

from engine.models.native import load_library


def test_without_a_compiler_the_log_says_so_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load_library.__wrapped__() is None
    assert "install g++" in caplog.text
