"""An engine that gets no more memory in the middle of its work, as at a limit of its process."""

import random
import resource
from collections.abc import Callable
from pathlib import Path

from penstock.engine.client import StepReport
from tests.chaos.kills import Outcome, answers_of, compare, mixed
from tests.chaos.server import Running


async def without_memory(
    running: Running,
    *,
    num_rounds: int,
    num_streams: int,
    seed: int,
    say: Callable[[str], None] = print,
) -> Outcome:
    """In each round, at some step, the engine's address space may not grow any more. It goes on or
    it ends; the one that replaces it has no limit."""
    load, outcome, rng = mixed(num_streams), Outcome(), random.Random(seed)
    expected = await answers_of(running, load)
    left = 0

    def on_step(report: StepReport) -> None:
        nonlocal left
        left -= bool(report.step)
        if report.step and not left and running.engine.pid is not None:
            outcome.num_kills += 1
            _allow_no_more(running.engine.pid)

    running.engine.on_step(on_step)
    for _ in range(num_rounds):
        left = rng.randint(1, 20)
        await compare(running, load, expected, outcome, say)
        say(f"{outcome.num_kills} limits, {len(outcome.different)} different")
    return outcome


def _allow_no_more(pid: int) -> None:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
