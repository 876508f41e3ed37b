"""Conversations on the page at `/`: they are stored, branch, and come and go as files."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page
from tests.support.chat_page import (
    PHONE,
    NewPage,
    answers,
    asked,
    choose_from_menu,
    confirm,
    downloaded,
    finished,
    has_button,
    import_file,
    last_request,
    opened,
    questions,
    reloaded,
    send,
    show_settings,
    stored,
    titles,
    use,
)
from tests.support.page_server import PageServer, echoed, running_page_server, said
from tests.support.serving import wait_until


@pytest.fixture
def server() -> Iterator[PageServer]:
    with running_page_server() as server:
        server.answer = echoed
        yield server


@pytest.fixture
def page(server: PageServer, new_page: NewPage) -> Iterator[Page]:
    page = opened(new_page(), server.url)
    yield page
    assert page.console_errors() == []
    assert all(url.startswith((server.url + "/", "blob:")) for url in page.urls())


def messages(server: PageServer) -> list[tuple[str, str]]:
    """Of the last request."""
    return [(each["role"], each["content"]) for each in server.requests[-1]["messages"]]


def test_a_conversation_survives_a_reload_and_goes_on(page: Page, server: PageServer) -> None:
    asked(page, "one")
    asked(page, "two")
    reloaded(page)
    page.wait("document.querySelectorAll('.answer').length === 2")
    assert questions(page) == ["one", "two"]
    assert answers(page) == ["You said one", "You said two"]
    assert page.js("document.querySelectorAll('.figures').length") == 2
    asked(page, "three")
    assert messages(server)[:2] == [("user", "one"), ("assistant", "**You said** one")]
    assert len(messages(server)) == 5


def test_what_had_arrived_of_an_answer_survives_a_reload_and_can_be_continued(
    page: Page, server: PageServer
) -> None:
    server.says("word " * 400, pause_s=0.01)
    send(page, "Talk.")
    page.wait("document.querySelector('.content')?.textContent.length > 60")
    page.js("new Promise((resolve) => setTimeout(resolve, 1200))")
    reloaded(page)
    page.wait("document.querySelector('.answer:not(.running)')")
    begun = answers(page)[0]
    assert begun.startswith("word word") and len(begun) < 2000
    assert "loaded again" in page.text(".foot")
    server.says("THE END")
    use(page, "Continue")
    page.wait("document.querySelector('.content').textContent.endsWith('THE END')")
    finished(page)
    assert server.requests[-1]["continue_final_message"] is True
    assert server.requests[-1]["messages"][-1]["content"].strip() == begun


def test_conversations_are_listed_found_renamed_and_deleted(page: Page) -> None:
    for question in ("apples", "pears"):
        asked(page, question)
        page.click("#chats-new")
        page.wait("!document.querySelector('article')")
    assert titles(page) == ["pears", "apples"]
    page.write("#chats-find", "SAID** app")  # in the text, whatever the case
    page.wait("document.querySelectorAll('.chat').length === 1")
    page.write("#chats-find", "nothing")
    page.wait("document.querySelector('#chats-none').checkVisibility()")
    page.js("document.querySelector('#chats-find').value = ''; 0")
    page.js("document.querySelector('#chats-find').dispatchEvent(new Event('input')); 0")
    choose_from_menu(page, "rename", 1)
    page.write("#dialog-field", "Fruit")
    page.press("Enter")
    page.wait("[...document.querySelectorAll('.chat')].some((e) => e.textContent === 'Fruit')")
    choose_from_menu(page, "delete", titles(page).index("pears"))
    confirm(page, "Cancel")
    assert len(titles(page)) == 2
    choose_from_menu(page, "delete", titles(page).index("pears"))
    confirm(page, "Delete")
    page.wait("document.querySelectorAll('.chat').length === 1")
    reloaded(page)
    page.wait("document.querySelectorAll('.chat').length === 1")
    assert titles(page) == ["Fruit"]
    page.click(".chat")
    page.wait("document.querySelector('.answer')")
    assert questions(page) == ["apples"]


def test_a_conversation_that_is_deleted_while_its_answer_arrives_stays_deleted(
    page: Page, server: PageServer
) -> None:
    server.says("word " * 2000, pause_s=0.01)
    send(page, "one")
    page.wait("document.querySelector('.content')?.textContent.length > 10")
    choose_from_menu(page, "delete")
    confirm(page, "Delete")
    page.wait("!document.querySelector('article')")
    time.sleep(1.5)  # longer than the time between two writes of a running answer
    assert titles(page) == [] and stored(page) == []


def test_all_conversations_are_deleted_at_once(page: Page) -> None:
    for question in ("a", "b"):
        asked(page, question)
        page.click("#chats-new")
    use(page, "Delete all", "#chats")
    confirm(page, "Delete all")
    page.wait("!document.querySelector('.chat')")
    wait_until(lambda: stored(page) == [])
    assert page.js("document.querySelector('#delete-all').disabled")


def test_an_export_imported_elsewhere_is_the_same_conversation(
    page: Page, server: PageServer, new_page: NewPage, tmp_path: Path
) -> None:
    asked(page, "one")
    use(page, "Regenerate")
    finished(page)
    kept = tmp_path / "kept.json"
    folder = tmp_path / "downloads"
    folder.mkdir()
    kept.write_text(downloaded(page, folder, lambda: use(page, "Export all", "#chats")))
    other = opened(new_page(), server.url)
    for _ in range(2):  # the second time it is there already
        import_file(other, kept)
        other.wait(
            "document.querySelector('#chats-note').textContent.includes('1 conversation was')"
        )
        assert titles(other) == ["one"]
    assert stored(other) == stored(page)
    other.click(".chat")
    other.wait("document.querySelector('.answer')")
    assert other.text(".count") == "2/2"
    assert other.console_errors() == []


def test_a_conversation_is_exported_as_markdown(page: Page, tmp_path: Path) -> None:
    asked(page, "What is *new*?")
    text = downloaded(page, tmp_path, lambda: choose_from_menu(page, "markdown"))
    assert text == (
        "# What is *new*?\n\n## Question\n\nWhat is *new*?\n\n"
        "## stub-model\n\n**You said** What is *new*?\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["What-is-new.md"]


_NODE = {"id": "a", "parent": None, "role": "user", "atMs": 1, "text": "x"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{no", "not valid JSON"),
        ('{"messages": []}', "no conversations of Penstock"),
        ('{"format": "penstock-conversations", "version": 2, "conversations": []}', "version 2"),
        ([{"id": "../x", "nodes": {}}], "not an id"),
        ([{"id": "__proto__", "nodes": {}}], "not an id"),
        ([{"id": "x"}], "nodes is not an object"),
        ([{"id": "x", "nodes": {"a": {**_NODE, "role": "system"}}}], "the role system"),
        ([{"id": "x", "nodes": {"a": {**_NODE, "text": 3}}}], "without a text"),
        ([{"id": "x", "nodes": {"a": {**_NODE, "parent": "b"}}}], "parent is missing"),
        ([{"id": "x", "nodes": {"a": {**_NODE, "role": "assistant"}}}], "answers nothing"),
        (
            [
                {
                    "id": "x",
                    "nodes": {
                        "a": _NODE | {"parent": "b"},
                        "b": _NODE | {"id": "b", "parent": "a"},
                    },
                }
            ],
            "parent is missing",
        ),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_by_its_fault(
    page: Page, tmp_path: Path, content: Any, problem: str
) -> None:
    if isinstance(content, list):
        content = json.dumps(
            {"format": "penstock-conversations", "version": 1, "conversations": content}
        )
    path = tmp_path / "bad.json"
    path.write_text(content)
    import_file(page, path)
    page.wait("document.querySelector('#chats-note').textContent")
    assert problem in page.text("#chats-note")
    assert page.text("#chats-note").endswith(".")
    assert stored(page) == []


def test_nothing_is_stored_if_the_user_wants_so(page: Page) -> None:
    page.click("#storing")
    show_settings(page)
    page.write("#system", "Keep the secret.")
    asked(page, "a secret")
    assert titles(page) == ["a secret"]
    assert stored(page) == []
    assert "secret" not in page.js("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
    reloaded(page)
    assert not page.js("document.querySelector('#storing').checked")
    assert titles(page) == [] and not page.js("Boolean(document.querySelector('article'))")


def test_a_full_storage_is_reported_and_the_conversation_goes_on(
    page: Page, server: PageServer
) -> None:
    page.call("Storage.overrideQuotaForOrigin", origin=server.url, quotaSize=1)
    asked(page, "one")
    page.wait("document.querySelector('#chats-note').classList.contains('error')")
    assert "storage for the page is full" in page.text("#chats-note")
    asked(page, "two")
    assert len(messages(server)) == 3
    page.call("Storage.overrideQuotaForOrigin", origin=server.url)
    asked(page, "three")
    page.wait("!document.querySelector('#chats-note').classList.contains('error')")
    assert len(stored(page)[0]["nodes"]) == 6


def test_an_edited_question_is_a_branch_that_one_can_leave_again(
    page: Page, server: PageServer
) -> None:
    asked(page, "one")
    asked(page, "two")
    page.js(
        "[...document.querySelectorAll('.question')][0].querySelectorAll('button')[1].click(); 0"
    )
    page.wait("document.activeElement.ariaLabel === 'Question'")
    page.write(".editor textarea", "uno")
    page.press("Enter")
    finished(page, 1)
    assert questions(page) == ["uno"] and answers(page) == ["You said uno"]
    assert messages(server) == [("user", "uno")]
    use(page, "Previous version")
    assert questions(page) == ["one", "two"] and len(answers(page)) == 2
    reloaded(page)
    page.wait("document.querySelectorAll('.answer').length === 2")
    use(page, "Next version")
    assert questions(page) == ["uno"]


def test_an_answer_is_regenerated_beside_the_first(page: Page, server: PageServer) -> None:
    asked(page, "one")
    server.says("Second.")
    use(page, "Regenerate")
    finished(page)
    assert answers(page) == ["Second."]
    assert messages(server) == [("user", "one")]
    use(page, "Previous version")
    assert answers(page) == ["You said one"]
    server.answer = echoed
    asked(page, "two")  # goes on from the version that is shown
    assert messages(server)[1] == ("assistant", "**You said** one")


def test_an_edited_answer_is_what_the_model_gets(page: Page, server: PageServer) -> None:
    asked(page, "one")
    use(page, "Edit")
    page.write(".editor textarea", "I said nothing.")
    page.press("Enter")
    page.wait("document.querySelector('.content').textContent.trim() === 'I said nothing.'")
    asked(page, "two")
    assert messages(server)[1] == ("assistant", "I said nothing.")


def test_escape_leaves_the_editor_and_changes_nothing(page: Page, server: PageServer) -> None:
    asked(page, "one")
    page.click(".question button:nth-of-type(2)")
    page.write(".editor textarea", "other")
    page.press("Escape")
    assert questions(page) == ["one"] and not page.js("Boolean(document.querySelector('.editor'))")
    assert len(server.requests) == 1


def test_a_second_question_waits_for_the_first_answer(page: Page, server: PageServer) -> None:
    server.says("word " * 2000, pause_s=0.01)
    send(page, "one")
    page.wait("document.querySelector('.content')?.textContent.length > 10")
    page.click(".question button:nth-of-type(2)")
    page.write(".editor textarea", "edited")
    page.press("Enter")
    assert "still arriving" in page.text("#ask-error")
    assert page.js("document.querySelector('.editor textarea').value") == "edited"
    page.click("#stop-answer")
    finished(page)
    assert not page.js("document.querySelector('#ask-error').checkVisibility()")
    page.write(".editor textarea", "edited")
    server.says("Fine.")
    page.press("Enter")
    page.wait("document.querySelector('.content').textContent.trim() === 'Fine.'")
    assert questions(page) == ["edited"]


def test_escape_closes_what_is_open_before_it_stops_an_answer(
    page: Page, server: PageServer
) -> None:
    server.says("word " * 2000, pause_s=0.01)
    send(page, "one")
    page.wait("document.querySelector('.content')?.textContent.length > 10")
    page.click(".question button:nth-of-type(2)")
    page.press("Escape")
    page.wait("!document.querySelector('.editor')")
    page.js("document.querySelector('#chats-list .more').click(); 0")
    page.press("Escape")
    page.wait("!document.querySelector('#chat-menu').matches(':popover-open')")
    choose_from_menu(page, "delete")
    page.press("Escape")
    page.wait("!document.querySelector('#dialog').open")
    assert page.js("document.querySelector('#stop-answer').checkVisibility()")
    page.press("Escape")
    finished(page)
    assert "Stopped" in page.text(".foot")


def test_a_cut_answer_is_continued_and_a_whole_one_is_not(page: Page, server: PageServer) -> None:
    server.says("One, two,", finish_reason="length")
    asked(page, "Count.")
    server.says(" three.")
    use(page, "Continue")
    page.wait("document.querySelector('.content').textContent.trim() === 'One, two, three.'")
    finished(page)
    body = server.requests[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert messages(server) == [("user", "Count."), ("assistant", "One, two,")]
    assert not has_button(page, "Continue")


def test_reasoning_is_folded_and_sent_back(page: Page, server: PageServer) -> None:
    reasoning = [{"delta": {"reasoning_content": part}} for part in ("First *I* ", "think.")]
    server.answer = lambda body: [*reasoning, *said("Done.")]
    asked(page, "one")
    assert not page.js("document.querySelector('.reasoning').open")
    page.click(".reasoning summary")
    page.wait("document.querySelector('.reasoning em')?.textContent === 'I'")
    assert answers(page) == ["Done."]
    asked(page, "two")
    assert server.requests[-1]["messages"][1]["reasoning_content"] == "First *I* think."


def test_tool_calls_are_shown_and_their_results_are_sent(page: Page, server: PageServer) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    show_settings(page)
    page.write("#tools", json.dumps([tool]))
    page.click("#settings-open")
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city"'}}
    rest = {"index": 0, "function": {"arguments": ': "Oslo"}'}}
    server.answer = lambda body: [{"delta": {"tool_calls": [each]}} for each in (call, rest)]
    server.finish_reason = "tool_calls"
    asked(page, "Weather?")
    assert server.requests[-1]["tools"] == [tool]
    assert page.text(".call summary") == "Tool call: weather"
    assert json.loads(page.text(".call pre")) == {"city": "Oslo"}
    server.says("Rain.")
    page.write(".result-form textarea", "12 degrees, rain")
    use(page, "Send results")
    finished(page, 2)
    assert server.requests[-1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees, rain"},
    ]
    assert page.text(".results").startswith("weather")
    assert not page.js("document.querySelector('.result-form').checkVisibility()")
    reloaded(page)
    page.wait("document.querySelectorAll('.answer').length === 2")
    assert "12 degrees" in page.text(".results")


def test_logprobs_show_the_alternatives_of_each_token(page: Page, server: PageServer) -> None:
    show_settings(page)
    page.click("#logprobs")
    top = [{"token": "Yes", "logprob": -0.1}, {"token": "No", "logprob": -2.3}]
    logprobs = {"content": [{"token": "Yes", "logprob": -0.1, "top_logprobs": top}]}
    server.answer = lambda body: [{"delta": {"content": "Yes"}, "logprobs": logprobs}]
    asked(page, "Really?")
    assert (server.requests[-1]["logprobs"], server.requests[-1]["top_logprobs"]) == (True, 5)
    use(page, "Tokens")
    page.js("document.querySelector('.tokens').focus(); 0")
    page.press("ArrowRight")
    assert page.text(".token-detail") == '"Yes" 90.5 %; instead of it "No" 10.0 %'


def test_an_answer_goes_on_while_another_conversation_is_open(
    page: Page, server: PageServer
) -> None:
    server.says("word " * 150 + "end", pause_s=0.01)
    send(page, "long one")
    page.wait("document.querySelector('.content')?.textContent.length > 20")
    page.click("#chats-new")
    page.wait("!document.querySelector('article')")
    assert not page.js("document.querySelector('#send').hidden")
    server.says("Quick.")
    asked(page, "short one")
    assert answers(page) == ["Quick."]
    page.js(
        "[...document.querySelectorAll('.chat')]"
        ".find((e) => e.textContent === 'long one').click(); 0"
    )
    page.wait("document.querySelector('.said').textContent === 'long one'")
    page.wait("document.querySelector('.content').textContent.trim().endsWith('end')")
    finished(page)


def test_the_buttons_of_the_browser_go_from_one_conversation_to_another(page: Page) -> None:
    asked(page, "one")
    page.click("#new")
    page.wait("!document.querySelector('article')")
    asked(page, "two")
    page.js("history.back(); 0")
    page.wait("document.querySelector('.said')?.textContent === 'one'")
    page.js("history.forward(); 0")
    page.wait("document.querySelector('.said')?.textContent === 'two'")
    assert page.js("document.title") == "two - Penstock"


# The database opens when `mayOpen` is set.
_SLOW_STORE = """
Object.defineProperty(IDBOpenDBRequest.prototype, "onsuccess", { set(act) {
  const later = () => { if (window.mayOpen) act(); else setTimeout(later, 20); };
  this.addEventListener("success", later);
} });"""


def test_a_conversation_that_begins_before_the_store_is_open_is_stored(
    server: PageServer, new_page: NewPage
) -> None:
    page = new_page()
    page.call("Page.addScriptToEvaluateOnNewDocument", source=_SLOW_STORE)
    opened(page, server.url)
    asked(page, "one")
    page.js("window.mayOpen = true")
    wait_until(lambda: len(stored(page)) == 1)
    assert titles(page) == ["one"]


def test_two_tabs_lose_nothing_of_one_conversation(page: Page) -> None:
    asked(page, "one")
    address = page.js("location.href")
    tab = page.beside()
    opened(tab, address)
    tab.wait("document.querySelector('.answer')")
    asked(tab, "from the second tab")
    asked(page, "from the first tab")
    wait_until(lambda: len(stored(page)[0]["nodes"]) == 6)
    tab.wait("document.querySelectorAll('.chat').length === 1")


def test_settings_are_kept_and_can_be_reset(page: Page, server: PageServer) -> None:
    show_settings(page)
    page.write("#temperature", "0.3")
    page.write("#system", "Be brief.")
    reloaded(page)
    asked(page, "one")
    assert server.requests[-1]["temperature"] == 0.3
    assert messages(server)[0] == ("system", "Be brief.")
    show_settings(page)
    use(page, "Reset all", "#settings")
    asked(page, "two")
    assert "temperature" not in server.requests[-1]
    assert messages(server)[0][0] == "user"


def test_the_request_of_an_older_answer_is_the_one_that_was_sent(
    page: Page, server: PageServer
) -> None:
    show_settings(page)
    page.write("#seed", "7")
    asked(page, "one")
    page.write("#seed", "8")
    reloaded(page)
    page.wait("document.querySelector('.answer')")
    assert last_request(page) == server.requests[-1]


def test_several_models_can_be_chosen_from(server: PageServer, new_page: NewPage) -> None:
    server.models = ["first", "second"]
    page = opened(new_page(), server.url)
    page.js("document.querySelector('#models').value = 'second'; 0")
    page.js("document.querySelector('#models').dispatchEvent(new Event('change')); 0")
    asked(page, "one")
    assert server.requests[-1]["model"] == "second"


def test_the_live_view_folds_away_stops_reading_and_remembers_it(
    page: Page, server: PageServer
) -> None:
    def num_reads() -> int:
        return sum(url.endswith("/metrics") for url in page.urls())

    page.wait("document.querySelector('#live').checkVisibility()")
    wait_until(lambda: num_reads() > 1)
    page.click("#live-open")
    page.wait("!document.querySelector('#live').checkVisibility()")
    assert page.js("document.querySelector('#live-open').ariaExpanded") == "false"
    time.sleep(1.2)
    before = num_reads()
    time.sleep(2.5)
    assert num_reads() == before
    reloaded(page)
    assert not page.js("document.querySelector('#live').checkVisibility()")
    page.click("#live-open")
    wait_until(lambda: num_reads() > before)


def test_the_live_view_shows_rates_between_readings_that_are_far_apart(
    server: PageServer, new_page: NewPage
) -> None:
    """As after a while in a hidden tab. The page's clock goes five times as fast."""
    page = new_page()
    source = "const now = performance.now.bind(performance); performance.now = () => 5 * now();"
    page.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    opened(page, server.url)
    page.wait("document.querySelector('#tokens .value').textContent !== '\\u2013'")
    assert page.text("#tokens .value") == "0"
    assert page.console_errors() == []


