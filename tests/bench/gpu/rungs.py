"""The rungs of the ladder: what is tried on a GPU, from one kernel to the engine's own start.

Names and limits alone, without torch: `tests.bench.gpu.rung` runs one, `tests.bench.gpu.probe` all.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    """limit_s: of its process, from the import of torch on. cores: that it keeps busy, as it
    compiles, and its reference and its checks compute on the host too. kernels: of
    `tests.bench.engine.kernels.GROUPS`, all that such a rung checks."""

    name: str
    limit_s: float
    shows: str
    cores: int = 4
    kernels: tuple[str, ...] = ()


def _kernels(name: str, shows: str, *groups: str) -> Rung:
    """On inputs of few rows, in the shapes of the models."""
    return Rung(f"kernel-{name}", 40, f"{shows} is what torch computes", 2, groups)


# Each inner tuple runs at once where there are cores for it: after the first, which finds torch on
# a cold disk, most of a rung's seconds are imports and compilation.
WAVES: tuple[tuple[Rung, ...], ...] = (
    (Rung("kernel", 60, "one kernel computes what torch computes"),),
    (
        _kernels("linear", "a product of few rows, with what surrounds it,", "linear"),
        _kernels("decode", "attention of decodes", "decode-attention"),
        _kernels("prefill", "attention of chunks", "prefill-attention"),
        _kernels("norm-rope", "a norm, SiLU, a rotation, an embedding", "small"),
        _kernels(
            "kv-write", "what is written to the KV cache and the tables", "kv-write", "tables"
        ),
        _kernels("sample", "an id that is sampled is one that may be, which", "sampling"),
        _kernels("codes", "a product with weights of 8 and 4 bits", "coded"),
        _kernels("experts", "a layer of experts", "experts"),
    ),
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
# What two layers of an 8B model are made of: if one of these fails alone, it is to blame.
MODEL_KERNELS = tuple(
    f"kernel-{name}" for name in ("linear", "decode", "prefill", "norm-rope", "kv-write", "sample")
)
# These run in the way that the rungs before them allow.
LAST = ("waits", "start")
