"""The page at `/` in Chromium: it generates, displays and stops, and sends nothing elsewhere."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.browser import Page
from tests.support.chat_page import (
    DESKTOP,
    PHONE,
    NewPage,
    choose,
    finished,
    last_request,
    opened,
    questions,
    send,
    show_settings,
    use,
)
from tests.support.compiler import needs_compiler
from tests.support.load import load_on
from tests.support.serving import RunningServer, running_server, wait_until

KEY = "a-key-of-ours"
# SCREENSHOTS=folder keeps screenshots.
_SCREENSHOTS = os.environ.get("SCREENSHOTS")


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    server = RunningServer()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningServer]:
    """A server whose outputs take seconds, so that a test can stop them."""
    with running_server("--scripted-step-ms", "20") as server:
        yield server


@pytest.fixture
def page(demo: RunningServer, new_page: NewPage) -> Iterator[Page]:
    """The demo server's page. After each test: no console errors, no requests to elsewhere."""
    page = opened(new_page(), demo.url)
    yield page
    assert page.console_errors() == []
    assert all(url.startswith(demo.url + "/") for url in page.urls())


def screenshot(page: Page, name: str) -> None:
    if _SCREENSHOTS:
        page.screenshot(Path(_SCREENSHOTS) / f"{name}.png")


def test_an_output_has_timings_and_the_chat_continues(page: Page) -> None:
    send(page, "Who are you?")
    finished(page)
    assert "Penstock" in page.text(".answer .content")
    figures = page.text(".figures").replace("\n", " ")
    assert re.search(r"TTFT ?[\d.]+ ms.*TPOT ?[\d.]+ ms.*tok/s.*In ?\d+.*Out ?\d+", figures), (
        figures
    )
    send(page, "What is continuous batching?")
    finished(page, 2)
    roles = [message["role"] for message in last_request(page)["messages"]]
    assert roles == ["user", "assistant", "user"]
    page.click("#new")
    page.wait("!document.querySelector('article') && !document.querySelector('#welcome').hidden")


def test_the_displayed_tokens_are_the_servers(page: Page, demo: RunningServer) -> None:
    before = demo.metric("generated_tokens_total")
    send(page, "Who are you?")
    finished(page)
    num_out = page.js(
        "+[...document.querySelectorAll('.figures div')]"
        ".find((e) => e.firstChild.textContent === 'Out').lastChild.textContent"
    )
    assert num_out == demo.metric("generated_tokens_total") - before > 0


def test_an_output_streams_and_escape_or_the_button_stops_it(
    slow: RunningServer, new_page: NewPage
) -> None:
    page = opened(new_page(), slow.url)
    length = "document.querySelector('article:last-of-type .content')?.textContent.length"
    stops: list[Callable[[], None]] = [
        lambda: page.press("Escape"),
        lambda: page.click("#stop-answer"),
    ]
    for num_answers, stop in enumerate(stops, start=1):
        send(page, "Tell me a story.")
        page.wait(f"{length} > 5")
        early = page.js(length)
        page.wait(f"{length} > {early}")
        stop()
        finished(page, num_answers)
        slow.wait_until_idle()
    assert slow.metric('requests_total{outcome="abandoned"}') == 2
    assert "Stopped" in page.text(".foot")
    assert page.console_errors() == []


def test_settings_are_sent_and_empty_ones_are_not(page: Page) -> None:
    show_settings(page)
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 7, "seed": 3}
    for name, value in given.items():
        page.write(f"#{name}", str(value))
    page.write("#system", "Be brief.")
    send(page, "It's time: who are you?")
    finished(page)
    body = last_request(page)
    assert body.items() >= given.items()
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "It's time: who are you?"},
    ]
    assert "stop" not in body and "response_format" not in body
    assert "length" in page.text(".figures")


def test_a_schema_gives_json_and_an_invalid_one_an_error(page: Page) -> None:
    show_settings(page)
    choose(page, "#format", "json_schema")
    send(page, "Name somebody.")
    finished(page)
    assert set(json.loads(page.text(".answer .content"))) == {"name", "age"}
    page.write("#schema", "{no")
    send(page, "Name somebody.")
    page.wait("!document.querySelector('#ask-error').hidden")
    assert "The JSON schema is not valid JSON" in page.text("#ask-error")
    assert page.js("document.activeElement.id") == "schema"
    assert page.js("document.querySelector('#prompt').value") == "Name somebody."
    assert len(questions(page)) == 1
    page.write("#schema", "{}")
    page.wait("document.querySelector('#ask-error').hidden")