def test_a_phone_reads_no_metrics_until_it_shows_them(
    server: PageServer, new_page: NewPage
) -> None:
    page = opened(new_page(), server.url, PHONE)
    time.sleep(2)
    assert not any(url.endswith("/metrics") for url in page.urls())
    page.click("[data-show=live]")
    wait_until(lambda: any(url.endswith("/metrics") for url in page.urls()))


def test_on_a_phone_the_list_covers_the_conversation_until_one_is_opened(
    server: PageServer, new_page: NewPage
) -> None:
    server.answer = echoed
    page = opened(new_page(), server.url, PHONE)
    asked(page, "one")
    page.click("#new")
    page.click("#chats-open")
    page.wait("document.activeElement.id === 'chats-new'")
    page.press("Escape")
    page.wait(
        "document.querySelector('#chats').hidden && document.activeElement.id === 'chats-open'"
    )
    page.click("#chats-open")
    page.click(".chat")
    page.wait("document.querySelector('#chats').hidden && document.querySelector('.answer')")


def test_the_keyboard_starts_a_conversation_and_searches(page: Page) -> None:
    asked(page, "one")
    key = {"type": "keyDown", "modifiers": 2 | 8, "key": "O", "code": "KeyO"}
    page.call("Input.dispatchKeyEvent", **key, windowsVirtualKeyCode=79)
    page.wait("!document.querySelector('article')")
    key = {"type": "keyDown", "modifiers": 2, "key": "k", "code": "KeyK"}
    page.call("Input.dispatchKeyEvent", **key, windowsVirtualKeyCode=75)
    page.wait("document.activeElement.id === 'chats-find'")
