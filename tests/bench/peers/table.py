"""One table of Penstock and its peers, in Markdown: all weights and cases, and who is best at each.

Each of --weights is one comparison of `tests.bench.in_turns`, in which all servers take turns.
"""

import argparse
import json
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from penstock.loadtest.command_line import INTERRUPTED
from penstock.loadtest.report.report import readable_date
from penstock.loadtest.report.svg import short_number
from tests.bench.in_turns.cases import Case
from tests.bench.in_turns.table import PENSTOCK, case_line
from tests.bench.peers.compare import FROM_CHECKPOINT, WEIGHTS, comparison, make_file, usable
from tests.bench.peers.install import PEERS, fit_peers
from tests.support.paths import ROOT

# One stream, some and many; a shared prefix; TTFT alone; long prompts; conversations.
CASES = (
    "128x64@1,128x64@8,128x64@32,576x32@16:shared=512,1024x1@1:n=16,"
    "2048x128@1:n=4,2048x128@8:n=16,100x100@1:turns=6,100x100@4:turns=6"
)
# One of --weights: its name, what was measured if anything was, and who is not in it and why.
Part: TypeAlias = dict[str, Any]
_FIGURES = (
    ("output tok/s", "output_throughput"),
    ("TTFT p50, ms", "median_ttft_ms"),
    ("TPOT p50, ms", "median_tpot_ms"),
)
_RATE = "output_throughput"
_BUSY_CORES = 0.1  # of other processes, from which the table says so
_MAX_REASON = 300  # characters


def write_table(options: argparse.Namespace, into: Path, peers: list[str], more: list[str]) -> int:
    """Returns the exit status: 0 if all was measured."""
    if taken := [flag for flag in more if flag.startswith(("--result-filename", "--json"))]:
        print(f"table takes no {taken[0]}; --out says where the table goes", file=sys.stderr)
        return 2
    out = options.out or into / f"peers-{options.shape}.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = []
    if options.measured:
        parts += [json.loads(file.read_text(encoding="utf-8")) for file in options.measured]
    else:
        for part in _measured(options, into, peers, more):
            parts.append(part)
            file = out.with_name(f"{out.stem}-{part['weights']}.json")
            file.write_text(json.dumps(part), encoding="utf-8")
            print(f"saved as {file}", flush=True)
            out.write_text(table(parts), encoding="utf-8")
    out.write_text(table(parts), encoding="utf-8")
    print(f"{out.read_text(encoding='utf-8')}\nsaved as {out}", flush=True)
    if any(part["is_interrupted"] for part in parts):
        return INTERRUPTED
    wanted = {*(options.peers or fit_peers()), PENSTOCK, FROM_CHECKPOINT}
    return 1 if any(not wanted.isdisjoint(_missing(part)) for part in parts) else 0


def _measured(
    options: argparse.Namespace, into: Path, peers: list[str], more: list[str]
) -> Iterator[Part]:
    """Ends with the one in which it was interrupted."""
    shape, all_weights = options.shape, options.weights or [*WEIGHTS]
    for number, weights in enumerate(all_weights, start=1):
        print(f"\n{weights}: {number} of {len(all_weights)} comparisons", flush=True)
        make = partial(make_file, name=shape, into=into, weights=weights)
        found, left_out = usable(peers, into, make)
        file = into / "comparison.json"
        file.unlink(missing_ok=True)
        status, versions = 0, _versions(found)  # of what is measured, not of a later commit
        if found:
            wanted = ["--cases", options.cases, "--result-filename", str(file), *more]
            command = comparison(shape, into, found, options.threads, weights, wanted)
            print(f"\n{shlex.join(command)}\n", flush=True)
            status = run_comparison([sys.executable, "-m", *command])
        part = {
            "shape": shape,
            "weights": weights,
            "versions": versions,
            "left_out": left_out,
            "is_interrupted": status == INTERRUPTED,
            "comparison": json.loads(file.read_text(encoding="utf-8")) if file.exists() else None,
        }
        yield part
        if part["is_interrupted"]:
            return


def run_comparison(command: list[str]) -> int:
    """Its exit status. Ctrl-C reaches it too, and SIGTERM is passed on: it stops its server.

    No handler raises while it is waited for: an exception between `waitpid` and the assignment
    of its result loses the status, and `Popen` then answers 0.
    """
    with subprocess.Popen(command) as process:
        handlers = {signal.SIGTERM: lambda *_: process.terminate(), signal.SIGINT: lambda *_: None}
        before = {number: signal.signal(number, each) for number, each in handlers.items()}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _versions(peers: list[str]) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    own = f"{version(PENSTOCK)} {commit}".strip()
    return {PENSTOCK: own} | {
        peer: ", ".join(PEERS[peer].requirements).replace("==", " ") for peer in peers
    }


