"""`python -m tests.bench.gpu.grids`: the programs, waves and empty programs of each launch.

GRIDS.md keeps the table (`--write`), and a test fails where it is not what the launch code does.
An H100 or H200 has 132 multiprocessors. A wave is as many programs as all of them hold at once, by
the registers and shared memory in `resources.json`.
"""

from tests.bench.gpu.launches import Model, Step  # isort: skip: turns the interpreter on

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.bench.gpu.goals import LLAMA, QWEN, SMALL
from tests.bench.gpu.work import Work, Workbench
from tests.support.paths import MODEL_CONFIGS

FILE = Path(__file__).with_name("GRIDS.md")
_OPENING = """\
# Programs, waves and empty programs of each launch

Made by `python -m tests.bench.gpu.grids --write` from the launch code and `resources.json`; a
test fails where it is stale. 132 multiprocessors. `fit`: programs that one of them holds at once.
`waves`: programs over those that all hold. `empty`: programs that start, find nothing to do, and
end. `balance`: the average work of a multiprocessor over the largest. cuBLAS chooses its own
grids, which are not known here.
"""

STEPS: dict[str, tuple[str, Step]] = {
    f"{LLAMA}, batch 1, context 512": (LLAMA, Step(decodes=(512,))),
    f"{LLAMA}, batch 16, context 1,024": (LLAMA, Step(decodes=(1024,) * 16)),
    f"{LLAMA}, batch 32, context 8,192": (LLAMA, Step(decodes=(8192,) * 32)),
    f"{LLAMA}, batch 256, context 1,024": (LLAMA, Step(decodes=(1024,) * 256)),
    f"{LLAMA}, 8 at 1,024 with 3 drafts each": (LLAMA, Step(decodes=(1024,) * 8, drafts=3)),
    f"{SMALL}, batch 1, context 512": (SMALL, Step(decodes=(512,))),
    f"{SMALL}, batch 256, context 640": (SMALL, Step(decodes=(640,) * 256)),
    f"{QWEN}, 255 decodes at 640 and a chunk of 128, as one graph": (
        QWEN,
        Step(decodes=(640,) * 255, chunks=((128, 0),), graph=384),
    ),
    f"{LLAMA}, one chunk of 1,024": (LLAMA, Step(chunks=((1024, 0),))),
}


def rows(model: str, step: Step) -> Iterator[tuple[int, Work]]:
    """Each kind of launch and how often a step has it, in the order of their first ones."""
    bench = Workbench()
    counts: dict[Work, int] = {}
    for launched in Model(MODEL_CONFIGS / model).launches(step):
        # These differ between the first or the last layer and the others.
        work = replace(bench.of(launched, step), loads_at_end=0, room=None)
        counts[work] = counts.get(work, 0) + 1
    for work, count in counts.items():
        yield count, work


def table(title: str) -> str:
    lines = [f"## {title}", "", "| launch | times | programs | fit | waves | empty | balance |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for count, work in rows(*STEPS[title]):
        if not work.fit:
            lines.append(f"| {work.name} | {count} | | | | | |")
            continue
        balance = work.busy / 132 / work.busiest if work.busy else 0.0
        lines.append(
            f"| {work.name} | {count} | {work.programs:,} | {work.fit} | {work.waves:.2f} "
            f"| {work.empty:,} | {balance:.0%} |"
        )
    return "\n".join(lines)


def text() -> str:
    return "\n\n".join([_OPENING.rstrip(), *map(table, STEPS)]) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")