def test_completion_continues_a_text_without_streaming_too(page: Page) -> None:
    page.click("input[value=completion]")
    show_settings(page)
    assert not page.js("document.querySelector('#system').checkVisibility()")
    page.click("#stream")
    send(page, "Once upon a time")
    finished(page)
    assert last_request(page)["prompt"] == "Once upon a time"
    assert page.text(".answer .content")
    assert "TTFT" not in page.text(".figures") and "Total" in page.text(".figures")


def test_an_error_is_shown_with_the_servers_message(demo: RunningServer, new_page: NewPage) -> None:
    page = opened(new_page(), demo.url)
    show_settings(page)
    page.write("#temperature", "99")
    send(page, "Who are you?")
    finished(page)
    assert "temperature" in page.text(".answer .error")
    assert page.text(".answer .error").endswith(".")
    assert page.js("document.querySelector('.answer .error').role") == "alert"


def test_a_full_queue_is_reported_and_the_question_can_be_sent_again(new_page: NewPage) -> None:
    flags = ("--scripted-step-ms", "100", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    with running_server(*flags) as server:
        tabs = [opened(new_page(), server.url) for _ in range(3)]
        for tab, card in zip(tabs, ("running", "waiting", None), strict=True):
            send(tab, "Am I in?")
            if card:
                wait_until(lambda card=card: server.metric(f"{card}_sequences") == 1)
        finished(tabs[2])
        assert "waiting already" in tabs[2].text(".answer .error")
        for tab in tabs[:2]:
            tab.click("#stop-answer")
        server.wait_until_idle()
        use(tabs[2], "Try again")
        tabs[2].wait("document.querySelector('.content')?.textContent.length > 5")
        assert questions(tabs[2]) == ["Am I in?"]
        assert not tabs[2].js("Boolean(document.querySelector('.answer .error'))")


def test_an_output_past_its_deadline_ends_with_the_servers_message(new_page: NewPage) -> None:
    with running_server("--scripted-step-ms", "20", "--request-timeout", "1") as server:
        page = opened(new_page(), server.url)
        send(page, "Tell me a story.")
        finished(page)
        assert "longer than 1 s" in page.text(".answer .error")
        assert page.text(".answer .content")


def test_a_long_output_is_rendered_per_frame_not_per_token(new_page: NewPage) -> None:
    """A layout per token used to freeze the page for seconds."""
    with running_server() as server:
        page = opened(new_page(), server.url)
        show_settings(page)
        page.write("#max_tokens", "10000")
        page.js(
            "window.numChanges = 0; new MutationObserver((all) => { numChanges += all.length; })"
            ".observe(document.querySelector('#conversation'),"
            " {subtree: true, characterData: true, childList: true})"
        )
        send(page, "Tell me everything.")
        finished(page)
        assert "10000" in page.text(".figures")
        assert page.js("document.querySelector('.content').textContent.length") > 20_000
        assert page.js("numChanges") < 5000  # per token, there would be 10,000


def test_scrolling_back_stays_while_text_arrives(slow: RunningServer, new_page: NewPage) -> None:
    page = opened(new_page(), slow.url, (1440, 420))
    log = "document.querySelector('#conversation')"
    send(page, "Tell me a story." + "\n" * 30)
    page.wait(f"{log}.scrollTop > 100")
    page.js(f"{log}.scrollTop = 0")
    length = page.js(f"{log}.textContent.length")
    page.wait(f"{log}.textContent.length > {length} + 50")
    page.press("Escape")
    finished(page)
    assert page.js(f"{log}.scrollTop") == 0


def test_the_copied_curl_command_sends_the_same_request(page: Page) -> None:
    show_settings(page)
    page.write("#max_tokens", "4")
    question = 'It\'s "you", $HOME, `id`, \\n, שלום 👩‍👧 <b>'
    send(page, question)
    finished(page)
    use(page, "curl")
    page.call("Page.bringToFront")
    for _ in range(2):  # the second while the button still reports the first copy
        page.click(".curl button")
        page.wait("document.querySelector('.curl button').textContent === 'Copied'")
    page.write("#prompt", "")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
    line = page.js("document.querySelector('#prompt').value")
    assert last_request(page)["messages"] == [{"role": "user", "content": question}]
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (
        result.stdout.rstrip().endswith("data: [DONE]") and '"completion_tokens":4' in result.stdout
    )
    page.wait("document.querySelector('.curl button').textContent === 'Copy curl'")


def test_each_line_is_aligned_by_the_direction_of_its_script(page: Page) -> None:
    send(page, "שלום\nThis line goes from left to right, and is the longer of the two.")
    finished(page)
    left, right = page.js(
        "(() => { const e = document.querySelector('.said'), r = document.createRange();"
        "const box = e.getBoundingClientRect();"
        "const place = (from, to) => { r.setStart(e.firstChild, from); r.setEnd(e.firstChild, to);"
        "return r.getBoundingClientRect(); };"
        "return [place(5, 9).left - box.left, box.right - place(0, 4).right]; })()"
    )
    assert left < 30 and right < 30


def test_an_unreachable_server_is_reported(new_page: NewPage) -> None:
    with running_server() as server:
        page = opened(new_page(), server.url)
    send(page, "Who are you?")
    finished(page)
    assert "cannot be reached" in page.text(".answer .error")
    page.wait("document.querySelector('#live-note').textContent.includes('cannot be reached')")
    assert page.text("#model-text") == "The server cannot be reached"


def test_the_page_continues_when_the_server_is_reachable_again(
    demo: RunningServer, new_page: NewPage
) -> None:
    page = opened(new_page(), demo.url)
    _set_offline(page, True)
    page.wait("document.querySelector('#state').dataset.state === 'away'")
    _set_offline(page, False)
    page.wait("document.querySelector('#state').dataset.state === 'ready'")
    send(page, "Who are you?")
    finished(page)
    assert page.text(".answer .content")


def _set_offline(page: Page, is_offline: bool) -> None:
    limits = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=is_offline, **limits)


