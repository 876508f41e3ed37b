"""`python -m tests.chaos`: measures the table of docs/promises.md; `--kills 20` for a part."""

import argparse
import asyncio
import logging
import platform
import statistics
import sys
from functools import partial

from tests.chaos.disconnects import leave_early
from tests.chaos.kills import kill_under_load
from tests.chaos.poison import poison_among_others
from tests.chaos.server import running


async def main(options: argparse.Namespace) -> int:
    say = partial(print, flush=True)
    say(f"seed {options.seed}, Python {platform.python_version()}, {platform.machine()}")
    async with running() as server:
        outcome = await kill_under_load(
            server,
            num_kills=options.kills,
            num_streams=options.streams,
            seed=options.seed,
            max_steps=options.steps,
            say=say,
        )
        num_left = await leave_early(server, options.disconnects, options.seed)
    poison = [
        await poison_among_others(kind, num_others=32) for kind in ("raises", "hangs", "dies")
    ]
    nan = await poison_among_others("nan", num_others=32)
    say("")
    say(f"streams that were lost or different: {len(outcome.different)} of {outcome.num_streams},")
    say(f"  over {outcome.num_kills} engine kills under {options.streams} mixed streams")
    pauses = sorted(outcome.pauses_s)
    say(f"pause: median {statistics.median(pauses):.1f} s, longest {pauses[-1]:.1f} s")
    for result in (*poison, nan):
        say(f"a request that {result}")
    say(f"after {options.disconnects} disconnects: {num_left} blocks in use")
    is_good = not outcome.different and not num_left
    return 0 if is_good and all(result.is_good for result in (*poison, nan)) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12, help="most of an engine's life")
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    logging.basicConfig(level=logging.ERROR)
    sys.exit(asyncio.run(main(parser.parse_args())))
