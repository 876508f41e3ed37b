"""`CudaRanks`: a model that several GPUs compute together, a process for each: a part of every
layer (tensor parallelism), or some of the layers (pipeline parallelism), or both.

Rank 0 is this process, with the first GPU that it sees; rank i has the i-th. All launch the same
steps: a step's sums over the ranks are in its graph, and the states go from stage to stage after
it. Rank 0, in the last stage, samples. The ids pass from GPU to GPU where every rank embeds them;
of several stages the first alone does, and gets them with the next step: no sequence is in that
before the host knows its last id.
"""

import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.engine.executors.cuda.executor import CudaExecutor, LaunchedStep
from penstock.engine.executors.first_rank import FirstRank
from penstock.engine.executors.followers import Followers, Step
from penstock.engine.executors.parallel import without_sampling
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.torch_ranks import TorchRanks
from penstock.scheduler.types import SampledTokens, ScheduledBatch

# From the end of a connection to the news of what ended the process at its other end.
_NEWS_S = 5.0


class CudaRanks(FirstRank[CudaExecutor]):
    """See `penstock.engine.step.executor.Executor`."""

    def __init__(self, executor: CudaExecutor, followers: Followers, ranks: TorchRanks) -> None:
        """executor: of rank 0."""
        super().__init__(executor, followers)
        if executor.adapters is not None:
            executor.adapters.lead(followers)
        self._ranks = ranks
        self._last: _Launched | None = None
        # Of the steps since the last message to the other ranks, where there are several stages.
        self._sampled: list[Sequence[int]] = []

    def execute(self, batch: ScheduledBatch) -> "_Launched":
        """Raises RankFailed: then nothing more can be computed."""
        self._followers.is_waiting = True
        self._followers.send(Step(without_sampling(batch), self._sampled))
        self._sampled = []
        with causes(self._followers):
            self._last = _Launched(self, self._executor.execute(batch))
        return self._last

    def collect(self, step: "_Launched") -> SampledTokens:
        with causes(self._followers):
            sampled = step.own.wait()
        if step is self._last:
            self._followers.is_waiting = False
        if (stage_time := step.own.stage_time) is None:
            return sampled
        self._sampled.append(sampled.token_ids)
        mean_s = self._ranks.mean_computed_s(sampled.step, stage_time.seconds)
        return sampled._replace(computed_s=mean_s)

    def close(self) -> None:
        """Ends the other ranks."""
        close(self._followers, self._ranks)


class _Launched:
    """`PendingTokens` of a step. own: of this rank."""

    def __init__(self, ranks: CudaRanks, own: LaunchedStep) -> None:
        self._ranks = ranks
        self._sampled: SampledTokens | None = None
        self.own = own

    def wait(self) -> SampledTokens:
        if self._sampled is None:
            self._sampled = self._ranks.collect(self)
        return self._sampled


def close(followers: Followers, ranks: TorchRanks) -> None:
    followers.on_end(lambda _: None)
    ranks.close()
    followers.close()


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
