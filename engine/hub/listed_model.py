"""`ListedModel`: a line of `penstock models`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """name: what `penstock serve` takes. family None: its files do not say. problem: why it cannot
    be served, in a few words. model_impl: whose implementation computes it, as in `ModelInfo`; None
    where there is a problem."""

    name: str
    path: Path
    num_bytes: int
    family: str | None
    problem: str | None
    model_impl: str | None = None
