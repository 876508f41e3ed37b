"""What the browser tests of the page at `/` do again and again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.browser import NewPage as NewPage
from tests.support.browser import Page
from tests.support.serving import wait_until

DESKTOP, PHONE = (1440, 900), (360, 740)


def opened(page: Page, url: str, size: tuple[int, int] = DESKTOP) -> Page:
    page.emulate(width=size[0], height=size[1])
    page.open(url)
    page.wait("document.querySelector('#state').dataset.state === 'ready'")
    return page


def send(page: Page, question: str) -> None:
    page.write("#prompt", question)
    page.press("Enter")


def finished(page: Page, num_answers: int = 1) -> None:
    page.wait(f"document.querySelectorAll('.answer:not(.running)').length === {num_answers}")
    page.wait("!document.querySelector('#send').hidden")


def asked(page: Page, question: str) -> None:
    """Sends a question and waits for the end of its answer."""
    num_answers = page.js("document.querySelectorAll('.answer').length")
    send(page, question)
    finished(page, num_answers + 1)


def show_settings(page: Page) -> None:
    page.click("#settings-open")
    page.wait("!document.querySelector('#settings').hidden")


def choose(page: Page, selector: str, value: str) -> None:
    """An option of a selection."""
    element = f"document.querySelector({json.dumps(selector)})"
    page.js(f"{element}.value = {json.dumps(value)}; 0")
    page.js(f"{element}.dispatchEvent(new Event('input', {{bubbles: true}})); 0")


def use(page: Page, name: str, within: str = "#conversation") -> None:
    """Clicks the last visible button of that name."""
    found = page.js(
        f"(() => {{ const e = [...document.querySelectorAll({json.dumps(within + ' button')})]"
        f".filter((e) => [e.textContent, e.ariaLabel].includes({json.dumps(name)}))"
        ".filter((e) => e.checkVisibility()).at(-1); e?.click(); return Boolean(e); })()"
    )
    assert found, f"no button {name}: {page.text(within)}"


def has_button(page: Page, name: str) -> bool:
    names: list[str] = page.js(
        "[...document.querySelectorAll('#conversation button')]"
        ".filter((e) => e.checkVisibility()).map((e) => e.textContent)"
    )
    return name in names


def answers(page: Page) -> list[str]:
    texts: list[str] = page.js(
        "[...document.querySelectorAll('.answer .content')].map((e) => e.innerText.trim())"
    )
    return texts


def questions(page: Page) -> list[str]:
    texts: list[str] = page.js("[...document.querySelectorAll('.said')].map((e) => e.textContent)")
    return texts


def titles(page: Page) -> list[str]:
    """The conversations in the list."""
    texts: list[str] = page.js("[...document.querySelectorAll('.chat')].map((e) => e.textContent)")
    return texts


def last_request(page: Page) -> dict[str, Any]:
    """The body in the curl command of the last answer."""
    line: str = page.js(
        "(() => { const last = [...document.querySelectorAll('.answer')].at(-1);"
        "const opener = [...last.querySelectorAll('button')].find((e) => e.textContent === 'curl');"
        "if (opener.ariaExpanded === 'false') opener.click();"
        "return last.querySelector('.curl pre').textContent; })()"
    )
    body: dict[str, Any] = json.loads(line.partition("-d '")[2][:-1].replace("'\\''", "'"))
    return body


def reloaded(page: Page) -> None:
    page.call("Page.reload")
    page.wait("document.readyState === 'complete'")
    page.wait("document.querySelector('#state')?.dataset.state === 'ready'")


def confirm(page: Page, name: str) -> None:
    page.wait("document.querySelector('#dialog').open")
    use(page, name, "#dialog")
    page.wait("!document.querySelector('#dialog').open")


def choose_from_menu(page: Page, item: str, nth: int = 0) -> None:
    page.js(f"document.querySelectorAll('#chats-list .more')[{nth}].click(); 0")
    page.wait("document.querySelector('#chat-menu').matches(':popover-open')")
    page.click(f"#chat-{item}")


def downloaded(page: Page, folder: Path, act: Callable[[], None]) -> str:
    """What act() downloads into the empty folder."""
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    act()
    wait_until(lambda: any(not path.name.endswith(".crdownload") for path in folder.iterdir()))
    [path] = folder.iterdir()
    return path.read_text()


def import_file(page: Page, path: Path) -> None:
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    field = page.call("DOM.querySelector", nodeId=root, selector="#import-file")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=field, files=[str(path)])


def stored(page: Page) -> list[dict[str, Any]]:
    """The conversations in the browser's IndexedDB."""
    conversations: list[dict[str, Any]] = page.js(
        "new Promise((resolve) => { const open = indexedDB.open('penstock');"
        "open.onsuccess = () => { const read = open.result.transaction('conversations')"
        ".objectStore('conversations').getAll();"
        "read.onsuccess = () => { open.result.close(); resolve(read.result); }; }; })"
    )
    return conversations
