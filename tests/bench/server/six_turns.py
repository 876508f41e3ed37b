"""`python -m tests.bench.server.six_turns`: a conversation of six turns with a hybrid model.

Penstock, llama.cpp's server and vLLM take turns on this machine, with random weights in the layers
of Qwen3.5-0.8B. Each turn sends all that was said before, the server's own answer and new tokens.
Shown are, for each turn, the tokens of the prompt, those that were added since the prompt of the
turn before, how many each server computed (by its own account: the prompt without what it found in
its prefix cache), and its TTFT.

The exit status is 1 where Penstock computed more than what was added, or a server failed. What is
not installed yet, `python -m tests.bench.peers install` puts into --into; a peer that cannot be is
left out with its reason. Flags that are not below go to `tests.bench.in_turns`, such as --rounds.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from penstock.loadtest.bench.results import say
from penstock.loadtest.report.comparison import aligned
from penstock.loadtest.report.report import Summary
from tests.bench.in_turns.command import make_parser, peers_config
from tests.bench.in_turns.rounds import Measurement, measure
from tests.bench.in_turns.table import PENSTOCK, Table
from tests.bench.peers.compare import WEIGHTS, comparison, make_file, usable
from tests.support.paths import ROOT

PEERS = ("llama", "vllm")
# Computed again beside what was added: the rest of a block of 16, and the block in which the answer
# began.
MOST_LOST = 32


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    options, more = _parser().parse_known_args(argv)
    into = options.into.resolve()
    peers, _ = usable(
        options.peers or PEERS,
        into,
        lambda peer: make_file(peer, options.shape, into, options.weights),
    )
    if not peers:
        print("no peer is left to compare with", file=sys.stderr)
        return 1
    case = f"{options.input_len}x{options.output_len}@1:turns=6:n={options.conversations}"
    flags = ["--cases", case, *more]
    _, *command = comparison(options.shape, into, peers, options.threads, options.weights, flags)
    config = peers_config(make_parser().parse_args(command))
    outcome = measure(config, say)
    lines = turns_table(outcome.measurements)
    print("\n".join([Table(config, outcome).text(), "", *lines]))
    if too_many := wasted(outcome.measurements):
        say(f"penstock computed more than what was added: {too_many}")
    return 1 if outcome.failures or outcome.is_interrupted or too_many else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.server.six_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", default="hybrid", help="of the model, as `tests.bench.peers` has it")
    add("--weights", choices=[*WEIGHTS], default="bf16")
    add("--input-len", type=int, default=512, metavar="N", help="new tokens of each turn")
    add("--output-len", type=int, default=64, metavar="N")
    add("--conversations", type=int, default=2, metavar="N", help="of each round")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    add("--peer", dest="peers", action="append", choices=PEERS, help="by default all")
    add("--into", type=Path, default=ROOT / "build" / "peers", metavar="DIR")
    return parser


def turns_table(measurements: list[Measurement]) -> list[str]:
    """Medians of the rounds: a row for each turn, two columns for each server."""
    servers = list(dict.fromkeys(measured.server for measured in measurements))
    turns = {server: _turns_of(measurements, server) for server in servers}
    if not servers:
        return []
    heading = ["turn", "prompt", "added"]
    heading += [f"{server}: {what}" for server in servers for what in ("computed", "TTFT, ms")]
    rows = [heading]
    for number, turn in enumerate(turns[servers[0]]):
        row = [str(number + 1), f"{turn['input_tokens']:.0f}"]
        row.append(f"{_added(turns[servers[0]], number):.0f}")
        for server in servers:
            own = turns[server][number]
            row += [f"{_computed(own):.0f}", f"{own['median_ttft_ms']:.0f}"]
        rows.append(row)
    return aligned(rows)


def wasted(measurements: list[Measurement]) -> str:
    """The turns in which Penstock computed more than what was added; empty where there is none."""
    turns = _turns_of(measurements, PENSTOCK)
    found = [
        f"{_computed(turn):.0f} of {_added(turns, number):.0f} tokens in turn {number + 1}"
        for number, turn in enumerate(turns)
        if _computed(turn) > _added(turns, number) + MOST_LOST
    ]
    return ", ".join(found)


def _turns_of(measurements: list[Measurement], server: str) -> list[Summary]:
    """The medians of its rounds, by turn."""
    rounds = [each.summary["turns"] for each in measurements if each.server == server]
    return [
        {key: statistics.median(turn[key] for turn in same) for key in same[0]}
        for same in zip(*rounds, strict=True)
    ]


def _added(turns: list[Summary], number: int) -> float:
    before = turns[number - 1]["input_tokens"] if number else 0.0
    added: float = turns[number]["input_tokens"] - before
    return added


def _computed(turn: Summary) -> float:
    computed: float = turn["input_tokens"] - turn["cached_input_tokens"]
    return computed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
