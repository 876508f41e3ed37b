"""`TrafficRecord`: the last hour's requests, for `penstock simulate` under other flags. No text.

A line is JSON: when a request arrived, the lengths of prompt and answer, whose it was as a number,
and a hash of each of the prompt's blocks with all before it, so that shared beginnings can be told.
The hashes are keyed with what this process alone knows: from them nobody can test what a prompt
said. The names are those of Mooncake's traces.

The file is replaced after an hour, or when it is large; the one before is kept beside it as FILE.1.
"""

import hashlib
import json
import logging
import os
import secrets
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger("penstock")

BLOCK_TOKENS = 64
_SPAN_S = 3600.0
_MAX_BYTES = 64 << 20
_HASH_BYTES = 6  # whole numbers of JSON are exact up to 2^53
_MAX_TENANTS = 10_000


class TrafficRecord:
    """Used on the event loop. A disk that is full ends the record, and nothing else."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        *,
        span_s: float = _SPAN_S,
        max_bytes: int = _MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """settings: those that the requests were served with. Raises InvalidConfig."""
        self._path = path
        self._span_s, self._max_bytes, self._clock = span_s, max_bytes, clock
        self._header = {"penstock_traffic": 1, "block_tokens": BLOCK_TOKENS, "settings": settings}
        self._key = secrets.token_bytes(32)
        self._tenants: dict[str, int] = {}
        try:
            self._file: IO[str] | None = self._begin()
        except OSError as error:
            raise InvalidConfig(
                f"--record-traffic {path} cannot be written: {error.strerror}"
            ) from error

    def add(
        self,
        prompt_token_ids: tuple[int, ...],
        *,
        num_output_tokens: int,
        tenant: str,
        priority: int,
        age_s: float,
    ) -> None:
        """An answer that has ended, to a request that arrived age_s ago."""
        if self._file is None:
            return
        line = {
            "timestamp": round((self._clock() - age_s) * 1e3),
            "input_length": len(prompt_token_ids),
            "output_length": num_output_tokens,
            "tenant": self._tenants.setdefault(tenant, len(self._tenants)),
            "priority": priority,
            "hash_ids": self._hashes(prompt_token_ids),
        }
        if len(self._tenants) >= _MAX_TENANTS:
            self._tenants.clear()
        try:
            self._write(self._file, line)
        except OSError as error:
            logger.warning("--record-traffic ends: %s", error.strerror)
            self._file = None

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _write(self, file: IO[str], line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._num_bytes += len(text)
        if self._clock() - self._since_s > self._span_s or self._num_bytes > self._max_bytes:
            file.close()
            file = self._file = self._begin()
            self._num_bytes += len(text)
        file.write(text)
        file.flush()

    def _begin(self) -> IO[str]:
        """A new file; one that is there is kept as FILE.1, in place of an older one."""
        if self._path.exists() and self._path.stat().st_size:
            self._path.replace(f"{self._path}.1")
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        file = os.fdopen(descriptor, "w", encoding="utf-8")
        header = json.dumps(self._header, separators=(",", ":")) + "\n"
        file.write(header)
        self._since_s, self._num_bytes = self._clock(), len(header)
        return file

    def _hashes(self, token_ids: tuple[int, ...]) -> list[int]:
        """Returns the hash of each whole block and all before it."""
        data = memoryview(array("i", token_ids).tobytes())
        size = BLOCK_TOKENS * 4
        hashes, before = [], b""
        for start in range(0, len(data) - size + 1, size):
            hashed = hashlib.blake2b(before, digest_size=_HASH_BYTES, key=self._key)
            hashed.update(data[start : start + size])
            before = hashed.digest()
            hashes.append(int.from_bytes(before, "little"))
        return hashes
