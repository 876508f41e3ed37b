"""A headless Firefox by Marionette, the protocol it speaks itself: no driver needed."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import wait_until

_PATIENCE_S = 60.0
_PREFERENCES = {
    "marionette.port": 0,  # a free one, which it writes into its profile
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.update.disabledForTesting": True,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
}
_KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"}
# What the page's scripts and its security policy complain of, as the browser's console has it.
_COMPLAINTS = """
return Services.console.getMessageArray()
  .filter((m) => m instanceof Ci.nsIScriptError && m.sourceName.startsWith(arguments[0]))
  .map((m) => m.errorMessage);"""


def firefox() -> str:
    """Its path; fails with what to install where there is none."""
    for name in ("firefox-esr", "firefox"):
        if path := shutil.which(name):
            return path
    pytest.fail("these tests need Firefox: apt-get install firefox-esr")


class Firefox:
    """One window: what a person would do to it, and what it shows."""

    def __init__(self, profile: Path) -> None:
        lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});" for k, v in _PREFERENCES.items()]
        (profile / "user.js").write_text("\n".join(lines))
        command = [firefox(), "--headless", "--marionette", "--no-remote"]
        # System access, so that its console can be read.
        command += ["--remote-allow-system-access", "--profile", str(profile)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port_file = profile / "MarionetteActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text(), timeout_s=_PATIENCE_S)
        address = ("127.0.0.1", int(port_file.read_text()))
        self._socket = socket.create_connection(address, timeout=_PATIENCE_S)
        self._in = self._socket.makefile("rb")
        self._read()  # its greeting
        self.call("WebDriver:NewSession")

    def call(self, command: str, **parameters: Any) -> Any:
        """A command's result. An error of the protocol is an AssertionError."""
        message = json.dumps([0, 1, command, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, _, error, result = self._read()
        assert error is None, (command, error)
        return result

    def _read(self) -> Any:
        """A message: its length, a colon, JSON."""
        length = b""
        while (digit := self._in.read(1)) != b":":
            assert digit, "Firefox has ended"
            length += digit
        return json.loads(self._in.read(int(length)))

    def open(self, url: str) -> None:
        self.call("WebDriver:Navigate", url=url)

    def js(self, expression: str) -> Any:
        return self._script(f"return ({expression});")

    def _script(self, script: str, *arguments: Any) -> Any:
        return self.call("WebDriver:ExecuteScript", script=script, args=arguments)["value"]

    def wait(self, expression: str) -> None:
        """Until it is truthy."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not self.js(f"Boolean({expression})"):
            text = self.js("document.body.innerText")
            assert time.monotonic() < deadline_s, f"never true: {expression}; {text}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        text: str = self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return text

    def _find(self, selector: str) -> str:
        found = self.call("WebDriver:FindElement", using="css selector", value=selector)
        (element_id,) = found["value"].values()
        return str(element_id)

    def click(self, selector: str) -> None:
        self.call("WebDriver:ElementClick", id=self._find(selector))

    def write(self, selector: str, text: str) -> None:
        """As typed; a key's name that `_KEYS` has is that key."""
        self.call("WebDriver:ElementSendKeys", id=self._find(selector), text=_KEYS.get(text, text))

    def size(self, width: int, height: int) -> None:
        """Of the page, not of the window."""
        self.call("WebDriver:SetWindowRect", width=width, height=height)
        edge = self.js("[outerWidth - innerWidth, outerHeight - innerHeight]")
        self.call("WebDriver:SetWindowRect", width=width + edge[0], height=height + edge[1])

    def complaints(self, url: str) -> list[str]:
        """Errors and warnings on its console that come from there."""
        self.call("Marionette:SetContext", value="chrome")
        try:
            found: list[str] = self._script(_COMPLAINTS, url)
        finally:
            self.call("Marionette:SetContext", value="content")
        return found

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Marionette:Quit", flags=["eForceQuit"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._in.close()
        self._socket.close()


@contextlib.contextmanager
def running_firefox(profile: Path) -> Iterator[Firefox]:
    browser = Firefox(profile)
    try:
        yield browser
    finally:
        browser.close()