# The text.


def table(parts: list[Part]) -> str:
    """A section for each of --weights, with a row for each case and figure."""
    lines = [f"# Penstock and other servers on a CPU: {parts[0]['shape']}, random weights", ""]
    measured = [part for part in parts if part["comparison"] is not None]
    cases = {case["name"]: case for part in measured for case in part["comparison"]["cases"]}
    lines += [
        "Medians of the rounds, with the lowest and highest in brackets. A ratio is Penstock's "
        "over the best peer's, within each round: better is above 1 for tok/s, below 1 for TTFT "
        "and TPOT.",
        "",
        *(f"- {case_line(_case(case))}" for case in cases.values()),
    ]
    for part in parts:
        lines += ["", *_section(part)]
    return "\n".join(lines) + "\n"


def _case(saved: dict[str, Any]) -> Case:
    return Case(**{each.name: saved[each.name] for each in fields(Case)})


def _section(part: Part) -> Iterator[str]:
    document = part["comparison"]
    yield f"## {part['weights']}"
    yield ""
    if document is not None:
        yield _where(document)
        yield ""
        names = [spec["name"] for spec in document["servers"]]
        yield _row(["case", "figure", *names, "best peer", "ratio"])
        yield _row(["---", "---", *("---:" for _ in names), "---", "---:"])
        for case in document["cases"]:
            for title, key in _FIGURES:
                # Of outputs of one token, tokens/s is TTFT in another unit.
                if case["output_len"] > 1 or key == "median_ttft_ms":
                    yield _row([case["name"], title, *_cells(case, names, key)])
        yield ""
    yield _row(["server", "version", "what it lacks"])
    yield _row(["---", "---", "---"])
    missing = _missing(part)
    servers = [spec["name"] for spec in document["servers"]] if document is not None else []
    for name in dict.fromkeys([*servers, *part["versions"], *missing]):
        of = part["versions"].get(name, part["versions"].get(PENSTOCK, "") * _is_own(name))
        yield _row([name, of, _reason(missing.get(name, ""))])


def _where(document: dict[str, Any]) -> str:
    others = [measured["cpu"]["others"] for measured in document["measurements"]]
    busy = max(others, default=0.0)
    return (
        f"{document['processor']}, cores: {document['num_cores']}; threads of each server: "
        f"{document['threads']}; rounds: {document['rounds']}, each server in a turn of its own; "
        f"{readable_date(document['date'])}."
        + (
            f" **Other processes used {statistics.median(others):.2f} cores in the median turn and "
            f"{busy:.2f} in the worst, so these figures are not those of a quiet machine.**"
            if busy > _BUSY_CORES
            else ""
        )
    )


def _is_own(name: str) -> bool:
    return name in (PENSTOCK, FROM_CHECKPOINT)


def _cells(case: dict[str, Any], names: list[str], key: str) -> Iterator[str]:
    """Each server's value, the best peer, and the ratio to it."""
    values = {name: case["values"][name][key] for name in names}
    for name in names:
        yield _with_range(values[name], short_number)
    peers = [name for name in names if values[name] is not None and not _is_own(name)]
    if not peers:
        yield from ("-", "-")
        return
    best = (max if key == _RATE else min)(peers, key=lambda name: values[name]["middle"])
    yield best
    yield _with_range(case["penstock_over"][best][key], "{:.2f}".format)


def _with_range(value: dict[str, Any] | None, form: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    middle = form(value["middle"])
    return middle if value["num"] == 1 else f"{middle} ({form(value['low'])}-{form(value['high'])})"


def _missing(part: Part) -> dict[str, str]:
    """Why servers were not measured, or not in all rounds."""
    found = dict(part["left_out"])
    if part["comparison"] is None:
        found[PENSTOCK] = "the comparison ended before it began; its output says why"
    else:
        found |= part["comparison"]["failures"]
    if part["is_interrupted"]:
        found[PENSTOCK] = "interrupted, as all servers"
    return found


def _reason(text: str) -> str:
    """In a cell: of a failure with a log, its first line, and of the log the last error or line."""
    first, *log = [line.strip() for line in text.splitlines()] or [""]
    errors = [line for line in log if "Error: " in line]
    return " ".join([first, *(errors or log)[-1:]])[:_MAX_REASON]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
