"""`python -m tests.bench.server.neighbour_gap [NAME ...]`: does one client make the others wait?

A neighbour streams a token every 10 ms while each hostile request is sent and answered; the longest
time between two of its reads is the gap. Other programs on the machine, and this one, make gaps
too: so each case is tried several times, and after each try the gap of a quiet time is measured.
The smallest gap of a case is the server's own; the last line counts those that are over the limit.

--tries N    of each case (5)
--list       only names the cases
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.server.neighbour_gap.cases import CASES
from tests.bench.server.neighbour_gap.client import statuses
from tests.bench.server.neighbour_gap.model import write_model
from tests.bench.server.neighbour_gap.neighbour import Neighbour
from tests.bench.server.neighbour_gap.requests import BODY_BYTES, Case
from tests.support.serving import RunningServer

LIMIT_MS = 100
_STEP_MS = 10
_MAX_CASE_S = 30.0  # then it is not tried again
_AFTERWARDS_S = 0.1  # for what follows the answer
_FLAGS = (
    *("--scripted", "--scripted-step-ms", str(_STEP_MS), "--max-num-queued-reqs", "2048"),
    *("--max-body-bytes", str(BODY_BYTES), "--trust-request-chat-template"),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.server.neighbour_gap")
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of the name of a case")
    parser.add_argument("--tries", type=int, default=5, metavar="N", help="of each (default: 5)")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    options = parser.parse_args(arguments)
    cases = {
        name: case
        for name, case in CASES.items()
        if not options.names or any(each in name for each in options.names)
    }
    if options.list:
        print(*cases, sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        server = RunningServer(*write_model(Path(directory)), *_FLAGS)
        try:
            server.wait_until_ready()
            return int(_measure(server.port, cases, options.tries) > 0)
        finally:
            server.stop()


def _measure(port: int, cases: dict[str, Case], num_tries: int) -> int:
    """Prints a line for each case; returns how many are over the limit."""
    print(f"{'':44} {'gap, ms':>17} {'quiet, ms':>10}")
    print(
        f"{'request':44} {'least':>5} {'mid':>5} {'most':>5} {'most':>10} {'answer, s':>9}  status"
    )
    over = []
    for name, case in cases.items():
        requests, began_s = case(), time.monotonic()
        tries: list[tuple[float, float, float, list[str]]] = []
        while len(tries) < num_tries and time.monotonic() < began_s + _MAX_CASE_S:
            tries.append(_attack(port, requests))
        gaps_ms = [gap_s * 1e3 for gap_s, _, _, _ in tries]
        quiet_ms = max(quiet_s for _, quiet_s, _, _ in tries) * 1e3
        answer_s = min(answer_s for _, _, answer_s, _ in tries)
        status = ",".join(sorted({each for *_, found in tries for each in found}))
        gaps = f"{min(gaps_ms):5.0f} {statistics.median(gaps_ms):5.0f} {max(gaps_ms):5.0f}"
        print(f"{name:44} {gaps} {quiet_ms:10.0f} {answer_s:9.2f}  {status}", flush=True)
        if min(gaps_ms) > LIMIT_MS:
            over.append(name)
    print(f"{len(over)} of {len(cases)} cases over {LIMIT_MS} ms{': ' if over else ''}", end="")
    print("; ".join(over))
    return len(over)


def _attack(port: int, requests: list[bytes]) -> tuple[float, float, float, list[str]]:
    """The gap, that of a quiet time after it, the seconds to the answer, and the statuses."""
    neighbour = Neighbour(port)
    try:
        began_s = time.monotonic()
        neighbour.gap_s()
        found = statuses(port, requests)
        took_s = time.monotonic() - began_s
        time.sleep(_AFTERWARDS_S)
        gap_s = neighbour.gap_s()
        time.sleep(min(took_s, 1.0) + _AFTERWARDS_S)
        return gap_s, neighbour.gap_s(), took_s, found
    finally:
        neighbour.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
