"""Kills an engine again and again under mixed streams, and compares them with undisturbed ones."""

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engine.step.messages import caller_of
from tests.chaos.load import Ask, answer, asks
from tests.chaos.server import Killer, Running


@dataclass
class Outcome:
    """num_streams: compared. different: kinds of those that were not as they should be."""

    num_kills: int = 0
    num_streams: int = 0
    different: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)


async def kill_under_load(
    running: Running,
    *,
    num_kills: int,
    num_streams: int,
    seed: int,
    max_steps: int,
    signal_number: signal.Signals = signal.SIGKILL,
    known: tuple[list[Ask], list[Any]] | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Runs the load until there were that many kills, each after 1 to max_steps steps of an
    engine's life, and compares every answer of every round. known: another load than mixed streams,
    and its answers."""
    load, outcome = mixed(num_streams), Outcome()
    if known is None:
        expected = await answers_of(running, load)
    else:
        load, expected = known
    killer = Killer(running.engine, random.Random(seed), max_steps, signal_number)
    running.engine.on_step(killer.on_step)
    watching = asyncio.create_task(watch_pauses(running, outcome.pauses_s))
    try:
        while killer.num_kills < num_kills:
            killer.max_kills = num_kills
            await compare(running, load, expected, outcome, say, killer.rest)
            say(
                f"{killer.num_kills} times, {len(outcome.different)} of {outcome.num_streams} "
                "different"
            )
    finally:
        killer.rest()
        watching.cancel()
    outcome.num_kills = killer.num_kills
    return outcome


async def answers_of(running: Running, load: list[Ask]) -> list[Any]:
    return await asyncio.gather(*(answer(running.client, ask) for ask in load))


async def compare(
    running: Running,
    load: list[Ask],
    expected: list[Any],
    outcome: Outcome,
    say: Callable[[str], None],
    on_answered: Callable[[], None] = lambda: None,
) -> None:
    """Sends the load once more. on_answered: called when all of it has been answered."""
    running.engine.requests.clear()
    answers = await answers_of(running, load)
    on_answered()
    for ask, wanted, got in zip(load, expected, answers, strict=True):
        if not ask.is_seeded:
            wanted = await answer(running.client, _with_seed(running, ask))
        outcome.num_streams += 1
        if got != wanted:
            outcome.different.append(ask.kind)
            say(f"{ask.kind}: {got}\n  instead of {wanted}")


def mixed(num_streams: int, max_tokens: int = 48) -> list[Ask]:
    """Streams of all kinds."""
    load: list[Ask] = []
    while len(load) < num_streams:
        load += asks(len(load), max_tokens)
    return load[:num_streams]


def _with_seed(running: Running, ask: Ask) -> Ask:
    """The same request with the seed that the server drew for it."""
    (request,) = (r for r in running.engine.requests if caller_of(r.id) == ask.name)
    return replace(ask, body=ask.body | {"seed": request.sampling.seed})


async def watch_pauses(running: Running, pauses_s: list[float]) -> None:
    """From the last step before a kill to the first after it."""
    engine = running.engine
    last_s, last_pid = time.monotonic(), engine.process.pid

    def on_step(_: object) -> None:
        nonlocal last_s, last_pid
        now_s = time.monotonic()
        if engine.process.pid != last_pid and engine.process.pid is not None:
            pauses_s.append(now_s - last_s)
            last_pid = engine.process.pid
        last_s = now_s

    engine.on_step(on_step)
    await asyncio.Event().wait()