def test_a_page_opened_while_the_model_loads_becomes_ready_by_itself(new_page: NewPage) -> None:
    server = RunningServer()
    try:
        server.wait_until_answering()
        opened(new_page(), server.url)
        assert server.get("/ready").status_code == 200
    finally:
        server.stop()


def test_an_interrupted_output_is_reported_and_its_text_stays(new_page: NewPage) -> None:
    with running_server("--scripted-step-ms", "20") as server:
        page = opened(new_page(), server.url)
        send(page, "Tell me a story.")
        page.wait("document.querySelector('.answer .content').textContent.length > 5")
    finished(page)
    assert page.text(".answer .error").endswith(
        "; Continue goes on from here, Regenerate begins anew."
    )
    assert page.text(".answer .content")


def test_a_key_is_requested_and_kept_in_the_tab_only(new_page: NewPage) -> None:
    with running_server("--api-key", KEY) as server:
        page = new_page()
        page.emulate(width=1440, height=900)
        page.open(server.url)
        page.wait("!document.querySelector('#key-form').hidden")
        assert page.js("document.activeElement.id") == "key"
        page.wait("document.querySelector('#live-note').textContent.includes('key')")
        page.js("new Promise((resolve) => setTimeout(resolve, 2500))")
        requests = [url for url in page.urls() if url.endswith("/metrics")]
        assert len(requests) == 1  # no polling without a key
        page.write("#key", KEY)
        page.press("Enter")
        page.wait("document.querySelector('#state').dataset.state === 'ready'")
        send(page, "Who are you?")
        finished(page)
        assert page.text(".answer .content")
        page.wait("/running/.test(document.querySelector('#batch').innerText)")
        page.wait("document.querySelector('#batch .value').textContent === '0'")
        assert page.js("Object.values(sessionStorage)") == [KEY]
        assert KEY not in page.js("JSON.stringify(localStorage) + document.cookie")
        use(page, "curl")
        line = page.js("document.querySelector('.curl pre').textContent")
        assert "$PENSTOCK_API_KEY" in line and KEY not in line


def test_a_key_is_kept_in_the_browser_only_as_long_as_the_user_wants(new_page: NewPage) -> None:
    kept = "Object.values(localStorage).includes('" + KEY + "')"
    with running_server("--api-key", KEY) as server:
        page = new_page()
        page.open(server.url)
        page.wait("!document.querySelector('#key-form').hidden")
        page.write("#key", KEY)
        page.click("#key-keep")
        page.click("#key-form .primary")
        page.wait("document.querySelector('#state').dataset.state === 'ready'")
        assert page.js(kept)
        later = page.beside()
        opened(later, server.url)
        later.click("#key-open")
        later.click("#key-keep")
        later.click("#key-form .primary")
        later.wait(f"!{kept}")


