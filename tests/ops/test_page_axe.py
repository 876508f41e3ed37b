"""The page at `/` under all of axe-core's rules of accessibility, on wide and narrow screens."""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator

import pytest

from tests.support.chat_page import DESKTOP, PHONE, NewPage, asked, opened, show_settings, use
from tests.support.page_server import PageServer, running_page_server, said
from tests.support.paths import ROOT

_BUILD = ROOT / "build" / "axe"
_VERSION = "4.14.1"
_ANSWER = """# Title

Text with a [link](https://example.com), `code` and **more**.

```python
x = {"a": 1}  # colours have contrast, too
```

| a | b |
|---|--:|
| 1 | 2 |

> said

- [ ] open

With $e^{i\\pi} = -1$:

$$\\sum_{i=1}^n i = \\frac{n(n+1)}{2}$$
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with running_page_server() as server:
        server.answer = lambda body: [
            {"delta": {"reasoning_content": "Let me think."}},
            *said(_ANSWER),
            {"delta": {"tool_calls": [_CALL]}},
        ]
        yield server


_CALL = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": "{}"}}


@pytest.fixture(scope="module")
def axe() -> str:
    """The program, which is run in the page."""
    if not shutil.which("npm"):
        pytest.fail("this test needs npm; run: apt-get install nodejs npm")
    archive = _BUILD / f"axe-core-{_VERSION}.tgz"
    if not archive.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"axe-core@{_VERSION}", "--pack-destination"]
        subprocess.run([*command, str(_BUILD)], check=True, capture_output=True)
    with tarfile.open(archive) as files:
        program = files.extractfile("package/axe.min.js")
        assert program is not None
        return program.read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_no_fault(
    server: PageServer, new_page: NewPage, axe: str, scheme: str, size: tuple[int, int]
) -> None:
    page = opened(new_page(), server.url, size)
    page.emulate(width=size[0], height=size[1], scheme=scheme)
    page.js(f"{axe}; 0")

    def check(where: str) -> None:
        found = page.js(
            "axe.run().then(({violations}) => violations.map((each) =>"
            " [each.id, each.help, each.nodes.map((node) => node.html + node.failureSummary)]))"
        )
        assert found == [], (where, json.dumps(found, indent=1))

    check("empty")
    asked(page, "Show me everything.")
    page.wait("document.querySelector('.hljs-string')")
    page.wait("document.querySelectorAll('.katex').length === 2")
    page.js("document.querySelector('.reasoning').open = true; 0")
    check("answer")
    use(page, "Regenerate")
    page.wait("document.querySelector('.answer:not(.running) .versions')")
    use(page, "curl")
    page.click(".question button:nth-of-type(2)")
    check("versions, request and editor")
    show_settings(page)
    page.click("#key-open")
    check("settings and key")
    if size == PHONE:
        page.click("[data-show=live]")
        check("live")
        page.click("#chats-open")
    page.js("document.querySelector('#chats-list .more').click(); 0")
    check("menu")
    page.click("#chat-delete")
    page.wait("document.querySelector('#dialog').open")
    check("dialog")
