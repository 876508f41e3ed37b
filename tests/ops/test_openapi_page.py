"""`/docs` and `/redoc` in Chromium: they show the API, and ask nobody but the server."""

from collections.abc import Iterator

import pytest

from tests.support.browser import NewPage, Page
from tests.support.serving import MODEL, RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--root-path", "/llm") as server:
        yield server


@pytest.fixture(params=["", "/llm"])
def base(server: RunningServer, request: pytest.FixtureRequest) -> str:
    """The URL directly, and as of a proxy that leaves the --root-path on."""
    return f"{server.url}{request.param}"


@pytest.fixture
def page(base: str, new_page: NewPage) -> Iterator[Page]:
    """After each test: no errors in the console, so the headers forbid nothing that is needed, and
    no requests to elsewhere."""
    page = new_page()
    yield page
    assert page.console_errors() == []
    urls = [url for url in page.urls() if not url.startswith(("data:", "blob:"))]
    assert all(url.startswith(f"{base}/") for url in urls), urls


def test_docs_lists_the_routes_and_sends_a_request(page: Page, base: str) -> None:
    page.open(f"{base}/docs")
    page.wait("document.body.innerText.includes('/v1/chat/completions')", timeout_s=60)
    page.click("[id*='v1_models_get'] button")
    page.wait("document.querySelector('.try-out button')")
    page.click(".try-out button")
    page.wait("document.querySelector('.execute')")
    page.click(".execute")
    page.wait(f"document.querySelector('.live-responses-table')?.innerText.includes('{MODEL}')")


def test_redoc_lists_the_routes(page: Page, base: str) -> None:
    page.open(f"{base}/redoc")
    page.wait("document.body.innerText.includes('/v1/chat/completions')", timeout_s=60)
