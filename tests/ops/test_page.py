"""The page at `/` in a real browser: it asks, shows, stops, and sends nothing elsewhere."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.browser import Page, running_browser
from tests.support.load import load_on
from tests.support.serving import RunningServer, running_server, wait_until

KEY = "a-key-of-ours"
_DESKTOP, _PHONE = (1440, 900), (360, 740)
# SCREENSHOTS=folder keeps the pictures, for whoever wants to look at them.
_PICTURES = os.environ.get("SCREENSHOTS")

NewPage = Callable[[], Page]


@pytest.fixture(scope="module")
def new_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewPage]:
    with running_browser(tmp_path_factory.mktemp("chromium")) as new_page:
        yield new_page


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
    """Its answers take seconds, so that there is time to stop them."""
    with running_server("--scripted-step-ms", "20") as server:
        yield server


@pytest.fixture
def page(demo: RunningServer, new_page: NewPage) -> Iterator[Page]:
    """The demo's page; whatever a test does, nothing is complained of and nothing goes out."""
    page = opened(new_page(), demo.url)
    yield page
    assert page.complaints() == []
    assert all(url.startswith(demo.url + "/") for url in page.urls())


def opened(page: Page, url: str, size: tuple[int, int] = _DESKTOP) -> Page:
    page.look(width=size[0], height=size[1])
    page.open(url)
    page.wait("document.querySelector('#state').dataset.state === 'ready'")
    return page


def ask(page: Page, question: str) -> None:
    page.write("#prompt", question)
    page.press("Enter")


def finished(page: Page, num_answers: int = 1) -> None:
    page.wait(f"document.querySelectorAll('.tools').length === {num_answers}")
    page.wait("!document.querySelector('#send').hidden")


def show_settings(page: Page) -> None:
    page.click("#settings-open")
    page.wait("!document.querySelector('#settings').hidden")


def last_request(page: Page) -> dict[str, object]:
    """The body in the curl line of the last answer."""
    line: str = page.js("[...document.querySelectorAll('.curl pre')].at(-1).textContent")
    body: dict[str, object] = json.loads(line.partition("-d '")[2][:-1].replace("'\\''", "'"))
    return body


def picture(page: Page, name: str) -> None:
    if _PICTURES:
        page.screenshot(Path(_PICTURES) / f"{name}.png")


def test_an_answer_comes_with_its_timings_and_the_chat_goes_on(page: Page) -> None:
    ask(page, "Who are you?")
    finished(page)
    assert "Penstock" in page.text(".answer .content")
    figures = page.text(".figures").replace("\n", " ")
    assert re.search(r"TTFT ?[\d.]+ ms.*TPOT ?[\d.]+ ms.*tok/s.*In ?\d+.*Out ?\d+", figures), (
        figures
    )
    ask(page, "What is continuous batching?")
    finished(page, 2)
    roles = [message["role"] for message in last_request(page)["messages"]]  # type: ignore[attr-defined]
    assert roles == ["user", "assistant", "user"]
    page.click("#clear")
    page.wait("!document.querySelector('article') && !document.querySelector('#welcome').hidden")


def test_the_tokens_that_it_shows_are_the_servers(page: Page, demo: RunningServer) -> None:
    before = demo.metric("generated_tokens_total")
    ask(page, "Who are you?")
    finished(page)
    num_out = page.js(
        "+[...document.querySelectorAll('.figures div')]"
        ".find((e) => e.firstChild.textContent === 'Out').lastChild.textContent"
    )
    assert num_out == demo.metric("generated_tokens_total") - before > 0


