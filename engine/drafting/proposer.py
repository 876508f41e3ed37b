"""The `Proposer` protocol, between an executor and what proposes drafts in it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from penstock.scheduler.types import ScheduledBatch


class ProposingRow(NamedTuple):
    """number: among the rows of the step that sample. length: known tokens of the sequence in
    `slot`, all in the executor's token table. num: how many drafts are wanted of what follows."""

    number: int
    slot: int
    length: int
    num: int


class Proposals(NamedTuple):
    """drafts: by number of the row, as many as were wanted, or fewer. num_caught_up: see
    `SampledTokens`."""

    drafts: dict[int, tuple[int, ...]]
    num_caught_up: int = 0


class Proposer(Protocol):
    """Keeps up with the batches of an executor, and proposes when it is asked."""

    def apply(self, batch: ScheduledBatch) -> None:
        """To be called for every step, with its assignments and updates."""
        ...

    def room(self, batch: ScheduledBatch) -> Tensor | None:
        """Where the step writes the states of its tokens, (T, hidden_size), after the final norm;
        None where they are not read. It has been applied."""
        return None

    def keep(self, batch: ScheduledBatch, num_rejected: Mapping[int, int]) -> None:
        """The step has written them. num_rejected: by row, of those with drafts that were wrong."""
        return

    def propose(self, rows: list[ProposingRow]) -> Proposals:
        """May write drafts into the token table, after the known tokens of each row."""
        ...


# Of an executor's token table (slots, max_model_len + 1), and its block table (slots, max_blocks)
# of the first group of layers.
MakeProposer: TypeAlias = Callable[[Tensor, Tensor], Proposer]
