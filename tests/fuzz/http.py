"""`python -m tests.fuzz.http SECONDS [SEED] [--requests N]`, part of `make test-fuzz`: HTTP that is
malformed.

Sends requests with changed, truncated, repeated or missing bytes over raw sockets. Every connection
must get valid responses or be closed within five seconds, without a server error, and the server
must still work afterwards.
"""

import json
import random
import re
import socket
import sys
import time

from tests.fuzz.bodies import DEADLINE_S, SEEDS, Extent, fuzzed_server
from tests.support.serving import MODEL, RunningServer

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "TRACE", "CONNECT", "PRI", "get", "")
_PATHS = (
    *SEEDS,
    "/health",
    "/metrics",
    "/v1/models",
    "/docs",
    "/v1/models/%2e%2e%2f",
    "*",
    "//",
    "",
)
_HEADERS = (
    "Content-Length: -1",
    "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: 99999999999999999999",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 3",
    "Transfer-Encoding: gzip",
    "Content-Encoding: gzip",
    "Content-Type: multipart/form-data; boundary=x",
    "Content-Type: application/json; charset=utf-16",
    "Expect: 100-continue",
    "Expect: the unexpected",
    "Connection: Upgrade\r\nUpgrade: websocket",
    "Connection: close",
    "Authorization: Bearer \xff\xfe",
    "X-Request-Id: a\tb",
    "X-Request-Id: " + "x" * 5000,
    "Host: ",
    "Host: [::1",
    "No colon",
    " Folded: value",
    "A: " + "b" * 300_000,
    "Origin: null",
    "Range: bytes=0-1",
)


def request_bytes(rng: random.Random) -> bytes:
    """A request, valid or with a few faults."""
    path = rng.choice(_PATHS)
    seeds = SEEDS.get(path, [{}])
    body = json.dumps({"model": MODEL} | rng.choice(seeds)).encode()
    method = "POST" if path in SEEDS and rng.random() < 0.7 else rng.choice(_METHODS)
    headers = ["Host: localhost", f"Content-Length: {len(body)}"]
    for _ in range(rng.choice((0, 0, 1, 2))):
        headers.insert(rng.randrange(len(headers) + 1), rng.choice(_HEADERS))
    version = rng.choice(("HTTP/1.1",) * 8 + ("HTTP/1.0", "HTTP/2", "HTTP/9.9", ""))
    head = "\r\n".join([f"{method} {path} {version}", *headers, "", ""])
    return _corrupted(head.encode("latin-1") + body, rng)


def _corrupted(data: bytes, rng: random.Random) -> bytes:
    match rng.randrange(7):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            return data * 2
        case 2:
            return data + rng.randbytes(rng.randrange(1, 200))
        case 3:
            corrupted = bytearray(data)
            for _ in range(rng.randrange(1, 8)):
                corrupted[rng.randrange(len(corrupted))] = rng.randrange(256)
            return bytes(corrupted)
        case 4:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(rng.randrange(1, 20)) + data[at:]
        case 5:
            return rng.randbytes(rng.randrange(1, 400))
    return data


def exchange(server: RunningServer, data: bytes) -> tuple[bytes, float]:
    """Everything received after sending `data` and closing our side, and the duration."""
    started_s = time.monotonic()
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(1 << 16):
                received += chunk
        except TimeoutError:
            raise
        except OSError:
            pass  # closed while we were sending
    return received, time.monotonic() - started_s


def check(received: bytes) -> str | None:
    """The fault of the responses, or None."""
    statuses = [int(status) for status in _STATUS.findall(received)]
    if any(status >= 500 for status in statuses):
        return f"statuses {statuses}"
    if received and not received.startswith(b"HTTP/1.1 "):
        return "no HTTP response"
    last_head, _, body = received[received.rfind(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    if statuses and statuses[-1] >= 400 and body and b'"error"' not in body:
        return f"not an error object: {last_head[:200]!r}"
    return None


def fuzz(server: RunningServer, extent: Extent) -> int:
    """Returns the number of faults."""
    rng, num_sent, num_faults, slowest_s = random.Random(extent.seed), 0, 0, 0.0
    for num_sent in extent.counted():  # noqa: B007 - it is reported
        data = request_bytes(rng)
        try:
            received, took_s = exchange(server, data)
            slowest_s, fault = max(slowest_s, took_s), check(received)
        except TimeoutError:
            received, fault = b"", f"no response within {DEADLINE_S:.0f} s"
        if fault:
            num_faults += 1
            print(f"{fault}\n  {data[:1000]!r}\n  {received[:500]!r}")
    server.wait_until_idle()
    assert server.complete().status_code == 200, "the server no longer works"
    print(
        f"{num_sent + 1} connections from seed {extent.seed}, {num_faults} faults; "
        f"slowest {slowest_s:.2f} s"
    )
    return num_faults


def main(arguments: list[str]) -> int:
    with fuzzed_server("--max-model-len", "400", is_scripted=True) as server:
        return int(fuzz(server, Extent.parse(arguments)) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
