"""Another client's stream, and the longest time between two of its reads."""

import json
import socket
import threading
import time


class Neighbour:
    """A stream, read in a thread."""

    def __init__(self, port: int) -> None:
        fields = {"prompt": "Once", "stream": True, "max_tokens": 100_000, "ignore_eos": True}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=300)
        self._connection.sendall(head.encode() + body)
        self._longest_s = 0.0
        self._has_begun = threading.Event()
        self._is_over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._has_begun.wait(60)

    def gap_s(self) -> float:
        """The longest since the last call, the one that lasts included."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def close(self) -> None:
        self._is_over = True
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        last_s = None
        while data := self._connection.recv(1 << 16):
            now_s = time.monotonic()
            if last_s is not None:
                self._longest_s = max(self._longest_s, now_s - last_s)
                self._has_begun.set()
            last_s = now_s
            if self._is_over or b"[DONE]" in data:
                return
