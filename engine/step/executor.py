"""The `Executor` protocol, between the scheduler and a device.

It is designed for a device that runs ahead of the host. `execute` may return before anything is
computed; the loop schedules and launches the next step, and only then waits for this one. What
makes that possible is that sampled ids never have to pass through the host: they are written to
the executor's own token table (see `ScheduledBatch`), where the next step reads them. Nor has the
number of drafts that were accepted, since the executor knows how long each sequence is.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.config import AdapterSource
from penstock.engine.errors import UnknownAdapter
from penstock.engine.step.model_info import LoadedAdapter, ModelInfo
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.types import (
    BlockCopy,
    Request,
    RequestId,
    SampledTokens,
    ScheduledBatch,
)


class PendingTokens(Protocol):
    """A step that was launched and may still be running."""

    def wait(self) -> SampledTokens:
        """Blocks until the step's sampled ids are on the host. Raises what the step raised."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """`PendingTokens` of a step that is complete when `execute` returns."""

    sampled: SampledTokens

    def wait(self) -> SampledTokens:
        return self.sampled


class Executor(Protocol):
    """Runs scheduled batches in order. One thread calls it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def journals(self) -> Sequence[BlockJournal]:
        """Those of each group's blocks, where these outlive this process; else none."""
        ...

    @property
    def tier(self) -> BlockTier | None:
        """Where blocks go that no sequence uses; None without one."""
        ...

    @property
    def adapters(self) -> "AdapterStore | None":
        """None where it has none, whatever the settings."""
        ...

    def prepare(self, request: Request) -> "Future[Any] | None":
        """Begins, in the background, what must be done before the request is scheduled. None where
        that is nothing. A PenstockError, raised here or by the future, refuses it."""
        ...

    def release(self, request_id: RequestId) -> None:
        """The request has ended, or was refused: what `prepare` made for it may go."""
        ...

    def execute(self, batch: ScheduledBatch) -> PendingTokens: ...


class AdapterStore(Protocol):
    """The LoRA adapters of an executor. Those that are loaded may all be in one step."""

    def load(self, source: AdapterSource) -> "Future[LoadedAdapter]":
        """Reads it in the background. A PenstockError, raised by the future, refuses it."""
        ...

    def unload(self, adapter_id: str) -> None:
        """It goes when the requests that were prepared with it have been released."""
        ...


def check_no_adapter(request: Request) -> None:
    """For executors without adapters. Raises UnknownAdapter."""
    if request.adapter is not None:
        raise UnknownAdapter(request.adapter)


def block_copies(copies: Sequence[BlockCopy], group: int = 0) -> list[tuple[int, int]]:
    """(source, target) of the copies in the pool of one group of layers."""
    return [(copy.source, copy.target) for copy in copies if copy.group == group]
