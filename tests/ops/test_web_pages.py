"""A page of another site in Chromium gets nothing from a server of this machine."""

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import NewPage, running_browser
from tests.support.serving import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of another site's page."""
    folder: Path = tmp_path_factory.mktemp("stranger")
    (folder / "index.html").write_text("<title>stranger</title>", encoding="utf-8")
    make = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as site:
        threading.Thread(target=site.serve_forever).start()
        yield f"http://127.0.0.1:{site.server_port}/index.html"
        site.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


# What a browser sends of any page without asking the server first.
_BODIES = {
    "text": "body",
    "a blob without a type": "new Blob([body])",
    "bytes": "new TextEncoder().encode(body)",
    "a form": "new URLSearchParams({[body]: ''})",
    "an upload": "(() => { const form = new FormData(); form.set('a', body); return form; })()",
}


def num_generated(server: RunningServer) -> float:
    return server.metric("generated_tokens_total")


@pytest.mark.parametrize("kind", _BODIES)
def test_a_page_of_another_site_makes_no_tokens(
    new_page: NewPage, server: RunningServer, stranger: str, kind: str
) -> None:
    page = new_page()
    page.open(stranger)
    before = num_generated(server)
    body = json.dumps({"prompt": "Once", "max_tokens": 5})
    page.js(
        f"(() => {{ const body = {json.dumps(body)}; return fetch('{server.url}/v1/completions',"
        f"{{method: 'POST', mode: 'no-cors', body: {_BODIES[kind]}}}).then(r => r.text()); }})()"
    )
    assert num_generated(server) == before


def test_the_same_from_the_servers_own_page_makes_tokens(
    new_page: NewPage, server: RunningServer
) -> None:
    page = new_page()
    page.open(server.url)
    before = num_generated(server)
    body = json.dumps({"prompt": "Once", "max_tokens": 5})
    status = page.js(
        f"fetch('/v1/completions', {{method: 'POST', body: new Blob([{json.dumps(body)}])}})"
        ".then(r => r.status)"
    )
    assert status == 200 and num_generated(server) > before


def test_a_page_whose_name_resolves_to_this_machine_reads_nothing(
    tmp_path: Path, server: RunningServer
) -> None:
    """The browser takes such a page for this server's own."""
    rule = "MAP rebound.example 127.0.0.1"
    with running_browser(tmp_path, f"--host-resolver-rules={rule}") as new_page:
        page = new_page()
        page.open(f"http://rebound.example:{server.port}/metrics")
        assert "unknown_host" in page.text() and "penstock_" not in page.text()