def test_a_wrong_key_and_one_that_no_header_can_hold_are_reported(new_page: NewPage) -> None:
    with running_server("--api-key", KEY) as server:
        page = new_page()
        page.open(server.url)
        for wrong, sentence in {"another": "does not accept", "ключ": "ASCII letters"}.items():
            page.wait("!document.querySelector('#key-form').hidden")
            page.write("#key", wrong)
            page.press("Enter")
            page.wait(f"document.querySelector('#key-note').textContent.includes('{sentence}')")
            assert page.js("document.querySelector('#state').dataset.state") == "locked"


def test_markup_is_shown_as_text(page: Page) -> None:
    evil = "<img src=x onerror=document.title='taken'>"
    page.click("input[value=completion]")
    show_settings(page)
    schema = {"type": "string", "const": evil}
    choose(page, "#format", "json_schema")
    page.write("#schema", json.dumps(schema))
    send(page, evil)
    finished(page)
    assert questions(page) == [evil]
    assert json.loads(page.text(".answer .content")) == evil
    assert page.js("document.querySelectorAll('#conversation img').length") == 0
    assert page.js("document.title") == f"{evil} - Penstock"


def test_live_figures_change_under_load(page: Page, demo: RunningServer) -> None:
    def shown(card: str) -> str:
        text: str = page.js(f"document.querySelector('#{card} .value').textContent")
        return text

    with load_on(demo.url):
        for card in ("tokens", "ttft", "tpot", "mbu", "hits"):
            page.wait(f"/[1-9]/.test(document.querySelector('#{card} .value').textContent)")
        page.wait("+document.querySelector('#batch .value').textContent > 0")
        page.wait("document.querySelectorAll('#roof circle').length > 0")
        # An explanation for readers who do not know rooflines.
        page.wait(
            "/decode: [\\d.]+ % of the limit by (memory|arithmetic)/"
            ".test(document.querySelector('#roof .legend').innerText)"
        )
        page.wait("document.querySelector('#tokens .line').getAttribute('d').split('L').length > 4")
        screenshot(page, "load")
    assert "ms" in shown("ttft") and "%" in shown("mbu")
    page.wait("document.querySelector('#tokens .value').textContent === '0'")
    page.wait("document.querySelector('#batch .value').textContent === '0'")


@needs_compiler
def test_the_live_view_shows_drafts_by_their_source(page: Page, demo: RunningServer) -> None:
    for number in range(1, 4):  # the draft model is tried by then, whatever it takes
        send(page, f"Tell me a story about {number} foxes.")
        finished(page, number)
    page.wait(
        "/^model: \\d+ of \\d+ accepted, [\\d.]+ tokens a step$/m"
        ".test(document.querySelector('#drafts .legend').innerText)"
    )
    tokens, accepted = page.text("#drafts .values").split("tokens a step")
    assert float(tokens) >= 1
    assert re.fullmatch(r"\s*[\d.]+ %\s*accepted\s*", accepted)
    screenshot(page, "drafts")


def test_a_server_whose_steps_take_no_drafts_shows_none(
    slow: RunningServer, new_page: NewPage
) -> None:
    page = opened(new_page(), slow.url)
    page.wait("document.querySelector('#live-note').textContent.startsWith('Every second')")
    with load_on(slow.url):
        page.wait("+document.querySelector('#tokens .value').textContent > 0")
    assert not page.js("document.querySelector('#drafts').checkVisibility()")


def test_the_live_view_resets_when_the_server_restarts(new_page: NewPage) -> None:
    flags = ("--scripted", "--max-model-len", "60000", "--scripted-step-ms", "20")
    moves = "+document.querySelector('#tokens .value').textContent > 0"
    server = RunningServer(*flags)
    try:
        server.wait_until_ready()
        page = opened(new_page(), server.url)
        with load_on(server.url):
            page.wait(moves)
        server.stop()
        page.wait("document.querySelector('#live-note').textContent.includes('cannot be reached')")
        server = RunningServer(*flags, port=server.port)
        server.wait_until_ready()
        # Its counters start at 0, far below those of the previous process.
        page.wait("document.querySelector('#live-note').textContent.startsWith('Every second')")
        page.wait("document.querySelector('#tokens .value').textContent === '0'")
        with load_on(server.url):
            page.wait(moves)
            page.wait("+document.querySelector('#batch .value').textContent > 0")
    finally:
        server.stop()


