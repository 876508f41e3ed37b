"""`ParallelExecutor`: a model of which several processes compute a part each: of every layer
(tensor parallelism), or some of the layers (pipeline parallelism), or both.

Rank 0 is this process. The others run the same executor on the same batches, which they get from
here as the scheduler made them; each keeps its own token and block tables. Rank 0 alone samples. It
has the last stage: while it computes a step, the stages before are at the next ones.
"""

from collections import deque
from collections.abc import Sequence

from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.first_rank import FirstRank
from penstock.engine.executors.followers import Followers, Step
from penstock.engine.models.lora.store import Adapters
from penstock.engine.ranks.group import RankFailed
from penstock.scheduler.types import RequestId, SampledTokens, SamplingParams, ScheduledBatch

_NOT_SAMPLED = SamplingParams(max_tokens=1)


class ParallelExecutor(FirstRank[CpuExecutor]):
    """See `penstock.engine.step.executor.Executor`."""

    def __init__(self, executor: CpuExecutor, followers: Followers, num_stages: int = 1) -> None:
        """executor: of rank 0."""
        super().__init__(executor, followers)
        executor.adapters.lead(followers)
        self._has_stages = num_stages > 1
        self._launched: deque[_Launched] = deque()
        # Of the steps since the last message to the other ranks.
        self._sampled: list[Sequence[int]] = []

    @property
    def adapters(self) -> Adapters:
        return self._executor.adapters

    def release(self, request_id: RequestId) -> None:
        if self._launched:  # steps that rank 0 has yet to compute may have a row of it
            self._launched[-1].released.append(request_id)
        else:
            super().release(request_id)

    def execute(self, batch: ScheduledBatch) -> "_Launched":
        """Raises RankFailed: then nothing more can be computed."""
        self._followers.is_waiting = True
        try:
            self._followers.send(Step(without_sampling(batch), self._sampled))
        except RankFailed as error:
            raise RankFailed(
                f"{error}: this was seen when step {batch.step} was launched",
                rank=error.rank,
                signal=error.signal,
            ) from error
        self._sampled = []
        self._executor.steps_in_flight.launch()
        launched = _Launched(self, batch)
        self._launched.append(launched)
        if not self._has_stages:  # the others are waiting for this rank
            launched.compute()
        return launched

    def compute_next(self, launched: "_Launched") -> SampledTokens:
        """This rank's part of the oldest step, which waits for that of the others. Raises
        RankFailed."""
        assert launched is self._launched[0], "steps are waited for in the order of their launch"
        try:
            sampled = self._executor.execute(launched.batch).wait()
        except RankFailed as error:
            raise self._followers.explained(error) from error
        self._launched.popleft()
        self._executor.steps_in_flight.complete()
        self._followers.is_waiting = bool(self._launched)
        self._sampled.append(sampled.token_ids)
        for request_id in launched.released:
            self._executor.release(request_id)
        return sampled

    def close(self) -> None:
        """Ends the other ranks."""
        self._followers.close()


class _Launched:
    """`PendingTokens` of a step that the other ranks have."""

    def __init__(self, executor: ParallelExecutor, batch: ScheduledBatch) -> None:
        self._executor = executor
        self._sampled: SampledTokens | None = None
        self.batch = batch
        self.released: list[RequestId] = []
        """What may go once it is computed."""

    def compute(self) -> SampledTokens:
        """Rank 0's part of it. Raises RankFailed."""
        if self._sampled is None:
            self._sampled = self._executor.compute_next(self)
        return self._sampled

    def wait(self) -> SampledTokens:
        return self.compute()


def without_sampling(batch: ScheduledBatch) -> ScheduledBatch:
    """What the other ranks need of it: a grammar may be large."""
    if not batch.assignments:
        return batch
    assignments = [each._replace(sampling=_NOT_SAMPLED) for each in batch.assignments]
    return batch._replace(assignments=tuple(assignments))
