"""A small server that speaks the routes of Hugging Face's hub, for downloads without a network."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40


@dataclass
class StubHub:
    """repositories: name -> path of a file -> content. Some files are special:

    cuts: path -> after how many bytes the connection is closed, once each.
    gates: path -> an event to wait for before the second half of the file is sent.
    refusals: name -> (status, X-Error-Code). sizes: path -> a size that is not its own.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def add(self, name: str, directory: Path, **others: bytes) -> None:
        """The files of a directory. others: further files, or other content, by path."""
        self.repositories[name] = {
            path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()
        } | others

    @property
    def fetched(self) -> list[str]:
        """The files whose content was sent, in order."""
        return [path for method, path, _ in self.requests if method == "GET" and path]

    def environment(self, home: Path, **others: str) -> dict[str, str]:
        """Of a process that downloads from it, into `home`."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": "",
            **others,
        }


@contextlib.contextmanager
def stub_hub() -> Iterator[StubHub]:
    hub = StubHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for gate in hub.gates.values():
            gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: StubHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        with contextlib.suppress(ConnectionError):
            if path.startswith("/api/models/"):
                self._list(path.removeprefix("/api/models/").partition("/revision/")[0])
            else:
                name, _, rest = path.removeprefix("/").partition("/resolve/")
                self._send_file(name, rest.partition("/")[2])

    def _list(self, name: str) -> None:
        self.hub.requests.append((self.command, "", None))
        files = self.hub.repositories.get(name)
        if name in self.hub.refusals:
            self._refuse(*self.hub.refusals[name])
        elif files is None:
            self._refuse(401, "RepoNotFound")
        else:
            siblings = [self._sibling(path, content) for path, content in files.items()]
            body = {"id": name, "sha": COMMIT, "private": False, "siblings": siblings}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _sibling(self, path: str, content: bytes) -> dict[str, Any]:
        size = self.hub.sizes.get(path, len(content))
        sibling: dict[str, Any] = {"rfilename": path, "size": size, "blobId": "b" * 40}
        if path.endswith(".safetensors"):
            sibling["lfs"] = {"sha256": _etag(content), "size": size, "pointerSize": 134}
        return sibling

    def _send_file(self, name: str, path: str) -> None:
        content = self.hub.repositories.get(name, {}).get(path)
        if name in self.hub.gated:
            self.hub.requests.append(("REFUSED", path, None))
            return self._refuse(403, "GatedRepo")
        if name not in self.hub.repositories:
            return self._refuse(401, "RepoNotFound")
        if content is None:
            return self._refuse(404, "EntryNotFound")
        given = self.headers.get("Range")
        self.hub.requests.append((self.command, path, given))
        start = int(given.removeprefix("bytes=").partition("-")[0]) if given else 0
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206 if start else 200, content[start:], headers, path)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], path: str = "") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cuts := self.hub.cuts.get(path):
            self.wfile.write(body[: cuts.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            return
        half = len(body) // 2 if path in self.hub.gates else 0
        self.wfile.write(body[:half])
        self.wfile.flush()
        if half:
            self.hub.gates[path].wait(60)
        self.wfile.write(body[half:])


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
