"""`ModelFiles`: where a model is, and the `Download` of what is not there yet. `ListedModel`: a
line of `penstock models`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.process.phases import LoadProgress


@dataclass(frozen=True, slots=True)
class Download:
    """One that is to be done.

    what: for the log. state: how far it is, in any thread. run: does it; raises InvalidModel.
    """

    what: str
    state: Callable[[], LoadProgress]
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that passed the check, in a directory where all but its weights are; or a GGUF file,
    with all that it needs in it.

    download: of the weights, or the file; None where they are there.
    """

    directory: Path
    download: Download | None = None


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
