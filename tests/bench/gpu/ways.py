"""How kernels are launched in all parts after the probe, and which rungs allow it."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """overlaps: kernels start early (`penstock.engine.kernels.launch`). graphs: CUDA graphs."""

    overlaps: bool = True
    graphs: bool = True

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.overlaps else {"PENSTOCK_PDL": "0"}

    @property
    def flags(self) -> list[str]:
        return [] if self.graphs else ["--enforce-eager"]

    @property
    def name(self) -> str:
        launched = "in graphs" if self.graphs else "one by one, without graphs"
        return f"kernels {launched}, {'with' if self.overlaps else 'without'} PDL"


# From the fastest on, the rungs that must pass for it.
_NEEDS: tuple[tuple[Way, set[str]], ...] = (
    (
        Way(),
        {
            "kernel-pdl",
            "graph-pdl",
            "graph-memset-pdl",
            "model-pdl",
            "decode-graphs-pdl",
            "chunk-graphs-pdl",
        },
    ),
    (Way(overlaps=False), {"graph", "decode-graphs", "chunk-graphs"}),
    (Way(graphs=False), {"kernel-pdl", "model-pdl"}),
)


WAYS = {
    "graphs-pdl": Way(),
    "graphs": Way(overlaps=False),
    "eager-pdl": Way(graphs=False),
    "eager": Way(False, False),
}


def way_for(passed: Collection[str]) -> Way:
    """The fastest way that all its rungs allow; without any, the slowest."""
    return next((way for way, needed in _NEEDS if needed <= set(passed)), Way(False, False))
