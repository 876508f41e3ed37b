"""How long streams pause when their engine is killed, with and without the keys and values that
outlive it, or one of its ranks."""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial

import pytest

from penstock.engine.client import StepReport
from penstock.engine.ipc import client as engine_client
from tests.chaos.server import Running, running
from tests.support.rank_processes import ranks_of
from tests.support.serving import MODEL


async def pauses_s(
    *, keeps: bool, num_kills: int, num_streams: int, num_prompt_tokens: int, **settings: object
) -> list[float]:
    """For each kill, from the last step before it until the last of the streams has its next token.

    keeps: whether the pool outlives the engine. settings: of `EngineConfig`.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not keeps:
            patch.setattr(engine_client, "make_descriptor", lambda: None)
        async with running("penstock.engine.ipc.process", **settings) as server:
            return [
                await pause_s(server, number, num_streams, num_prompt_tokens)
                for number in range(num_kills)
            ]


async def rank_pauses_s(
    *, num_kills: int, num_streams: int, num_prompt_tokens: int, **settings: object
) -> list[float]:
    """The same where one rank after the other is killed, of a model that several compute together.

    settings: of `EngineConfig`.
    """
    async with running("penstock.engine.ipc.process", **settings) as server:

        def rank(number: int) -> int:
            assert server.engine.process.pid is not None
            ranks = [server.engine.process.pid, *ranks_of(server.engine)]
            return ranks[number % len(ranks)]

        return [
            await pause_s(server, number, num_streams, num_prompt_tokens, partial(rank, number))
            for number in range(num_kills)
        ]


async def pause_s(
    server: Running,
    number: int,
    num_streams: int,
    num_prompt_tokens: int,
    victim: Callable[[], int] | None = None,
) -> float:
    """number: prompts of another one have nothing in common. victim: what is killed; None: the
    engine."""
    first_id = 100 * number
    bodies = [
        {
            "model": MODEL,
            "prompt": [
                3 + (first_id + 7 * i + j * (i + 1)) % 1500 for j in range(num_prompt_tokens)
            ],
            "max_tokens": 24,
            "ignore_eos": True,
            "temperature": 0,
        }
        for i in range(num_streams)
    ]
    begun: set[str] = set()
    waiting: set[str] = set()
    killed_at_s = ended_s = 0.0

    def on_step(report: StepReport) -> None:
        nonlocal killed_at_s, ended_s
        names = {output.request_id for output in report.outputs if output.token_ids}
        if not killed_at_s:
            begun.update(names)
            if len(begun) == num_streams and server.engine.process.pid is not None:
                waiting.update(begun)
                killed_at_s = time.monotonic()
                os.kill(victim() if victim else server.engine.process.pid, signal.SIGKILL)
        elif server.engine.process.pid is not None and waiting:
            waiting.difference_update(names)
            if not waiting:
                ended_s = time.monotonic()

    server.engine.on_step(on_step)
    replies = await asyncio.gather(
        *(server.client.post("/v1/completions", json=body) for body in bodies)
    )
    assert all(reply.status_code == 200 for reply in replies), replies
    assert ended_s, "not all streams were killed and came back"
    return ended_s - killed_at_s


def shown(pauses: list[float]) -> str:
    return f"median {statistics.median(pauses):.1f} s, longest {max(pauses):.1f} s"
