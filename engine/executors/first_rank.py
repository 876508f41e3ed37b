"""`FirstRank`: the executor of rank 0, of a model that several processes compute: each a part of
every layer (tensor parallelism), or some of the layers (pipeline parallelism), or both.

Rank 0 is this process. The others have the same executor and get the same batches, as the scheduler
made them; each keeps its own token and block tables. Rank 0 alone samples, in the last stage. Ids,
those after accepted drafts too, come to the others with the next step, unless they pass from GPU to
GPU: where there are stages, no sequence is in a step before the host knows its last id.
"""

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from penstock.engine.executors.awaited_ids import StepIds
from penstock.engine.executors.followers import Followers, Step
from penstock.engine.models.lora.store import Adapters
from penstock.engine.ranks.group import RankFailed
from penstock.engine.step.executor import Executor, PendingTokens
from penstock.scheduler.types import SampledTokens, SamplingParams, ScheduledBatch

_NOT_SAMPLED = SamplingParams(max_tokens=1)
# From the end of a connection to the news of what ended the process at its other end.
_NEWS_S = 5.0


class RankExecutor(Executor, Protocol):
    """The executor that each rank has."""

    @property
    def adapters(self) -> Adapters: ...


Own = TypeVar("Own", bound=RankExecutor)


class FirstRank(Generic[Own]):
    """See `penstock.engine.step.executor.Executor`. followers: the other ranks' processes."""

    def __init__(
        self, executor: Own, followers: Followers, leave: Callable[[], None] = lambda: None
    ) -> None:
        """executor: of rank 0. leave: ends its connection to the others."""
        self.own, self.followers, self._leave = executor, followers, leave
        self.info, self.journals, self.tier = executor.info, executor.journals, executor.tier
        self.adapters = executor.adapters
        self.adapters.lead(followers)
        self.prepare, self.release = executor.prepare, executor.release
        self._last: _LaunchedStep | None = None
        # The ids of the steps since the last message to the other ranks.
        self._sampled: list[StepIds] = []

    def execute(self, batch: ScheduledBatch) -> "_LaunchedStep":
        """Raises RankFailed: then nothing more can be computed."""
        self.followers.is_waiting = True
        try:
            self.followers.send(Step(without_sampling(batch), self._sampled))
        except RankFailed as error:
            raise RankFailed(
                f"{error}: this was seen when step {batch.step} was launched",
                rank=error.rank,
                signal=error.signal,
            ) from error
        self._sampled = []
        with causes(self.followers):
            self._last = _LaunchedStep(self, self.own.execute(batch))
        return self._last

    def collect(self, step: "_LaunchedStep") -> SampledTokens:
        """The ids of the oldest step. Raises RankFailed."""
        with causes(self.followers):
            sampled = step.own.wait()
        if step is self._last:
            self.followers.is_waiting = False
        self._sampled.append(StepIds.of(sampled))
        return sampled

    def close(self) -> None:
        """Ends the other ranks."""
        self.followers.on_end(lambda _: None)
        self._leave()
        self.followers.close()


class _LaunchedStep:
    """`PendingTokens` of a step that the other ranks have. own: of this rank."""

    def __init__(self, ranks: FirstRank[Own], own: PendingTokens) -> None:
        self._ranks = ranks
        self._sampled: SampledTokens | None = None
        self.own = own

    def wait(self) -> SampledTokens:
        if self._sampled is None:
            self._sampled = self._ranks.collect(self)
        return self._sampled


@contextmanager
def causes(followers: Followers) -> Iterator[None]:
    """Errors that another rank's end caused become that."""
    try:
        yield
    except RankFailed as error:
        if error.rank == 0:  # only that something has ended is known
            select.select([followers.news], [], [], _NEWS_S)
        raise followers.explained(error) from error
    except RuntimeError:
        followers.check()
        raise


def without_sampling(batch: ScheduledBatch) -> ScheduledBatch:
    """The batch as the other ranks need it: a grammar may be large."""
    if not batch.assignments:
        return batch
    assignments = [each._replace(sampling=_NOT_SAMPLED) for each in batch.assignments]
    return batch._replace(assignments=tuple(assignments))
