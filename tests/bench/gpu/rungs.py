"""The rungs of the ladder: what is tried on a GPU, from one kernel to the engine's own start.

Names and limits alone, without torch: `tests.bench.gpu.rung` runs one, `tests.bench.gpu.probe` all.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    """limit_s: of its process, from the import of torch on."""

    name: str
    limit_s: float
    shows: str


# Each inner tuple runs at once where there are cores for it: after the first, which finds torch on
# a cold disk, most of a rung's seconds are imports and compilation.
WAVES: tuple[tuple[Rung, ...], ...] = (
    (Rung("kernel", 60, "one kernel computes what torch computes"),),
    (
        Rung("kernel-pdl", 25, "kernels that start early compute the same"),
        Rung("graph", 25, "a captured graph computes the same"),
        Rung("graph-pdl", 25, "a graph of kernels that start early computes the same"),
        Rung("graph-memset-pdl", 25, "such a kernel right behind a memset or a copy, too"),
    ),
    (
        Rung("model", 40, "two layers of 8B shape give the ids of a float32 reference"),
        Rung("model-pdl", 40, "the same, with kernels that start early"),
        Rung("decode-graphs", 40, "the same, with decode steps as graphs"),
        Rung("decode-graphs-pdl", 40, "the same, with both"),
    ),
    (
        Rung("chunk-graphs", 40, "the same, with steps of prefill chunks as graphs"),
        Rung("chunk-graphs-pdl", 40, "the same, with kernels that start early"),
    ),
    (
        Rung("waits", 40, "a request of any kind starts without a wait for the device"),
        Rung("start", 40, "the engine's own start, then decode steps"),
    ),
)
RUNGS: tuple[Rung, ...] = tuple(rung for wave in WAVES for rung in wave)
# These run in the way that the rungs before them allow.
LAST = ("waits", "start")
