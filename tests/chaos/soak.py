"""Many thousand requests to one server, and what its memory grows by."""

import asyncio
import contextlib
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.chaos.load import asks
from tests.support.memory import family
from tests.support.paths import DEMO_MODEL
from tests.support.serving import MODEL, RunningServer

_AT_ONCE = 32
_WARM_UP = 0.1  # of the requests: pools, caches and allocators reach their size
_SAMPLES = 100  # of the memory
_LEAVES = 0.02  # of the clients do so before their answer ends


@dataclass
class Soak:
    """growth: of the memory that the server's processes have to themselves, from the tenth of the
    requests after the warm-up to the last tenth, each a median."""

    num_requests: int
    num_failed: int
    growth: float
    before_bytes: int
    num_left: int

    @property
    def is_good(self) -> bool:
        return not self.num_failed and not self.num_left and self.growth <= 0.02


async def soak(num_requests: int, seed: int, say: Callable[[str], None] = print) -> Soak:
    """Requests of all kinds with short answers, 32 at a time."""
    server = RunningServer(
        *(str(DEMO_MODEL), "--served-model-name", MODEL, "--log-level", "error"),
        *("--num-threads", "1", "--kv-cache-memory-bytes", str(16 << 20)),
        # So few that as many as are kept at all are there before memory is first looked at.
        *("--max-stored-responses", str(min(64, num_requests // 200))),
    )
    try:
        await asyncio.to_thread(server.wait_until_ready)
        rng, num_failed, kinds = random.Random(seed), 0, len(asks(0))
        numbers, every = iter(range(num_requests)), num_requests // _SAMPLES
        sizes: list[int] = []

        async def work(client: httpx.AsyncClient) -> None:
            nonlocal num_failed
            for number in numbers:
                ask = asks(number // kinds, max_tokens=6)[number % kinds]
                if rng.random() < _LEAVES:
                    with contextlib.suppress(httpx.TimeoutException):
                        await client.post(ask.path, json=ask.body, timeout=rng.random() / 20)
                    continue
                reply = await client.post(ask.path, json=ask.body)
                num_failed += reply.status_code != 200
                if number // every == len(sizes):
                    sizes.append(_own_bytes(server.process.pid))
                    if len(sizes) % 10 == 0:
                        say(f"{number} requests, {sizes[-1] >> 20} MiB")

        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            await asyncio.gather(*(work(client) for _ in range(_AT_ONCE)))
            await asyncio.sleep(1.0)
        first = int(_WARM_UP * len(sizes))
        before_bytes = int(statistics.median(sizes[first : 2 * first]))
        growth = statistics.median(sizes[-first:]) / before_bytes - 1
        num_left = await asyncio.to_thread(server.metric, "kv_used_blocks")
        return Soak(num_requests, num_failed, growth, before_bytes, int(num_left))
    finally:
        await asyncio.to_thread(server.stop)


def _own_bytes(pid: int) -> int:
    """Of all its processes, without the pool of keys and values, whose size does not change."""
    pages = 0
    for each in family(pid):
        with contextlib.suppress(OSError):
            _, resident, shared, *_ = Path(f"/proc/{each}/statm").read_text().split()
            pages += int(resident) - int(shared)
    return pages * os.sysconf("SC_PAGE_SIZE")
