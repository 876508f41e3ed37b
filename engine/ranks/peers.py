"""`Peers`: what a rank knows of the others, so that it stops waiting for one that does not come.

For ranks that compute on GPUs, whose collectives do not say who is missing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.engine.ranks.board import Board
from penstock.engine.ranks.group import Doing, RankFailed
from penstock.engine.ranks.layout import RankLayout

_POLL_S = 5e-5


class Peers:
    """doing: what this rank does. timeout_s: for how long it waits for another."""

    def __init__(self, rank: int, layout: RankLayout, board: Board, timeout_s: float) -> None:
        self.rank = rank
        self.layout = layout
        self.doing = Doing()
        self.timeout_s = timeout_s
        self._board = board
        self._ended: int | None = None

    def at(self, step: int, phase: str) -> None:
        """Tells the others where this rank is. step: of the scheduler, or 0."""
        self.doing.step, self.doing.phase = step, phase
        self._board.write(self.rank, step, phase)

    def end(self, rank: int) -> None:
        """That rank has ended, so nobody waits for it any more. May be called in any thread."""
        self._ended = rank

    def check(self, began_s: float | None = None) -> None:
        """Raises RankFailed where a rank has ended, or this one waits for too long. began_s: of
        time.monotonic(), when it began to wait; None where it does not wait."""
        if self._ended is not None:
            raise self._has_ended(self._ended)
        if began_s is not None and time.monotonic() - began_s > self.timeout_s:
            raise self._late()

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Until the device has passed it. Raises RankFailed, also where the device waits for others
        for longer than `timeout_s`."""
        began_s = time.monotonic()
        while not event.query():  # type: ignore[no-untyped-call]
            self.check(began_s)
            time.sleep(_POLL_S)
        self.check()  # what the device has after a rank's end is not a result

    @contextmanager
    def failures(self, name: str) -> Iterator[None]:
        """name: of an operation. What torch raises for it becomes RankFailed."""
        try:
            yield
        except RuntimeError as error:  # dist.DistBackendError is one
            if "out of memory" in str(error).lower():
                raise
            if self._ended is not None:
                raise self._has_ended(self._ended) from error
            why = str(error).strip().partition("\n")[0]
            if "timed out" in why.lower():
                raise self._late() from error
            raise RankFailed(
                f"{self._me} lost the others in {self.doing} ({name}: {why})", rank=self.rank
            ) from error

    @property
    def _me(self) -> str:
        return self.layout.name_of(self.rank)

    def _late(self) -> RankFailed:
        """Names the one that is behind all others."""
        places = [self._board.read(rank) for rank in range(self.layout.size)]
        others = [rank for rank in range(self.layout.size) if rank != self.rank]
        rank = min(others, key=lambda each: places[each].step)
        return RankFailed(
            f"{self.layout.name_of(rank)} did not come within {self.timeout_s:g} s: it is at "
            f"{places[rank]}, and {self._me} waits at {places[self.rank]}",
            rank=rank,
        )

    def _has_ended(self, rank: int) -> RankFailed:
        name = self.layout.name_of(rank)
        return RankFailed(
            f"{name} has ended while {self._me} waited for it in {self.doing}", rank=rank
        )
