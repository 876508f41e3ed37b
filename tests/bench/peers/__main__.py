"""`python -m tests.bench.peers`: installs the peers, makes models, and compares."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from tests.bench.peers.compare import WEIGHTS, comparison, make_file, usable
from tests.bench.peers.install import PEERS, fit_peers
from tests.bench.peers.models import SHAPES
from tests.bench.peers.table import CASES, write_table
from tests.support.paths import ROOT


def main(argv: list[str]) -> int:
    """Returns the exit status. Comparing, `tests.bench.in_turns` takes this process over."""
    options, more = _parser().parse_known_args(argv)
    if more and options.what == "install":
        print(f"install takes no {more[0]}", file=sys.stderr)
        return 2
    into, peers = options.into.resolve(), options.peers or [*PEERS]
    if options.what == "install":
        left_out = usable(peers, into)[1]
        return 1 if any(peer in left_out for peer in options.peers or fit_peers()) else 0
    if options.what == "table":
        return write_table(options, into, peers, more)
    shape, weights = options.shape, options.weights
    peers, _ = usable(peers, into, lambda peer: make_file(peer, shape, into, weights))
    if not peers:
        print("no peer is left to compare with", file=sys.stderr)
        return 1
    command = comparison(shape, into, peers, options.threads, weights, more)
    print(f"\n{shlex.join(command)}\n", flush=True)
    return os.execv(sys.executable, [sys.executable, "-m", *command])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    installing = commands.add_parser("install", help="install peers, if they are not")
    comparing = commands.add_parser(
        "compare",
        help="install, make the model, and run `python -m tests.bench.in_turns`",
        epilog="All other flags go to `tests.bench.in_turns`, such as --cases and --rounds.",
    )
    comparing.add_argument(
        "--weights", choices=[*WEIGHTS], default="bf16", help="of all servers; by default bf16"
    )
    tabling = commands.add_parser(
        "table",
        help="compare at all --weights and cases, and write a table in Markdown",
        epilog="All other flags go to `tests.bench.in_turns`, such as --rounds. The table is "
        "written after each of --weights, so that what there is stays if it is interrupted.",
    )
    tabling.add_argument(
        "--weights", action="append", choices=[*WEIGHTS], help="several times; by default all"
    )
    tabling.add_argument("--cases", default=CASES, help="by default %(default)s")
    tabling.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="by default peers-SHAPE.md in --into; beside it "
        "is what was measured, as JSON, for each of --weights",
    )
    tabling.add_argument(
        "--measured",
        action="append",
        type=Path,
        metavar="FILE",
        help="write the table of such a JSON file and measure nothing; may be given several times",
    )
    for each in (comparing, tabling):
        each.add_argument("shape", choices=[*SHAPES], help="of the model, with random weights")
        each.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    for each in (installing, comparing, tabling):
        each.add_argument(
            "--peer",
            dest="peers",
            action="append",
            choices=[*PEERS],
            help="may be given several times; by default all that this processor can run",
        )
        each.add_argument(
            "--into", type=Path, default=ROOT / "build" / "peers", metavar="DIR", help="where"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
