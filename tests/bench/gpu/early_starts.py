"""What kernels that start early gain, by the room that they have: a table of ESTIMATE.md."""

from tests.bench.gpu.launches import Step  # isort: skip: turns the interpreter on

from tests.bench.gpu.assumptions import EXPECTED, Early
from tests.bench.gpu.goals import LLAMA, SMALL, Row
from tests.bench.gpu.step_times import STEPS_SINCE, StepTimes

OPENING = """\
## Early starts, as room allows

ms of a decode step, as expected, if no kernel started before the one before it had ended; if
programs start early where a multiprocessor has registers, shared memory and warps for them
(residency.py; the figures of the other tables); and if all of them had room. So little is lost by
room: a launch costs `release` even where all of its programs wait. At 256 rows each of ours stands
between two of cuBLAS, which let nothing start early. Then what an H200 measured, as part of
the suite, and alone after its last change of tiles (loadtest/LOG.md). Of batch 1 it also measured
what no early start costs, 4.88 and 4.76 ms with older tiles. What the estimate does not explain:
the output layer at batch 1 took 317 us by the profiler where 246 are expected, and at 16 rows an
early start gained 0.63 ms.
"""
_MODES = (Early.NONE, Early.AS_ROOM_ALLOWS, Early.ALL)
# Of the steps of the table, ms that an H200 took after its last change of tiles.
_STEPS: tuple[tuple[str, int, int, float | None], ...] = (
    (LLAMA, 1, 512, 4.30),
    (SMALL, 1, 512, 0.95),
    (LLAMA, 16, 512, 4.88),
    (LLAMA, 256, 1024, None),
    (SMALL, 256, 1024, None),
)


def table(measured: list[Row]) -> str:
    """measured: rows of the suite."""
    heads = ["step", *(mode.value for mode in _MODES), "measured", "then"]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for model, batch, context, then in _STEPS:
        step = Step(decodes=(context + STEPS_SINCE,) * batch)
        times = [StepTimes(model, EXPECTED, early=mode).us(step) / 1e3 for mode in _MODES]
        is_at = {"part": "decode", "model": model, "batch": batch, "context": context}.items()
        found = next((row["tpot_ms"] for row in measured if is_at <= row.items()), None)
        cells = [f"{model}, batch {batch}, context {context:,}"]
        cells += ["-" if ms is None else f"{ms:.2f}" for ms in (*times, found, then)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
