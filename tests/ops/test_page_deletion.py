"""Deleting a message on the page at `/`: what goes with it, what stays, and that it stays away."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Page
from tests.support.chat_page import (
    NewPage,
    answers,
    asked,
    confirm,
    downloaded,
    finished,
    import_file,
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


def ask_to_delete(page: Page, kind: str, nth: int = -1) -> str:
    """Of the messages of a class, one's button. Returns what the page asks."""
    page.js(
        f"[...[...document.querySelectorAll('.{kind}')].at({nth}).querySelectorAll('button')]"
        ".find((e) => e.textContent === 'Delete').click(); 0"
    )
    page.wait("document.querySelector('#dialog').open")
    return page.text("#dialog-text")


def delete(page: Page, kind: str, nth: int = -1) -> None:
    ask_to_delete(page, kind, nth)
    confirm(page, "Delete")


def stored_texts(page: Page) -> list[str]:
    return [node["text"] for each in stored(page) for node in each["nodes"].values()]


def test_a_message_goes_with_all_that_follow_it_and_stays_away(
    page: Page, server: PageServer
) -> None:
    for question in ("one", "two", "three"):
        asked(page, question)
    assert "this question and the 3 messages after it?" in ask_to_delete(page, "question", 1)
    confirm(page, "Delete")
    page.wait("document.querySelectorAll('article').length === 2")
    assert (questions(page), answers(page)) == (["one"], ["You said one"])
    wait_until(lambda: stored_texts(page) == ["one", "**You said** one"])
    reloaded(page)
    page.wait("document.querySelector('.answer')")
    assert questions(page) == ["one"]
    asked(page, "four")
    assert [each["content"] for each in server.requests[-1]["messages"]] == [
        "one",
        "**You said** one",
        "four",
    ]


def test_nothing_is_deleted_until_it_is_confirmed(page: Page) -> None:
    asked(page, "one")
    assert "undone" in ask_to_delete(page, "answer")
    confirm(page, "Cancel")
    ask_to_delete(page, "answer")
    page.press("Escape")
    page.wait("!document.querySelector('#dialog').open")
    assert answers(page) == ["You said one"]
    assert len(stored_texts(page)) == 2


def test_a_question_whose_answer_is_deleted_can_be_answered_again(
    page: Page, server: PageServer
) -> None:
    asked(page, "one")
    delete(page, "answer")
    page.wait("document.querySelector('.failed')")
    assert page.js("document.activeElement.id") == "conversation"
    server.says("Another.")
    use(page, "Answer")
    finished(page)
    assert answers(page) == ["Another."]
    assert [each["content"] for each in server.requests[-1]["messages"]] == ["one"]


@pytest.mark.parametrize(
    ("shown", "left", "count"), [(1, "2", "1/2"), (2, "1", "1/2"), (3, "2", "2/2")]
)
def test_the_version_beside_a_deleted_one_is_shown_instead(
    page: Page, server: PageServer, shown: int, left: str, count: str
) -> None:
    server.says("1")
    asked(page, "one")
    for text in ("2", "3"):
        server.says(text)
        use(page, "Regenerate")
        finished(page)
    for _ in range(3 - shown):
        use(page, "Previous version")
    assert answers(page) == [str(shown)]
    delete(page, "answer")
    page.wait(f"document.querySelector('.content').textContent.trim() === '{left}'")
    assert page.text(".count") == count
    assert len(stored_texts(page)) == 3


def test_the_results_of_a_tool_call_are_deleted_and_sent_again(
    page: Page, server: PageServer
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    show_settings(page)
    page.write("#tools", json.dumps([tool]))
    page.click("#settings-open")
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": "{}"}}
    server.answer = lambda body: [{"delta": {"tool_calls": [call]}}]
    asked(page, "Weather?")
    server.says("Rain.")
    for result in ("wrong", "12 degrees"):
        page.write(".result-form textarea", result)
        use(page, "Send results")
        finished(page, 2)
        assert server.requests[-1]["messages"][-1]["content"] == result
        if result == "wrong":
            delete(page, "results")  # which brings the form back
            page.wait("document.querySelector('.result-form')?.checkVisibility()")


def test_a_conversation_without_messages_is_deleted_too(page: Page) -> None:
    asked(page, "one")
    assert "so it is deleted too" in ask_to_delete(page, "question")
    confirm(page, "Delete")
    page.wait("!document.querySelector('article')")
    page.wait("document.querySelector('#welcome').checkVisibility()")
    assert titles(page) == [] and stored(page) == []


def test_a_message_is_deleted_from_the_store_while_nothing_new_is_stored(page: Page) -> None:
    asked(page, "one")
    asked(page, "a secret")
    page.click("#storing")
    delete(page, "question")
    page.wait("document.querySelectorAll('article').length === 2")
    wait_until(lambda: stored_texts(page) == ["one", "**You said** one"])


def test_a_deleted_message_is_not_in_the_export(
    page: Page, server: PageServer, new_page: NewPage, tmp_path: Path
) -> None:
    asked(page, "one")
    asked(page, "a secret")
    delete(page, "question")
    page.wait("document.querySelectorAll('article').length === 2")
    folder = tmp_path / "downloads"
    folder.mkdir()
    text = downloaded(page, folder, lambda: use(page, "Export all", "#chats"))
    assert "secret" not in text
    file = tmp_path / "kept.json"
    file.write_text(text)
    other = opened(new_page(), server.url)
    import_file(other, file)
    other.wait("document.querySelector('.chat')")
    other.click(".chat")
    other.wait("document.querySelector('.answer')")
    assert (questions(other), answers(other)) == (["one"], ["You said one"])


def test_a_message_that_another_tab_deletes_goes_here_too_and_does_not_come_back(
    page: Page,
) -> None:
    asked(page, "one")
    asked(page, "two")
    tab = page.beside()
    opened(tab, page.js("location.href"))
    tab.wait("document.querySelectorAll('.answer').length === 2")
    delete(tab, "question")
    page.wait("document.querySelectorAll('.answer').length === 1")
    asked(page, "three")
    assert questions(page) == ["one", "three"]
    wait_until(lambda: len(stored_texts(page)) == 4)
    assert "two" not in stored_texts(page)


def test_an_answer_that_arrives_below_a_message_that_another_tab_deletes_is_stopped(
    page: Page, server: PageServer
) -> None:
    asked(page, "one")
    server.says("word " * 2000, pause_s=0.01)
    send(page, "two")
    page.wait("[...document.querySelectorAll('.content')].at(-1).textContent.length > 10")
    wait_until(lambda: len(stored_texts(page)) == 4)
    tab = page.beside()
    opened(tab, page.js("location.href"))
    tab.wait("document.querySelectorAll('.question').length === 2")
    delete(tab, "question")
    finished(page)
    assert questions(page) == ["one"]
    time.sleep(1.5)  # longer than the time between two writes of a running answer
    assert stored_texts(page) == ["one", "**You said** one"]


def test_nothing_is_deleted_while_an_answer_arrives(page: Page, server: PageServer) -> None:
    server.answer = lambda body: said("word " * 2000)
    server.pause_s = 0.01
    send(page, "one")
    page.wait("document.querySelector('.content')?.textContent.length > 10")
    use(page, "Delete", ".question")
    assert "still arriving" in page.text("#ask-error")
    assert not page.js("document.querySelector('#dialog').open")
    page.press("Escape")
    finished(page)
