"""An engine that gets no more memory in the middle of its work, as at a limit of its process."""

import asyncio
import random
import resource
from collections.abc import Callable
from pathlib import Path

from penstock.engine.client import StepReport
from tests.chaos.kills import Outcome, answers_of, compare, mixed
from tests.chaos.load import Ask, answer
from tests.chaos.server import Running
from tests.support.serving import MODEL

# The logprobs of so long a prompt need memory that the engine has not had before.
_LARGE = Ask(
    "large",
    "large",
    "/v1/completions",
    {"model": MODEL, "prompt": [5 + i % 1000 for i in range(1900)], "max_tokens": 4, "echo": True}
    | {"logprobs": 2, "temperature": 0},
)


async def without_memory(
    running: Running,
    *,
    num_rounds: int,
    num_streams: int,
    seed: int,
    say: Callable[[str], None] = print,
) -> Outcome:
    """In each round, at some step, the engine's address space may not grow any more, and then a
    request comes that needs much. The engine goes on or it ends; the next one has no limit."""
    load, outcome, rng = mixed(num_streams), Outcome(), random.Random(seed)
    expected = await answers_of(running, load)
    expected_of_large = await answer(running.client, _LARGE)
    left, limited = 0, asyncio.Event()

    def on_step(report: StepReport) -> None:
        nonlocal left
        left -= bool(report.step)
        if report.step and not left and running.engine.process.pid is not None:
            outcome.num_kills += 1
            _allow_no_more(running.engine.process.pid)
            limited.set()

    async def large() -> None:
        await limited.wait()
        outcome.num_streams += 1
        if await answer(running.client, _LARGE) != expected_of_large:
            outcome.different.append(_LARGE.kind)

    running.engine.on_step(on_step)
    for _ in range(num_rounds):
        limited.clear()
        left = rng.randint(1, 20)
        await asyncio.gather(large(), compare(running, load, expected, outcome, say))
        say(f"{outcome.num_kills} limits, {len(outcome.different)} different")
    return outcome


def _allow_no_more(pid: int) -> None:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
