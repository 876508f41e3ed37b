"""`python -m tests.fuzz.http SECONDS [SEED]`, part of `make test-fuzz`: what is nearly HTTP.

Sends requests whose bytes were changed, cut, doubled or never ended, over raw sockets. Whatever
comes, each connection gets answers that can be read, or is closed, within five seconds; none is a
server error; and behind them the server still serves.
"""

import json
import random
import re
import socket
import sys
import time

from tests.fuzz.bodies import DEADLINE_S, SEEDS, fuzzed_server
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


def request_bytes(chance: random.Random) -> bytes:
    """A request, right or wrong in a few places."""
    path = chance.choice(_PATHS)
    seeds = SEEDS.get(path, [{}])
    body = json.dumps({"model": MODEL} | chance.choice(seeds)).encode()
    method = "POST" if path in SEEDS and chance.random() < 0.7 else chance.choice(_METHODS)
    headers = ["Host: x", f"Content-Length: {len(body)}"]
    for _ in range(chance.choice((0, 0, 1, 2))):
        headers.insert(chance.randrange(len(headers) + 1), chance.choice(_HEADERS))
    version = chance.choice(("HTTP/1.1",) * 8 + ("HTTP/1.0", "HTTP/2", "HTTP/9.9", ""))
    head = "\r\n".join([f"{method} {path} {version}", *headers, "", ""])
    return _spoilt(head.encode("latin-1") + body, chance)


def _spoilt(data: bytes, chance: random.Random) -> bytes:
    match chance.randrange(7):
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            return data * 2
        case 2:
            return data + chance.randbytes(chance.randrange(1, 200))
        case 3:
            spoilt = bytearray(data)
            for _ in range(chance.randrange(1, 8)):
                spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
            return bytes(spoilt)
        case 4:
            at = chance.randrange(len(data))
            return data[:at] + chance.randbytes(chance.randrange(1, 20)) + data[at:]
        case 5:
            return chance.randbytes(chance.randrange(1, 400))
    return data


def answer_to(server: RunningServer, data: bytes) -> tuple[bytes, float]:
    """All that comes back once we have sent all that we will, and how long it took."""
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
            pass  # closed on us while we still sent
    return received, time.monotonic() - started_s


def check(received: bytes) -> str | None:
    """What is wrong with it, or None."""
    statuses = [int(status) for status in _STATUS.findall(received)]
    if any(status >= 500 for status in statuses):
        return f"statuses {statuses}"
    if received and not received.startswith(b"HTTP/1.1 "):
        return "no answer in HTTP"
    last_head, _, body = received[received.rfind(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    if statuses and statuses[-1] >= 400 and body and b'"error"' not in body:
        return f"an error that is no error object: {last_head[:200]!r}"
    return None


def fuzz(server: RunningServer, seconds: float, seed: int) -> int:
    """Asks until the time is up; returns how many answers were wrong."""
    chance, num_asked, num_wrong, slowest_s = random.Random(seed), 0, 0, 0.0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        data = request_bytes(chance)
        num_asked += 1
        try:
            received, took_s = answer_to(server, data)
            slowest_s, wrong = max(slowest_s, took_s), check(received)
        except TimeoutError:
            received, wrong = b"", f"nothing within {DEADLINE_S:.0f} s"
        if wrong:
            num_wrong += 1
            print(f"{wrong}\n  {data[:1000]!r}\n  {received[:500]!r}")
    server.wait_until_idle()
    assert server.complete().status_code == 200, "it does not serve any more"
    print(f"{num_asked} connections from seed {seed}, {num_wrong} wrong; slowest {slowest_s:.2f} s")
    return num_wrong


def main(arguments: list[str]) -> int:
    seconds = float(arguments[0]) if arguments else 30.0
    seed = int(arguments[1]) if len(arguments) > 1 else random.randrange(10**6)
    with fuzzed_server("--max-model-len", "400", is_scripted=True) as server:
        return int(fuzz(server, seconds, seed) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
