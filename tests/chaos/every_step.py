"""The same short load again for each of its steps, at which its engine is killed."""

import asyncio
import os
import signal
from collections.abc import Callable

from penstock.engine.client import StepReport
from tests.chaos.kills import Outcome, answers_of, compare
from tests.chaos.load import asks
from tests.chaos.server import Running


async def kill_at_every_step(
    running: Running, *, num_streams: int, max_steps: int, say: Callable[[str], None] = print
) -> Outcome:
    """Sends streams of all kinds, and kills the engine at step 1, in the next run at step 2, and so
    on until a run has fewer steps than that, or max_steps were killed."""
    load, outcome = asks(7, max_tokens=16)[:num_streams], Outcome()
    expected = await answers_of(running, load)
    num_steps = kill_at = 0

    def on_step(report: StepReport) -> None:
        nonlocal num_steps
        num_steps += bool(report.step)
        if num_steps == kill_at and report.step and running.engine.process.pid is not None:
            outcome.num_kills += 1
            os.kill(running.engine.process.pid, signal.SIGKILL)

    running.engine.on_step(on_step)
    while kill_at == outcome.num_kills and kill_at < max_steps:
        num_steps, kill_at = 0, kill_at + 1
        await compare(running, load, expected, outcome, say)
        if kill_at % 10 == 0:
            say(f"killed at step {kill_at}, {len(outcome.different)} different so far")
        # The last step may end all streams; the engine that it kills is to be replaced by the next.
        await asyncio.sleep(0.2)
        await running.until_ready()
    kill_at = 0
    say(f"killed at each of {outcome.num_kills} steps, {len(outcome.different)} different")
    return outcome
