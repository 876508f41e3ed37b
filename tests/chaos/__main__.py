"""`python -m tests.chaos [PART ...]`: measures the table of docs/promises.md, and prints it.

All parts take most of an hour on two cores. `--short` makes each as small as it can be.
"""

import argparse
import asyncio
import logging
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from tests.chaos.crowds import overload, slow_loris
from tests.chaos.disconnects import leave_early
from tests.chaos.every_step import kill_at_every_step
from tests.chaos.kills import Outcome, kill_under_load
from tests.chaos.memory_limit import without_memory
from tests.chaos.pause import pauses_s, rank_pauses_s, shown
from tests.chaos.poison import poison_among_others
from tests.chaos.server import running
from tests.chaos.soak import soak
from tests.chaos.tier_files import damage_files

say = partial(print, flush=True)


class Row(NamedTuple):
    """Of the table."""

    what: str
    measured: str
    is_good: bool


class Sizes(NamedTuple):
    """How much of everything."""

    kills: int
    streams: int
    steps: int
    stops: int
    limits: int
    others: int
    overload: int
    disconnects: int
    slow: int
    soak: int
    pauses: int
    faults: int


FULL = Sizes(200, 64, 200, 5, 10, 32, 64, 1000, 500, 50_000, 5, 1000)
SHORT = Sizes(4, 16, 6, 1, 2, 8, 16, 100, 50, 1000, 1, 40)


async def kills(size: Sizes, seed: int) -> list[Row]:
    async with running() as server:
        outcome = await kill_under_load(
            server,
            num_kills=size.kills,
            num_streams=size.streams,
            seed=seed,
            max_steps=12,
            say=say,
        )
        num_left = await server.blocks_in_use()
    pauses = sorted(outcome.pauses_s)
    shown_pauses = f"median {statistics.median(pauses):.1f} s, longest {pauses[-1]:.1f} s"
    what = f"{outcome.num_kills} kills of the engine under {size.streams} mixed streams"
    return [
        _compared(what, outcome, num_left),
        Row("pause of these streams, from step to step", shown_pauses, True),
    ]


async def every_step(size: Sizes, seed: int) -> list[Row]:
    async with running() as server:
        outcome = await kill_at_every_step(server, num_streams=16, max_steps=size.steps, say=say)
        num_left = await server.blocks_in_use()
    what = f"a kill at each of the {outcome.num_kills} steps of a load of 16 kinds, a run for each"
    return [_compared(what, outcome, num_left)]


async def stops(size: Sizes, seed: int) -> list[Row]:
    async with running(stall_timeout_s=3.0) as server:
        outcome = await kill_under_load(
            server,
            num_kills=size.stops,
            num_streams=16,
            seed=seed,
            max_steps=12,
            signal_number=signal.SIGSTOP,
            say=say,
        )
        num_left = await server.blocks_in_use()
    return [_compared(f"{size.stops} SIGSTOPs of the engine", outcome, num_left)]


async def memory(size: Sizes, seed: int) -> list[Row]:
    async with running() as server:
        outcome = await without_memory(
            server, num_rounds=size.limits, num_streams=32, seed=seed, say=say
        )
        num_left = await server.blocks_in_use()
        num_restarts = sum(server.engine.restarts.values())
        num_blamed = server.engine.recovery.num_quarantined
    what = (
        f"{outcome.num_kills} engines that get no more memory, of which {num_restarts} ended, "
        "under 32 mixed streams"
    )
    row = _compared(what, outcome, num_left)
    return [row._replace(is_good=row.is_good and not num_blamed)]


async def poison(size: Sizes, seed: int) -> list[Row]:
    rows = []
    for kind in ("raises", "hangs", "dies", "nan"):
        result = await poison_among_others(kind, num_others=size.others)
        say(f"a request that {result}")
        what, _, measured = str(result).partition(": ")
        rows.append(
            Row(f"a request that {what}, among {result.num_others}", measured, result.is_good)
        )
    return rows


async def crowd(size: Sizes, seed: int) -> list[Row]:
    result = await overload(size.overload, say)
    what = (
        f"{result.times:.1f} times the work that the pool holds, "
        f"{result.num_preemptions} preemptions"
    )
    row = _compared(what, result.outcome, result.num_left)
    return [row._replace(is_good=row.is_good and result.times > 1)]


async def disconnects(size: Sizes, seed: int) -> list[Row]:
    async with running() as server:
        num_left = await leave_early(server, size.disconnects, seed)
    measured = f"{num_left} blocks in use after one second"
    return [Row(f"{size.disconnects} clients that leave at any time", measured, not num_left)]


