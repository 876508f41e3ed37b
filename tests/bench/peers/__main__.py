"""`python -m tests.bench.peers`: installs the peers, makes models, and compares."""

import argparse
import os
import shlex
import sys
from pathlib import Path
from subprocess import CalledProcessError

from penstock.scheduler.errors import PenstockError
from tests.bench.peers.compare import WEIGHTS, comparison
from tests.bench.peers.install import PEERS, install
from tests.bench.peers.models import SHAPES
from tests.support.paths import ROOT


def main(argv: list[str]) -> int:
    """Returns the exit status. Comparing, `tests.bench.in_turns` takes this process over."""
    options, more = _parser().parse_known_args(argv)
    if more and options.what == "install":
        print(f"install takes no {more[0]}", file=sys.stderr)
        return 2
    into = options.into.resolve()
    weights = options.weights if options.what == "compare" else "bf16"
    # vLLM for CPUs quantizes no model when it loads it.
    peers = options.peers or [peer for peer in PEERS if weights == "bf16" or peer != "vllm"]
    try:
        for peer in peers:
            install(peer, PEERS[peer], into)
        if options.what == "compare":
            command = comparison(options.shape, into, peers, options.threads, weights, more)
            print(f"\n{shlex.join(command)}\n", flush=True)
            os.execv(sys.executable, [sys.executable, "-m", *command])
    except (PenstockError, CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    installing = commands.add_parser("install", help="install peers, if they are not")
    comparing = commands.add_parser(
        "compare",
        help="install, make the model, and run `python -m tests.bench.in_turns`",
        epilog="All other flags go to `tests.bench.in_turns`, such as --cases and --rounds.",
    )
    comparing.add_argument("shape", choices=[*SHAPES], help="of the model, with random weights")
    comparing.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    comparing.add_argument(
        "--weights", choices=[*WEIGHTS], default="bf16", help="of all servers; by default bf16"
    )
    for each in (installing, comparing):
        each.add_argument(
            "--peer",
            dest="peers",
            action="append",
            choices=[*PEERS],
            help="may be given several times; by default all",
        )
        each.add_argument(
            "--into", type=Path, default=ROOT / "build" / "peers", metavar="DIR", help="where"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
