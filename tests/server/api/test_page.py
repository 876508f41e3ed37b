"""The page at `/`, as far as it can be tested without a browser; see tests/ops/test_page.py."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.server.api import page
from tests.support.serving import RunningServer, running_server

FOLDER = Path(page.__file__).parent
_SUFFIXES = {".html", ".css", ".js", ".svg", ".woff2"}
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in _SUFFIXES)
LIBRARIES = [path for path in FILES if "vendor" in path.parts]
OURS = [path for path in FILES if path not in LIBRARIES]
# What the page weighs on the wire, all of it, and without what is loaded for the first code and the
# first formula. The largest peer's page is about two megabytes.
MAX_PAGE_BYTES = 520_000
MAX_FIRST_BYTES = 120_000
_LATER = {"highlight.js", "katex.js"}
_HIDDEN = (
    "/page/vendor/libraries.json",
    "/page/vendor/LICENSES.txt",
    "/page/vendor/",
    "/page/vendor/fonts/OFL.txt",
)
# Names of a kind of document, not addresses that anything is loaded from.
_NAMESPACES = ("http://www.w3.org/2000/svg",)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that requires a key, which the page must not need."""
    with running_server("--api-key", "secret", is_ready=False) as server:
        server.wait_until_answering()
        yield server


def address(path: Path) -> str:
    return f"/page/{path.relative_to(FOLDER)}"


def test_the_page_and_its_files_are_served_without_a_key(server: RunningServer) -> None:
    assert "<title>Penstock</title>" in server.get("/").text
    assert len(FILES) > 5
    for path in FILES:
        response = server.get(address(path))
        assert (response.status_code, response.content) == (200, path.read_bytes())
    assert server.get("/metrics").status_code == server.get("/v1/models").status_code == 401


def test_every_file_has_a_policy_that_allows_no_other_origin(server: RunningServer) -> None:
    for path in ("/", *map(address, FILES)):
        headers = server.get(path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        kinds = ("script", "style", "connect", "font", "img")
        assert {policy[f"{kind}-src"] for kind in kinds} == {"'self'"}
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["trusted-types"] == "dompurify"
        assert headers["x-content-type-options"] == "nosniff"


def test_every_reference_of_the_page_exists(server: RunningServer) -> None:
    html = (FOLDER / "index.html").read_text()
    for reference in re.findall(r'(?:src|href)="([^"#]+)"', html):
        assert server.get(f"/{reference}").status_code == 200, reference
    for script in (path for path in OURS if path.suffix == ".js"):
        for reference in re.findall(r'(?:from |import ?\(?)"(\.[^"]+)"', script.read_text()):
            assert (script.parent / reference).is_file(), reference


def test_no_other_path_under_the_page_is_a_file(server: RunningServer) -> None:
    for path in ("/page/__init__.py", "/page/", "/page/..%2fcli.py", "/page/a/b", *_HIDDEN):
        assert server.get(path).json()["error"]["code"] == "unknown_url", path


def test_the_libraries_are_those_of_the_record() -> None:
    record = json.loads((FOLDER / "vendor" / "libraries.json").read_text())
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text()
    recorded = set()
    for name, library in record.items():
        for file, entry in library["files"].items():
            path = FOLDER / "vendor" / file
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"], file
            recorded.add(path)
        for package in (f"{name}@{library['version']}", *library["bundles"]):
            title, _, version = package.rpartition("@")
            assert f"{title} {version}\n===" in licences, package
    assert recorded == set(LIBRARIES)


@pytest.mark.slow
def test_a_file_is_compressed_for_clients_that_take_it(server: RunningServer) -> None:
    sizes = {}
    for path in FILES:
        plain = server.get(address(path), headers={"accept-encoding": "identity"})
        packed = server.get(address(path), headers={"accept-encoding": "gzip, br"})
        assert plain.content == packed.content == path.read_bytes()
        assert "content-encoding" not in plain.headers
        is_packed = packed.headers.get("content-encoding") == "gzip"
        assert is_packed != (path.suffix == ".woff2")  # which is compressed itself
        sizes[path] = int(packed.headers["content-length"])
    assert sum(sizes.values()) < MAX_PAGE_BYTES
    first = [path for path in FILES if path.name not in _LATER and path.suffix != ".woff2"]
    assert sum(sizes[path] for path in first) < MAX_FIRST_BYTES


def test_a_file_that_the_browser_has_is_not_sent_again(server: RunningServer) -> None:
    first = server.get("/page/app.js")
    again = server.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = server.get("/page/style.css", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_a_file_contains_no_foreign_address_and_makes_no_markup_from_text(path: Path) -> None:
    text = path.read_text()
    for name in _NAMESPACES:
        text = text.replace(name, "")
    assert not re.search(r"https?:|['\"(]//|@import|\burl\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r'\s(?:style|on\w+)="', text)


def test_no_ui_removes_the_page() -> None:
    with running_server("--no-ui", is_ready=False) as server:
        server.wait_until_answering()
        for path in ("/", "/page/app.js"):
            response = server.get(path)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "unknown_url"
