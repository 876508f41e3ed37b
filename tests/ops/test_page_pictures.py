"""Pictures on the page, in Chromium: dropped and pasted, shown, sent, removed and kept."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Page
from tests.support.chat_page import (
    NewPage,
    finished,
    last_request,
    opened,
    reloaded,
    send,
    stored,
)
from tests.support.image_prompts import QWEN, data_url, picture, write_prompt_files
from tests.support.serving import RunningServer, running_server, wait_until

# SCREENSHOTS=folder keeps screenshots.
_SCREENSHOTS = os.environ.get("SCREENSHOTS")
FILES = {"a.png": picture(320, 200), "b.jpg": picture(120, 240, "JPEG")}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("seeing")
    write_prompt_files(directory, QWEN)
    names = ("--served-model-name", "qwen3-vl-tiny", "--max-model-len", "4000")
    with running_server("--model", str(directory), *names) as server:
        yield server


@pytest.fixture
def page(seeing: RunningServer, new_page: NewPage) -> Iterator[Page]:
    page = opened(new_page(), seeing.url)
    yield page
    assert page.console_errors() == []
    assert all(url.startswith(seeing.url + "/") for url in page.urls())


def give(page: Page, how: str, *names: str, kind: str = "image/png") -> None:
    """Pastes or drops files, as the browser does when its user has."""
    parts = [
        f"new File([Uint8Array.from(atob('{base64.b64encode(FILES[name]).decode()}'),"
        f"(c) => c.charCodeAt(0))], '{name}',"
        f"{{type: '{'image/jpeg' if name.endswith('jpg') else kind}'}})"
        for name in names
    ]
    kinds = {"paste": ("ClipboardEvent", "clipboardData"), "drop": ("DragEvent", "dataTransfer")}
    event, member = kinds[how]
    added = "".join(f"data.items.add({part});" for part in parts)
    page.js(
        f"(() => {{ const data = new DataTransfer(); {added}"
        f"document.getElementById('prompt').dispatchEvent(new {event}('{how}',"
        f"{{{member}: data, bubbles: true, cancelable: true}})); return true; }})()"
    )


def num_waiting(page: Page) -> int:
    return int(page.js("document.querySelectorAll('#pictures canvas').length"))


def test_pictures_that_are_dropped_and_pasted_are_sent_with_the_question(page: Page) -> None:
    give(page, "drop", "a.png")
    wait_until(lambda: num_waiting(page) == 1)
    give(page, "paste", "b.jpg")
    wait_until(lambda: num_waiting(page) == 2)
    if _SCREENSHOTS:
        page.write("#prompt", "What are these?")
        page.screenshot(Path(_SCREENSHOTS) / "pictures.png")
        page.js("document.getElementById('prompt').value = ''; 0")
    send(page, "What are these?")
    finished(page)
    (message,) = last_request(page)["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": data_url(FILES["a.png"])}},
        {"type": "image_url", "image_url": {"url": data_url(FILES["b.jpg"], "image/jpeg")}},
        {"type": "text", "text": "What are these?"},
    ]
    assert num_waiting(page) == 0
    sizes = "[...document.querySelectorAll('.question canvas')].map((c) => [c.width, c.height])"
    page.wait(f"JSON.stringify({sizes}) === '[[160,100],[80,160]]'")
    assert [each["images"][0][:22] for each in nodes(page) if "images" in each] == [
        "data:image/png;base64,"
    ]
    reloaded(page)
    page.click(".chat")
    page.wait("document.querySelectorAll('.question canvas').length === 2")


def nodes(page: Page) -> list[dict[str, list[str]]]:
    (conversation,) = stored(page)
    return list(conversation["nodes"].values())


def test_a_picture_may_be_removed_and_a_question_may_be_one_alone(page: Page) -> None:
    give(page, "paste", "a.png", "b.jpg")
    wait_until(lambda: num_waiting(page) == 2)
    page.click("#pictures button")
    assert num_waiting(page) == 1
    page.click("#send")
    finished(page)
    (message,) = last_request(page)["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/jpeg")


def test_a_file_that_is_no_picture_is_told(page: Page) -> None:
    give(page, "drop", "a.png", kind="image/svg+xml")
    page.wait("document.getElementById('ask-error').textContent.startsWith('Only PNG')")
    assert num_waiting(page) == 0
