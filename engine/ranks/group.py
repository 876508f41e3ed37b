"""`Group`: what the processes that compute one model tell each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.scheduler.errors import PenstockError

if TYPE_CHECKING:  # rank 0 starts the others before it imports torch
    from torch import Tensor


class RankFailed(PenstockError):
    """A rank has ended, or has not come to where the others are. There is no way on from here.

    rank: which. signal: what ended it, or stopped it; None where it was none. failed_way: as of
    `penstock.engine.step.gpu_fault`, where that ended it.
    """

    def __init__(
        self, why: str, *, rank: int, signal: int | None = None, failed_way: str | None = None
    ) -> None:
        super().__init__(why)
        self.rank = rank
        self.signal = signal
        self.failed_way = failed_way


class Group(Protocol):
    """The ranks. All call the same methods in the same order, with tensors of the same shapes. Each
    raises RankFailed, with the rank that is missing and what the others were doing."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def doing(self) -> "Doing":
        """Tells where this rank is, for the message of a failure."""
        ...

    def all_reduce(self, tensor: "Tensor") -> None:
        """The sum of all ranks' tensors, in place: on each rank the same bits, and those that
        adding in the order of the ranks in float32 gives."""
        ...

    def broadcast(self, tensor: "Tensor") -> None:
        """That of rank 0, in place."""
        ...

    def gather(self, tensor: "Tensor") -> "Tensor | None":
        """On rank 0 (size, *shape), of all ranks; on others None."""
        ...

    def barrier(self) -> None: ...


@dataclass(slots=True)
class Doing:
    """Where a rank is, for the message of a failure. step: of the scheduler, 0 at the start."""

    step: int = 0
    phase: str = "its start"

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def begin_step(self, step: int) -> None:
        """step: of the scheduler."""
        self.step, self.phase = step, "inputs"

    def end_step(self) -> None:
        self.step, self.phase = 0, "its start"

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase


class SoleRank:
    """`Group` of one process, which has nothing to wait for."""

    rank, size, is_capturable = 0, 1, True

    def __init__(self) -> None:
        self.doing = Doing()

    def all_reduce(self, tensor: "Tensor") -> None:
        """It is the sum already."""

    def broadcast(self, tensor: "Tensor") -> None:
        """It is that of rank 0 already."""

    def gather(self, tensor: "Tensor") -> "Tensor":
        return tensor[None]

    def barrier(self) -> None:
        """All are here."""

    def end(self, rank: int) -> None:
        """Nobody is waited for."""
