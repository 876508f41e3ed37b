"""The libraries of the page at `/` are those of npm, byte for byte."""

import shutil

import pytest

from tests.ops.page_libraries import FOLDER, OFL, RECORD, from_npm


def test_the_libraries_are_what_npm_has() -> None:
    if not shutil.which("npm"):
        pytest.fail("this test needs npm; run: apt-get install nodejs npm")
    contents = from_npm()
    files = {path for path in FOLDER.rglob("*") if path.is_file()}
    assert files == {OFL, RECORD, *(FOLDER / name for name in contents)}
    for name, content in contents.items():
        assert (FOLDER / name).read_bytes() == content, name