async def loris(size: Sizes, seed: int) -> list[Row]:
    async with running() as server:
        outcome = await slow_loris(server, size.slow, 32, say)
        num_left = await server.blocks_in_use()
    what = f"{size.slow} clients that send a byte at a time, beside 32 mixed streams"
    return [_compared(what, outcome, num_left)]


async def soaked(size: Sizes, seed: int) -> list[Row]:
    result = await soak(size.soak, seed, say)
    measured = (
        f"{result.num_failed} failed; memory {result.growth:+.1%} of "
        f"{result.before_bytes >> 20} MiB; {result.num_left} blocks in use after one second"
    )
    return [
        Row(
            f"{size.soak} requests of 16 kinds, 2 % of whose clients leave",
            measured,
            result.is_good,
        )
    ]


async def pause(size: Sizes, seed: int) -> list[Row]:
    rows = []
    for keeps in (False, True):
        pauses = await pauses_s(
            keeps=keeps, num_kills=size.pauses, num_streams=16, num_prompt_tokens=1900
        )
        say(f"pauses, pool {'kept' if keeps else 'lost'}: {[round(p, 2) for p in pauses]}")
        what = "pause of 16 streams with prompts of 1,900 tokens after kill -9"
        rows.append(Row(what + (", pool kept" if keeps else ", pool lost"), shown(pauses), True))
    return rows


async def ranks(size: Sizes, seed: int) -> list[Row]:
    rows = []
    for tensor, pipeline in ((2, 1), (1, 2), (2, 2)):
        pauses = await rank_pauses_s(
            num_kills=size.pauses,
            num_streams=16,
            num_prompt_tokens=100,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
        )
        how = f"TP {tensor} x PP {pipeline}"
        say(f"pauses, {how}: {[round(p, 2) for p in pauses]}")
        what = f"pause of 16 streams after kill -9 of one rank after the other, {how}"
        rows.append(Row(what, shown(pauses), True))
    return rows


async def tier(size: Sizes, seed: int) -> list[Row]:
    outcome = await asyncio.to_thread(damage_files, size.faults, seed=seed, say=say)
    what = f"{outcome.num_faults} files of --kv-offload-dir cut off, changed, exchanged or removed"
    measured = (
        f"{outcome.num_different} answers different, {outcome.num_found} noticed, "
        f"{outcome.num_hits:,} prompt tokens read"
    )
    is_good = not outcome.num_different and outcome.num_found == outcome.num_faults
    return [Row(what, measured, is_good)]


PARTS: dict[str, Callable[[Sizes, int], Awaitable[list[Row]]]] = {
    "pause": pause,
    "ranks": ranks,
    "every-step": every_step,
    "stops": stops,
    "memory": memory,
    "poison": poison,
    "overload": crowd,
    "disconnects": disconnects,
    "slow-loris": loris,
    "tier": tier,
    "soak": soaked,
    "kills": kills,
}


def _compared(what: str, outcome: Outcome, num_left: int) -> Row:
    measured = f"{len(outcome.different)} of {outcome.num_streams} answers lost or different"
    if num_left:
        measured += f", {num_left} blocks in use after one second"
    return Row(what, measured, not outcome.different and not num_left and outcome.num_streams > 0)


async def main(options: argparse.Namespace) -> int:
    size = SHORT if options.short else FULL
    given = {name: getattr(options, name) for name in Sizes._fields}
    size = size._replace(**{name: value for name, value in given.items() if value is not None})
    say(f"seed {options.seed}, Python {platform.python_version()}, {platform.machine()}", end="")
    say(f", {os.cpu_count()} cores")
    table: list[Row] = []
    for name in options.parts or PARTS:
        say(f"\n{name}")
        started_s = time.monotonic()
        rows = await PARTS[name](size, options.seed)
        took_s = time.monotonic() - started_s
        for row in rows:
            table.append(row)
            say(f"{'ok' if row.is_good else 'BROKEN'}: {row.what}: {row.measured}")
        say(f"{name} took {took_s:.0f} s")
    say("\n| what | measured |\n|---|---|")
    for row in table:
        say(f"| {row.what} | {row.measured} |")
    broken = sum(not row.is_good for row in table)
    say(f"\n{broken} broken promises" if broken else "\nevery promise was kept")
    return 1 if broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; or all")
    parser.add_argument("--short", action="store_true")
    for field in Sizes._fields:
        parser.add_argument(f"--{field}", type=int)
    parser.add_argument("--seed", type=int, default=1)
    logging.basicConfig(level=logging.ERROR)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    sys.exit(asyncio.run(main(arguments)))
