"""The page at `/` in Firefox: what may differ from Chromium."""

import re
from collections.abc import Iterator

import pytest

from tests.support.firefox import Firefox, running_firefox
from tests.support.serving import RunningServer, running_server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    with running_firefox(tmp_path_factory.mktemp("firefox")) as browser:
        yield browser


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningServer]:
    with running_server("--scripted-step-ms", "20") as server:
        yield server


@pytest.fixture
def page(browser: Firefox, slow: RunningServer) -> Iterator[Firefox]:
    """The page. After each test: no console errors, no requests to elsewhere."""
    browser.size(1400, 900)
    browser.open(slow.url)
    browser.wait("document.querySelector('#state').dataset.state === 'ready'")
    yield browser
    assert browser.console_errors(slow.url) == []
    urls = browser.js("performance.getEntriesByType('resource').map((each) => each.name)")
    assert urls and all(url.startswith(slow.url + "/") for url in urls)


def send(page: Firefox, question: str) -> None:
    page.write("#prompt", question)
    page.write("#prompt", "Enter")


def test_an_output_streams_with_timings_and_escape_stops_the_next(
    page: Firefox, slow: RunningServer
) -> None:
    page.click("#settings-open")
    page.js("document.querySelector('#max_tokens').value = 40")
    send(page, "Who are you?")
    length = "document.querySelector('article:last-of-type .content')?.textContent.length"
    page.wait(f"{length} > 5")
    assert not page.js("Boolean(document.querySelector('.figures'))")  # still streaming
    page.wait("document.querySelectorAll('.answer:not(.running)').length === 1")
    figures = page.text(".figures").replace("\n", " ")
    assert re.search(r"TTFT ?[\d.]+ m?s.*TPOT ?[\d.]+ ms.*Out ?40 .*length", figures), figures
    page.js("document.querySelector('#max_tokens').value = 500")
    send(page, "And now?")
    page.wait(f"{length} > 5")
    page.write("#prompt", "Escape")
    page.wait("document.querySelectorAll('.answer:not(.running)').length === 2")
    slow.wait_until_idle()
    assert slow.metric('requests_total{outcome="abandoned"}') == 1


def test_a_conversation_survives_a_reload_and_is_deleted(
    page: Firefox, slow: RunningServer
) -> None:
    page.js("document.querySelector('#max_tokens').value = 30")
    send(page, "Who are you?")
    page.wait("document.querySelectorAll('.answer:not(.running)').length === 1")
    answer = page.text(".content")
    page.js("window.isOld = true")
    page.js("location.reload()")
    page.wait("!window.isOld && document.querySelectorAll('.answer').length === 1")
    assert page.text(".content") == answer
    num_chats = "document.querySelectorAll('.chat').length"
    before = page.js(num_chats)
    page.click("[aria-label='More about Who are you?']")
    page.click("#chat-delete")
    page.click("#dialog-done")
    page.wait(f"{num_chats} === {before - 1} && !document.querySelector('article')")


def test_the_live_view_follows_the_load(page: Firefox) -> None:
    send(page, "Tell me a story.")
    page.wait("document.querySelector('#batch .value').textContent === '1'")
    page.wait("/[1-9]/.test(document.querySelector('#tokens .value').textContent)")
    page.write("#prompt", "Escape")
    page.wait("document.querySelector('#batch .value').textContent === '0'")


@pytest.mark.parametrize("width", [1400, 1000, 500])
def test_nothing_is_cut_off(page: Firefox, width: int) -> None:
    page.size(width, 800)
    page.click("#settings-open")
    page.wait("!document.querySelector('#settings').hidden")
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    beyond = "[...document.querySelectorAll('button, input:not([type=radio]), select, .value')]"
    assert (
        page.js(f"{beyond}.filter((e) => e.getBoundingClientRect().right > innerWidth).length") == 0
    )
