"""Drives a headless Firefox with its built-in protocol, Marionette: no driver."""

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

_TIMEOUT_S = 60.0
_PREFERENCES = {
    "marionette.port": 0,  # a free port, which Firefox writes into its profile
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.update.disabledForTesting": True,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
}
_KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"}
# Errors of the page's scripts and its security policy in the browser's console.
_CONSOLE_ERRORS = """
return Services.console.getMessageArray()
  .filter((m) => m instanceof Ci.nsIScriptError && m.sourceName.startsWith(arguments[0]))
  .map((m) => m.errorMessage);"""


def firefox() -> str:
    """The path of the program; fails with installation instructions if there is none."""
    for name in ("firefox-esr", "firefox"):
        if path := shutil.which(name):
            return path
    pytest.fail("these tests need Firefox: apt-get install firefox-esr")


class Firefox:
    """One window, operated as a user would."""

    def __init__(self, profile: Path) -> None:
        lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});" for k, v in _PREFERENCES.items()]
        (profile / "user.js").write_text("\n".join(lines))
        command = [firefox(), "--headless", "--marionette", "--no-remote"]
        # System access allows reading its console.
        command += ["--remote-allow-system-access", "--profile", str(profile)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port_file = profile / "MarionetteActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text(), timeout_s=_TIMEOUT_S)
        address = ("127.0.0.1", int(port_file.read_text()))
        self._socket = socket.create_connection(address, timeout=_TIMEOUT_S)
        self._in = self._socket.makefile("rb")
        self._read()  # its greeting
        self.call("WebDriver:NewSession")

    def call(self, command: str, **parameters: Any) -> Any:
        """Returns a command's result. Raises AssertionError for a protocol error."""
        message = json.dumps([0, 1, command, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, _, error, result = self._read()
        assert error is None, (command, error)
        return result

    def _read(self) -> Any:
        """Reads a message: its length, a colon, JSON."""
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
        """Waits until the expression is truthy."""
        deadline_s = time.monotonic() + _TIMEOUT_S
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
        """Types a text, or presses the key if the text is a name in `_KEYS`."""
        self.call("WebDriver:ElementSendKeys", id=self._find(selector), text=_KEYS.get(text, text))

    def size(self, width: int, height: int) -> None:
        """Sets the size of the page, not of the window."""
        self.call("WebDriver:SetWindowRect", width=width, height=height)
        edge = self.js("[outerWidth - innerWidth, outerHeight - innerHeight]")
        self.call("WebDriver:SetWindowRect", width=width + edge[0], height=height + edge[1])

    def console_errors(self, url: str) -> list[str]:
        """Console errors and warnings of scripts from `url`."""
        self.call("Marionette:SetContext", value="chrome")
        try:
            found: list[str] = self._script(_CONSOLE_ERRORS, url)
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
