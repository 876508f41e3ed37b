"""`Exchange`: what ranks of tensor parallelism tell each other in a step, and how long it takes.

Nothing is computed meanwhile: each sum is between two products that depend on each other.
"""

from dataclasses import dataclass
from math import log2


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between the devices of a machine: see configs/hardware.toml."""

    name: str
    latency_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """num_sums: all-reduces of a step, each of `token_bytes` for each of its tokens. row_bytes: of
    the logits of a row, which rank 0 gathers from all ranks; it sends back an id."""

    link: Link
    num_ranks: int
    num_sums: int
    token_bytes: int
    row_bytes: int

    @property
    def step_s(self) -> float:
        """Latencies: of the sums, of gathering logits and of sending the ids."""
        return (self.num_sums + 2) * self.link.latency_s * log2(self.num_ranks)

    @property
    def token_s(self) -> float:
        """Of each token: what it adds to the sums. Each rank sends and receives all of its bytes
        but its own share twice: once to be added, and once as part of the sum (a ring, Patarasuk
        and Yuan 2009)."""
        others = (self.num_ranks - 1) / self.num_ranks
        return 2 * others * self.num_sums * self.token_bytes / self.link.bus_bytes_per_s

    @property
    def row_s(self) -> float:
        """Of each sampled row."""
        others = (self.num_ranks - 1) / self.num_ranks
        return others * self.row_bytes / self.link.bus_bytes_per_s
