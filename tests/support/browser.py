"""Drives a headless Chromium over a pipe with the DevTools protocol: no driver, no websocket."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_S = 20.0
# --no-sandbox, because the sandbox needs user namespaces, which containers often lack.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def chromium() -> str:
    """The path of the program; fails with installation instructions if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.fail("these tests need Chromium: apt-get install chromium")


class Browser:
    """Sends commands, and reads responses and events in a thread so that no event is missed."""

    def __init__(self, profile: Path, *flags: str) -> None:
        to_read, write = os.pipe()
        read, to_write = os.pipe()
        # Chromium uses file descriptors 3 and 4; the shell assigns them.
        command = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        arguments = [chromium(), *_FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._out = os.fdopen(write, "wb", buffering=0)
        self._in = os.fdopen(read, "rb")
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self._last_id = 0
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Returns a command's result. Raises AssertionError for a protocol error."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        with self._arrived:
            has_come = self._arrived.wait_for(
                lambda: message["id"] in self._answers, timeout=_TIMEOUT_S
            )
            assert has_come, f"Chromium did not answer {method}"
            answer = self._answers.pop(self._last_id)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def new_tab(self, context: str) -> "Page":
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        return Page(self, attached["sessionId"])

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._reader.join(timeout=10)
        self._in.close()

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._in.fileno(), 1 << 16):
            *whole, rest = (rest + data).split(b"\0")
            with self._arrived:
                for message in map(json.loads, whole):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._arrived.notify_all()


class Page:
    """One tab, operated as a user would."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def beside(self) -> "Page":
        """Another tab, with the same storage."""
        context = self.call("Target.getTargetInfo")["targetInfo"]["browserContextId"]
        return self._browser.new_tab(context)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression, or of its promise."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Waits until the expression is truthy."""
        deadline_s = time.monotonic() + timeout_s
        while not self.js(f"Boolean({expression})"):
            assert time.monotonic() < deadline_s, f"never true: {expression}; {self.text()}"
            time.sleep(0.05)

    def text(self, selector: str = "body") -> str:
        text: str = self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return text

    def click(self, selector: str) -> None:
        """Clicks with the mouse: the topmost element at that position gets the click."""
        where = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=where[0],
                y=where[1],
                button="left",
                clickCount=1,
            )

    def write(self, selector: str, text: str) -> None:
        """Replaces the text of a field."""
        self.js(f"document.querySelector({json.dumps(selector)}).select()")
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                modifiers=8 if shift else 0,
                **(text if kind == "keyDown" else {}),
            )

    def emulate(self, *, width: int, height: int, scheme: str = "light", motion: str = "") -> None:
        """Sets the window's size and the emulated system preferences."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def urls(self) -> list[str]:
        """The URLs of all its requests."""
        sent = self._of("Network.requestWillBeSent")
        return [event["request"]["url"] for event in sent]

    def console_errors(self) -> list[str]:
        """Console errors and warnings, and uncaught exceptions."""
        logged = [
            entry["entry"]["text"] + " " + entry["entry"].get("url", "")
            for entry in self._of("Log.entryAdded")
            if entry["entry"]["level"] in ("error", "warning")
        ]
        called = [
            str(event["args"])
            for event in self._of("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        thrown = [str(event["exceptionDetails"]) for event in self._of("Runtime.exceptionThrown")]
        return logged + called + thrown

    def _of(self, method: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in list(self._browser.events)
            if event["method"] == method and event.get("sessionId") == self._session
        ]


NewPage = Callable[[], Page]


@contextlib.contextmanager
def running_browser(profile: Path, *flags: str) -> Iterator[NewPage]:
    """Yields a function that opens a tab with storage of its own."""
    browser = Browser(profile, *flags)

    def new_page() -> Page:
        return browser.new_tab(browser.call("Target.createBrowserContext")["browserContextId"])

    try:
        yield new_page
    finally:
        browser.close()