def test_each_live_figure_is_explained_on_focus(page: Page) -> None:
    cards = page.js("[...document.querySelectorAll('.card')].map((card) => card.id)")
    expected = {"tokens", "ttft", "tpot", "batch", "kv", "mbu", "mfu", "drafts", "roof"}
    assert expected <= set(cards)
    for card in cards:
        tip = page.js(
            f"document.getElementById(document.querySelector('#{card}')"
            ".getAttribute('aria-describedby')).textContent"
        )
        assert len(tip) > 40 and tip.endswith("."), card
    page.press("Tab")  # shown on keyboard focus and on hover
    page.js("document.querySelector('#tokens').focus(); 0")
    page.wait("getComputedStyle(document.querySelector('#tokens .tip')).visibility === 'visible'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_overflows_and_text_has_contrast(
    page: Page, scheme: str, size: tuple[int, int]
) -> None:
    page.emulate(width=size[0], height=size[1], scheme=scheme)
    send(page, "A long word: " + "x" * 200)
    finished(page)
    use(page, "curl")
    show_settings(page)
    for view in ("playground", "live"):
        if size == PHONE:
            page.click(f"[data-show={view}]")
        assert page.js("document.documentElement.scrollWidth") <= size[0]
        assert page.js("visualViewport.scale") == 1
        assert page.js(_BEYOND_THE_EDGE) == []
        screenshot(page, f"{view}-{scheme}-{size[0]}")
        assert page.js(_LOW_CONTRAST) == []


# Elements cut off at the right edge, except those for screen readers, which are one pixel wide.
_BEYOND_THE_EDGE = """
[...document.querySelectorAll("button, input, select, textarea, .value, .figures")]
  .filter((e) => e.checkVisibility() && e.getBoundingClientRect().width > 2)
  .filter((e) => e.getBoundingClientRect().right > innerWidth)
  .map((e) => e.outerHTML)"""
# Text whose contrast with its background is below 4.5 to 1, by WCAG's formula.
_LOW_CONTRAST = """(() => {
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour) => {
    probe.clearRect(0, 0, 1, 1); probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = colour[i] / 255;
    return sum + weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0);
  const background = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    throw new Error("no opaque background");
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || e.closest("svg, noscript, :disabled")) continue;
    if (!e.checkVisibility({visibilityProperty: true})) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(background(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([walk.currentNode.data.trim(), ratio.toFixed(2)]);
  }
  return low;
})()"""


def test_the_theme_follows_the_system_until_one_is_selected(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.js(ground)
    page.emulate(width=1440, height=900, scheme="dark")
    page.wait(f"{ground} !== {json.dumps(light)}")
    page.click("#theme")
    page.wait(f"{ground} === {json.dumps(light)}")
    page.open(page.js("location.href"))
    page.wait(f"document.documentElement.dataset.theme === 'light' && {ground} === '{light}'")


def test_nothing_is_animated_with_reduced_motion(page: Page) -> None:
    page.emulate(width=1440, height=900, motion="reduce")
    send(page, "Who are you?")
    page.wait("document.querySelector('.answer')")
    finished(page)
    assert page.js("document.getAnimations().length") == 0


def test_the_page_is_accessible(page: Page) -> None:
    send(page, "Who are you?")
    finished(page)
    show_settings(page)
    assert page.js("document.documentElement.lang") == "en"
    assert (
        page.js("document.title") and page.js("document.querySelectorAll('h1, main').length") == 2
    )
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "textbox", "spinbutton", "combobox", "checkbox", "radio", "log", "group"}
    nodes = [node for node in tree if node.get("role", {}).get("value") in named]
    assert len(nodes) > 20
    assert [node for node in nodes if not node.get("name", {}).get("value")] == []
    assert page.js("document.querySelector('#conversation').ariaLive") == "polite"
    assert page.js("document.querySelector('#conversation').ariaBusy") == "false"
    ids = page.js("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


def test_the_keyboard_reaches_everything_in_visual_order(page: Page) -> None:
    page.js("document.querySelector('.skip').focus(); 0")
    seen = []
    for _ in range(24):
        page.press("Tab")
        seen.append(page.js("document.activeElement.id"))
    order = [
        "chats-open",
        "live-open",
        "key-open",
        "theme",
        "chats-new",
        "settings-open",
        "conversation",
        "prompt",
        "send",
        "tokens",
    ]
    assert [name for name in seen if name in order] == order


def test_shift_enter_adds_a_line_and_sends_nothing(page: Page) -> None:
    page.write("#prompt", "one")
    page.press("Enter", shift=True)
    page.call("Input.insertText", text="two")
    assert page.js("document.querySelector('#prompt').value") == "one\ntwo"
    assert not page.js("Boolean(document.querySelector('article'))")
