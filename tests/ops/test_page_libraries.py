"""The libraries of the page at `/` are those of npm, byte for byte."""

import shutil

import pytest

from tests.ops.page_libraries import FOLDER, RECORD, from_npm


def test_the_libraries_are_what_npm_has() -> None:
    if not shutil.which("npm"):
        pytest.fail("this test needs npm; run: apt-get install nodejs npm")
    contents = from_npm()
    assert {path.name for path in FOLDER.iterdir()} == {*contents, RECORD.name}
    for name, content in contents.items():
        assert (FOLDER / name).read_bytes() == content, name
