"""`Encoder`: what makes rows of an insert, in slices, so that a step beside it is not late."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.engine.step.model_info import EncoderInfo
from penstock.scheduler.types import Insert

if TYPE_CHECKING:  # an executor without a model does not load torch
    from torch import Tensor


class InsertRows(NamedTuple):
    """What stands in place of an insert's embedded tokens, in the model's type.

    embeddings: (num_tokens, hidden_size). deepstack: (K, num_tokens, hidden_size), what is added to
    the states after each of the first K layers, or None.
    """

    embeddings: "Tensor"
    deepstack: "Tensor | None" = None


class Encoding(Protocol):
    """An insert that is being encoded. Its rows do not depend on how it was sliced."""

    def run(self, budget_s: float) -> bool:
        """Computes slices, of a few milliseconds each, until so long has passed or all is done;
        at least one. Returns whether it is complete; nothing is left to do then."""
        ...

    @property
    def rows(self) -> InsertRows:
        """Those of a complete one."""
        ...


class Encoder(Protocol):
    """The encoder of a loaded model, where its first layer is computed. One thread calls it."""

    @property
    def info(self) -> EncoderInfo: ...

    def begin(self, insert: Insert) -> Encoding:
        """insert: with its content. Several may be begun at a time."""
        ...
