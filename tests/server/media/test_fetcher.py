"""Images by URL: which hosts and addresses are asked, and what they may answer."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.server.media.decoder import BadImage
from penstock.server.media.fetcher import ImageFetcher, is_public

HOST = "images.example"
CONTENT = b"\x89PNG" + bytes(range(256)) * 100


def test_addresses_of_networks_that_are_not_public_are_known() -> None:
    private = (
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1", "64:ff9b:1::a00:1"),
        *("2002:7f00:1::", "2001:0:7f00:1::"),
    )
    assert [each for each in private if is_public(each)] == []
    assert all(map(is_public, ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111")))


@pytest.mark.parametrize(
    "url",
    [
        f"http://{HOST}/a.png",
        "file:///etc/passwd",
        f"ftp://{HOST}/a.png",
        f"//{HOST}/a.png",
        "gopher://127.0.0.1:6379/_x",
        "https://127.0.0.1/a.png",
        "https://[::1]/a.png",
        "https://2130706433/a.png",
        "https://other.example/a.png",
        f"https://{HOST}.other.example/a.png",
        f"https://{HOST}./a.png",
        f"https://{HOST}:444/a.png",
        f"https://other.example@{HOST}/a.png",
        f"https://{HOST}@other.example/a.png",
        f"https://other.example\\@{HOST}/a.png",
        f"https://{HOST}\\@other.example/a.png",
        f"https://{HOST}\\.other.example/a.png",
        f"https://{HOST}%2eother.example/a.png",
        f"https://other.example#@{HOST}/a.png",
        f"https://{HOST} .other.example/",
        f"https://{HOST}/a\r\nHost: other.example",
        f"https://{HOST}/a b",
        f"https://{HOST}/é.png",
        f"https://{HOST}/" + "a" * 9000,
        f"\thttps://{HOST}/a.png",
        "https://",
        "",
    ],
)
async def test_a_url_that_is_not_of_an_allowed_host_reaches_nothing(url: str) -> None:
    asked: list[str] = []

    def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    fetcher = ImageFetcher((HOST,), 1000, resolve=resolve, is_allowed=lambda _: True)
    with pytest.raises(BadImage):
        await fetcher.fetch(url)
    assert asked == []
    fetcher.close()


@pytest.mark.parametrize(
    "addresses",
    [["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["169.254.169.254"], ["::1"], []],
    ids=str,
)
async def test_a_name_with_an_address_that_is_not_public_is_not_connected_to(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(socket, "create_connection", connect)
    fetcher = ImageFetcher((HOST,), 1000, resolve=lambda *_: addresses)
    with pytest.raises(BadImage, match="not public") as raised:
        await fetcher.fetch(f"https://{HOST}/a.png")
    assert not any(address in str(raised.value) for address in addresses)
    fetcher.close()


def make_certificate(directory: Path) -> tuple[Path, Path]:
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={HOST}", "-keyout", str(key)]
    command += ["-addext", f"subjectAltName=DNS:{HOST}", "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class Host:
    """A host that answers over TLS as `answer` writes."""

    def __init__(self, directory: Path, answer: Callable[[ssl.SSLSocket], None]) -> None:
        certificate, key = make_certificate(directory)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.trusts = ssl.create_default_context(cafile=certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.asked = b""
        self.thread = threading.Thread(target=self._serve, args=(context, answer), daemon=True)
        self.thread.start()

    def _serve(self, context: ssl.SSLContext, answer: Callable[[ssl.SSLSocket], None]) -> None:
        with (
            contextlib.suppress(OSError),
            self._listener,
            self._listener.accept()[0] as plain,
            context.wrap_socket(plain, server_side=True) as tls,
        ):
            while b"\r\n\r\n" not in self.asked:
                self.asked += tls.recv(4096)
            answer(tls)

    def fetch(self, path: str = "/a.png?b=c#d", **options: Any) -> bytes:
        settings: dict[str, Any] = {"max_bytes": 1 << 20, "context": self.trusts} | options
        url = f"{HOST}:{self.port}"
        fetcher = ImageFetcher(
            (url,), resolve=lambda *_: ["127.0.0.1"], is_allowed=lambda _: True, **settings
        )
        try:
            return asyncio.run(fetcher.fetch(f"https://{url}{path}"))
        finally:
            fetcher.close()
            self.thread.join(5)


def sends(*parts: bytes, pause_s: float = 0.0) -> Callable[[ssl.SSLSocket], None]:
    def answer(tls: ssl.SSLSocket) -> None:
        for part in parts:
            tls.sendall(part)
            time.sleep(pause_s)

    return answer


def head(status: str = "200 OK", *lines: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode()


def test_a_file_of_an_allowed_host_is_fetched(tmp_path: Path) -> None:
    length = f"Content-Length: {len(CONTENT)}"
    host = Host(tmp_path, sends(head("200 OK", length), CONTENT))
    assert host.fetch() == CONTENT
    assert host.asked.startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: images.example")


ANSWERS: dict[str, tuple[Callable[[ssl.SSLSocket], None], str]] = {
    "a redirect": (
        sends(head("302 Found", "Location: https://images.example/b", "Content-Length: 0")),
        "status 302; redirects are not followed",
    ),
    "no such file": (sends(head("404 Not Found", "Content-Length: 0")), "status 404"),
    "too many bytes": (sends(head(), *[bytes(1 << 16)] * 40), "larger than 1048576 bytes"),
    "half a file": (sends(head("200 OK", "Content-Length: 99"), b"a" * 50), "broke off"),
    "no HTTP": (sends(b"SSH-2.0-OpenSSH\r\n"), "cannot be reached"),
    "headers without end": (sends(head()[:-2], *[b"a: b\r\n"] * 2000), "cannot be reached"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_host_may_not_answer(tmp_path: Path, name: str) -> None:
    answer, reason = ANSWERS[name]
    with pytest.raises(BadImage, match=reason):
        Host(tmp_path, answer).fetch()


@pytest.mark.parametrize("start", [b"", head()], ids=["headers", "content"])
def test_a_host_that_sends_byte_by_byte_has_a_limit_for_all_of_it(
    tmp_path: Path, start: bytes
) -> None:
    host = Host(tmp_path, sends(start, *[b"a"] * 100, pause_s=0.05))
    before_s = time.monotonic()
    with pytest.raises(BadImage, match="in time"):
        host.fetch(timeout_s=0.5)
    assert time.monotonic() - before_s < 4


def test_a_certificate_of_another_name_is_not_accepted(tmp_path: Path) -> None:
    host = Host(tmp_path, sends(head("200 OK", "Content-Length: 0")))
    with pytest.raises(BadImage, match="cannot be reached"):
        host.fetch(context=ssl.create_default_context())