def test_an_answer_streams_and_escape_or_the_button_stops_it(
    slow: RunningServer, new_page: NewPage
) -> None:
    page = opened(new_page(), slow.url)
    length = "document.querySelector('article:last-of-type .content').textContent.length"
    stops: list[Callable[[], None]] = [
        lambda: page.press("Escape"),
        lambda: page.click("#stop-answer"),
    ]
    for num_answers, stop in enumerate(stops, start=1):
        ask(page, "Tell me a story.")
        page.wait(f"{length} > 5")
        early = page.js(length)
        page.wait(f"{length} > {early}")
        stop()
        finished(page, num_answers)
        slow.wait_until_idle()
    assert slow.metric('requests_total{outcome="abandoned"}') == 2
    assert "Stopped" in page.text(".foot")
    assert page.complaints() == []


def test_settings_are_sent_and_empty_ones_are_not(page: Page) -> None:
    show_settings(page)
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 7, "seed": 3}
    for name, value in given.items():
        page.write(f"#{name}", str(value))
    page.write("#system", "Be brief.")
    ask(page, "It's time: who are you?")
    finished(page)
    body = last_request(page)
    assert body.items() >= given.items()
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "It's time: who are you?"},
    ]
    assert "stop" not in body and "response_format" not in body
    assert "length" in page.text(".figures")


def test_a_schema_gives_json_and_a_broken_one_a_sentence(page: Page) -> None:
    show_settings(page)
    page.js("document.querySelector('#format').value = 'json_schema'; 0")
    page.js("document.querySelector('#format').dispatchEvent(new Event('change')); 0")
    ask(page, "Name somebody.")
    finished(page)
    assert set(json.loads(page.text(".answer .content"))) == {"name", "age"}
    page.write("#schema", "{no")
    ask(page, "Name somebody.")
    finished(page, 2)
    assert "The JSON schema is not valid JSON" in page.text(".error")
    assert page.js("document.activeElement.id") == "schema"
    assert page.js("document.querySelector('#prompt').value") == "Name somebody."


def test_completion_goes_on_from_a_text_without_streaming_too(page: Page) -> None:
    page.click("input[value=completion]")
    show_settings(page)
    assert not page.js("document.querySelector('#system').checkVisibility()")
    page.click("#stream")
    ask(page, "Once upon a time")
    finished(page)
    assert last_request(page)["prompt"] == "Once upon a time"
    assert page.text(".answer .content")
    assert "TTFT" not in page.text(".figures") and "Total" in page.text(".figures")


def test_a_refusal_is_shown_as_the_servers_sentence(demo: RunningServer, new_page: NewPage) -> None:
    page = opened(new_page(), demo.url)
    show_settings(page)
    page.write("#temperature", "99")
    ask(page, "Who are you?")
    finished(page)
    assert "temperature" in page.text(".error")
    assert page.text(".error").endswith(".")
    assert page.js("document.querySelector('.error').role") == "alert"


