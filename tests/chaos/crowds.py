"""More than fits: more work than the pool holds, and clients that are very slow."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.client import StepReport
from tests.chaos.kills import Outcome, answers_of, compare, mixed
from tests.chaos.server import Running, running

_POOL_BYTES = 5 << 20  # 2,560 tokens of the demo model, of which one request may need 2,048


@dataclass
class Overload:
    """times: the work at once, relative to the pool."""

    outcome: Outcome
    times: float
    num_preemptions: int
    num_left: int


async def overload(
    num_streams: int,
    say: Callable[[str], None] = print,
    module: str = "penstock.engine.ipc.process",
) -> Overload:
    """Compares answers of a server whose pool is too small for all at once with those of one where
    they fit. module: of the former's engine."""
    # Answers that are longer than their prompts: those are admitted, and outgrow the pool.
    load = [ask for ask in mixed(num_streams, max_tokens=160) if ask.is_seeded]
    async with running() as roomy:
        expected = await answers_of(roomy, load)
    async with running(module, kv_cache_memory_bytes=_POOL_BYTES) as small:
        preemptions: list[int] = []

        def on_step(report: StepReport) -> None:
            preemptions[:] = [report.stats.preemptions_total]

        small.engine.on_step(on_step)
        outcome = Outcome()
        await compare(small, load, expected, outcome, say)
        num_tokens = sum(
            (len(request.prompt_token_ids) + request.sampling.max_tokens) * request.n
            for request in small.engine.requests
        )
        info = small.engine.info
        times = num_tokens / (info.num_blocks * info.block_size)
        return Overload(outcome, times, preemptions[0], await small.blocks_in_use())


async def slow_loris(
    server: Running, num_slow: int, num_streams: int, say: Callable[[str], None] = print
) -> Outcome:
    """Streams of all kinds while a crowd sends headers or a body one byte at a time, for ever."""
    load, outcome = mixed(num_streams), Outcome()
    expected = await answers_of(server, load)
    crowd = [asyncio.create_task(_dawdle(server.port, i)) for i in range(num_slow)]
    try:
        await asyncio.sleep(1.0)  # all are connected
        await compare(server, load, expected, outcome, say)
        num_ended = sum(task.done() for task in crowd)
        assert not num_ended, f"{num_ended} slow clients were not there until the end"
    finally:
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    return outcome


async def _dawdle(port: int, number: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
    if number % 2:  # all headers, and then a body that never ends
        head += "content-type: application/json\r\ncontent-length: 100000\r\n\r\n"
    try:
        writer.write(head.encode())
        while True:
            writer.write(b"x")
            with contextlib.suppress(ConnectionError):  # the server may have had enough of it
                await writer.drain()
            await asyncio.sleep(0.2)
    finally:
        writer.close()