def test_a_full_queue_is_told_of_and_the_question_is_kept(new_page: NewPage) -> None:
    flags = ("--scripted-step-ms", "100", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    with running_server(*flags) as server:
        tabs = [opened(new_page(), server.url) for _ in range(3)]
        for tab, card in zip(tabs, ("running", "waiting", None), strict=True):
            ask(tab, "Am I in?")
            if card:
                wait_until(lambda card=card: server.metric(f"{card}_sequences") == 1)
        finished(tabs[2])
        assert "waiting already" in tabs[2].text(".error")
        assert tabs[2].js("document.querySelector('#prompt').value") == "Am I in?"


def test_an_answer_past_its_deadline_ends_with_the_servers_sentence(new_page: NewPage) -> None:
    with running_server("--scripted-step-ms", "20", "--request-timeout", "1") as server:
        page = opened(new_page(), server.url)
        ask(page, "Tell me a story.")
        finished(page)
        assert "longer than 1 s" in page.text(".error")
        assert page.text(".answer .content")


def test_a_very_long_answer_is_shown_by_the_frame_not_by_the_token(new_page: NewPage) -> None:
    """A layout for each token froze the page for seconds."""
    with running_server() as server:
        page = opened(new_page(), server.url)
        show_settings(page)
        page.write("#max_tokens", "10000")
        page.js(
            "window.numChanges = 0; new MutationObserver((all) => { numChanges += all.length; })"
            ".observe(document.body, {subtree: true, characterData: true})"
        )
        ask(page, "Tell me everything.")
        finished(page)
        assert "10000" in page.text(".figures")
        assert page.js("document.querySelector('.content').textContent.length") > 20_000
        assert page.js("numChanges") < 1000


def test_a_reader_who_scrolls_back_is_left_there(slow: RunningServer, new_page: NewPage) -> None:
    page = opened(new_page(), slow.url, (1440, 420))
    log = "document.querySelector('#conversation')"
    ask(page, "Tell me a story." + "\n" * 30)
    page.wait(f"{log}.scrollTop > 100")
    page.js(f"{log}.scrollTop = 0")
    length = page.js(f"{log}.textContent.length")
    page.wait(f"{log}.textContent.length > {length} + 50")
    page.press("Escape")
    finished(page)
    assert page.js(f"{log}.scrollTop") == 0


def test_the_copied_curl_line_asks_the_same(page: Page) -> None:
    show_settings(page)
    page.write("#max_tokens", "4")
    question = 'It\'s "you", $HOME, `id`, \\n, שלום 👩‍👧 <b>'
    ask(page, question)
    finished(page)
    page.click(".tools button[aria-expanded]")
    page.call("Page.bringToFront")
    for _ in range(2):  # the second while the button still says that the first went well
        page.click(".curl button")
        page.wait("document.querySelector('.curl button').textContent === 'Copied'")
    page.write("#prompt", "")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
    line = page.js("document.querySelector('#prompt').value")
    assert last_request(page)["messages"] == [{"role": "user", "content": question}]
    told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert told.stdout.rstrip().endswith("data: [DONE]") and '"completion_tokens":4' in told.stdout
    page.wait("document.querySelector('.curl button').textContent === 'Copy curl'")


def test_each_line_begins_where_its_script_does(page: Page) -> None:
    ask(page, "שלום\nThis line goes from left to right, and is the longer of the two.")
    finished(page)
    left, right = page.js(
        "(() => { const e = document.querySelector('.question'), r = document.createRange();"
        "const box = e.getBoundingClientRect();"
        "const place = (from, to) => { r.setStart(e.firstChild, from); r.setEnd(e.firstChild, to);"
        "return r.getBoundingClientRect(); };"
        "return [place(5, 9).left - box.left, box.right - place(0, 4).right]; })()"
    )
    assert left < 30 and right < 30


def test_a_server_that_is_away_is_told_of(new_page: NewPage) -> None:
    with running_server() as server:
        page = opened(new_page(), server.url)
    ask(page, "Who are you?")
    finished(page)
    assert "cannot be reached" in page.text(".error")
    page.wait("document.querySelector('#live-note').textContent.includes('cannot be reached')")
    assert page.text("#model-text") == "The server cannot be reached"


def test_when_the_server_is_back_the_page_goes_on(demo: RunningServer, new_page: NewPage) -> None:
    page = opened(new_page(), demo.url)
    _set_offline(page, True)
    page.wait("document.querySelector('#state').dataset.state === 'away'")
    _set_offline(page, False)
    page.wait("document.querySelector('#state').dataset.state === 'ready'")
    ask(page, "Who are you?")
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


def test_an_answer_that_breaks_off_is_told_of_and_what_came_stays(new_page: NewPage) -> None:
    with running_server("--scripted-step-ms", "20") as server:
        page = opened(new_page(), server.url)
        ask(page, "Tell me a story.")
        page.wait("document.querySelector('.answer .content').textContent.length > 5")
    finished(page)
    assert page.text(".error").endswith("; send again.")
    assert page.text(".answer .content")


def test_a_key_is_asked_for_and_kept_in_the_tab_only(new_page: NewPage) -> None:
    with running_server("--api-key", KEY) as server:
        page = new_page()
        page.look(width=1440, height=900)
        page.open(server.url)
        page.wait("!document.querySelector('#key-form').hidden")
        assert page.js("document.activeElement.id") == "key"
        page.wait("document.querySelector('#live-note').textContent.includes('key')")
        page.js("new Promise((resolve) => setTimeout(resolve, 2500))")
        asked = [url for url in page.urls() if url.endswith("/metrics")]
        assert len(asked) == 1  # no use in asking on and on
        page.write("#key", KEY)
        page.press("Enter")
        page.wait("document.querySelector('#state').dataset.state === 'ready'")
        ask(page, "Who are you?")
        finished(page)
        assert page.text(".answer .content")
        page.wait("/running/.test(document.querySelector('#batch').innerText)")
        page.wait("document.querySelector('#batch .value').textContent === '0'")
        assert page.js("Object.values(sessionStorage)") == [KEY]
        assert KEY not in page.js("JSON.stringify(localStorage) + document.cookie")
        line = page.js("document.querySelector('.curl pre').textContent")
        assert "$PENSTOCK_API_KEY" in line and KEY not in line


def test_a_wrong_key_is_told_of_and_one_that_cannot_be_sent_too(new_page: NewPage) -> None:
    with running_server("--api-key", KEY) as server:
        page = new_page()
        page.open(server.url)
        for wrong, sentence in {"another": "does not accept", "ключ": "ASCII letters"}.items():
            page.wait("!document.querySelector('#key-form').hidden")
            page.write("#key", wrong)
            page.press("Enter")
            page.wait(f"document.querySelector('#key-note').textContent.includes('{sentence}')")
            assert page.js("document.querySelector('#state').dataset.state") == "locked"


def test_what_looks_like_markup_stays_text(page: Page) -> None:
    evil = "<img src=x onerror=document.title='taken'>"
    page.click("input[value=completion]")
    show_settings(page)
    schema = {"type": "string", "const": evil}
    page.js("document.querySelector('#format').value = 'json_schema'; 0")
    page.js("document.querySelector('#format').dispatchEvent(new Event('change')); 0")
    page.write("#schema", json.dumps(schema))
    ask(page, evil)
    finished(page)
    assert page.text(".question") == evil
    assert json.loads(page.text(".answer .content")) == evil
    assert page.js("document.querySelectorAll('#conversation img').length") == 0
    assert page.js("document.title") == "Penstock"


def test_live_figures_move_under_load(page: Page, demo: RunningServer) -> None:
    def shown(card: str) -> str:
        text: str = page.js(f"document.querySelector('#{card} .value').textContent")
        return text

    with load_on(demo.url):
        for card in ("tokens", "ttft", "tpot", "mbu", "hits"):
            page.wait(f"/[1-9]/.test(document.querySelector('#{card} .value').textContent)")
        page.wait("+document.querySelector('#batch .value').textContent > 0")
        page.wait("document.querySelectorAll('#roof circle').length > 0")
        # Whoever does not know a roofline reads it.
        page.wait(
            "/decode: [\\d.]+ % of the limit by (memory|arithmetic)/"
            ".test(document.querySelector('#roof .legend').innerText)"
        )
        page.wait("document.querySelector('#tokens .line').getAttribute('d').split('L').length > 4")
        picture(page, "load")
    assert "ms" in shown("ttft") and "%" in shown("mbu")
    page.wait("document.querySelector('#tokens .value').textContent === '0'")
    page.wait("document.querySelector('#batch .value').textContent === '0'")


def test_the_live_view_begins_anew_with_the_server(new_page: NewPage) -> None:
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
        # Its counters stand at 0, far below those of the one before.
        page.wait("document.querySelector('#live-note').textContent.startsWith('Every second')")
        page.wait("document.querySelector('#tokens .value').textContent === '0'")
        with load_on(server.url):
            page.wait(moves)
            page.wait("+document.querySelector('#batch .value').textContent > 0")
    finally:
        server.stop()


def test_each_live_figure_is_explained_on_focus(page: Page) -> None:
    cards = page.js("[...document.querySelectorAll('.card')].map((card) => card.id)")
    assert {"tokens", "ttft", "tpot", "batch", "kv", "mbu", "mfu", "roof"} <= set(cards)
    for card in cards:
        tip = page.js(
            f"document.getElementById(document.querySelector('#{card}')"
            ".getAttribute('aria-describedby')).textContent"
        )
        assert len(tip) > 40 and tip.endswith("."), card
    page.press("Tab")  # focus by keyboard shows it, by mouse the pointer does
    page.js("document.querySelector('#tokens').focus(); 0")
    page.wait("getComputedStyle(document.querySelector('#tokens .tip')).visibility === 'visible'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [_DESKTOP, _PHONE], ids=["desktop", "phone"])
def test_nothing_overflows_and_text_can_be_read(
    page: Page, scheme: str, size: tuple[int, int]
) -> None:
    page.look(width=size[0], height=size[1], scheme=scheme)
    ask(page, "A long word: " + "x" * 200)
    finished(page)
    page.click(".tools button[aria-expanded]")
    show_settings(page)
    for view in ("playground", "live"):
        if size == _PHONE:
            page.click(f"[data-show={view}]")
        assert page.js("document.documentElement.scrollWidth") <= size[0]
        assert page.js("visualViewport.scale") == 1
        assert page.js(_BEYOND_THE_EDGE) == []
        picture(page, f"{view}-{scheme}-{size[0]}")
        assert page.js(_LOW_CONTRAST) == []


# What is cut off at the right; what only a screen reader meets is a pixel wide.
_BEYOND_THE_EDGE = """
[...document.querySelectorAll("button, input, select, textarea, .value, .figures")]
  .filter((e) => e.checkVisibility() && e.getBoundingClientRect().width > 2)
  .filter((e) => e.getBoundingClientRect().right > innerWidth)
  .map((e) => e.outerHTML)"""
# Text on what lies behind it, by WCAG's formula: at least 4.5 to 1.
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
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    throw new Error("nothing opaque lies behind");
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || e.closest("svg, noscript, :disabled")) continue;
    if (!e.checkVisibility({visibilityProperty: true})) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([walk.currentNode.data.trim(), ratio.toFixed(2)]);
  }
  return low;
})()"""


def test_the_theme_follows_the_system_until_it_is_chosen(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.js(ground)
    page.look(width=1440, height=900, scheme="dark")
    page.wait(f"{ground} !== {json.dumps(light)}")
    page.click("#theme")
    page.wait(f"{ground} === {json.dumps(light)}")
    page.open(page.js("location.href"))
    page.wait(f"document.documentElement.dataset.theme === 'light' && {ground} === '{light}'")


def test_nothing_moves_where_less_motion_is_asked_for(page: Page) -> None:
    page.look(width=1440, height=900, motion="reduce")
    ask(page, "Who are you?")
    page.wait("document.querySelector('.answer')")
    finished(page)
    assert page.js("document.getAnimations().length") == 0


def test_it_has_what_assistive_programs_need(page: Page) -> None:
    ask(page, "Who are you?")
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


def test_the_keyboard_alone_reaches_everything_in_the_order_that_is_seen(page: Page) -> None:
    page.js("document.querySelector('.skip').focus(); 0")
    seen = []
    for _ in range(14):
        page.press("Tab")
        seen.append(page.js("document.activeElement.id"))
    order = ["key-open", "theme", "settings-open", "conversation", "prompt", "send", "tokens"]
    assert [name for name in seen if name in order] == order


def test_shift_enter_makes_a_line_and_sends_nothing(page: Page) -> None:
    page.write("#prompt", "one")
    page.press("Enter", shift=True)
    page.call("Input.insertText", text="two")
    assert page.js("document.querySelector('#prompt').value") == "one\ntwo"
    assert not page.js("Boolean(document.querySelector('article'))")
