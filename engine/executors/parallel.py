"""`ParallelExecutor`: a model of which several processes compute a part each: of every layer
(tensor parallelism), or some of the layers (pipeline parallelism), or both.

Rank 0 is this process. The others run the same executor on the same batches, which they get from
here as the scheduler made them; each keeps its own token and block tables. Rank 0 alone samples. It
has the last stage: while it computes a step, the stages before are at the next ones.
"""

import os
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from penstock.engine.config import EngineConfig, LoadFormat
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.first_rank import FirstRank
from penstock.engine.executors.followers import Followers, Step
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.loading.place import Place
from penstock.engine.loading.rank_pools import rank_pools
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage, num_passed
from penstock.engine.models.lora.store import Adapters
from penstock.engine.native.library import load_ranks_library
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.layout import MAX_RANKS, RankLayout
from penstock.engine.ranks.link import LinkSize
from penstock.engine.ranks.membership import Membership, membership_bytes
from penstock.engine.ranks.shared_memory import memory_of
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import (
    RequestId,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
)

# To read weights takes what the disk needs, and may have to wait for a compiler.
START_TIMEOUT_S = 3600.0
_NOT_SAMPLED = SamplingParams(max_tokens=1)


def build_parallel_executor(
    config: EngineConfig, phases: Phases, followers: Followers
) -> "ParallelExecutor":
    """Tells the other ranks to begin, and loads this one's part. Raises PenstockError."""
    layout = layout_of(config)
    with phases.timed("ranks", f"meeting {layout.size - 1} more processes"):
        try:
            library = load_ranks_library()
        except (OSError, subprocess.SubprocessError) as error:
            raise InvalidConfig(
                f"{flags_of(layout)} needs a C++ compiler for what the ranks exchange; install g++ "
                f"({getattr(error, 'stderr', None) or error})"
            ) from error
        memory = memory_of(membership_bytes(library, layout, link_size(config)))
        pools = () if config.kv_offload_dir is None else rank_pools(layout)
        followers.begin(config, memory, pools=pools)
        membership = join(config, memory, 0)
        os.close(memory)
        followers.on_end(membership.end)
    followers.is_waiting = True
    try:
        place = Place(membership.tensor, membership.pipeline, pools)
        executor = CpuExecutor(config, Path(config.model), phases, place)
        for pool in pools:
            os.close(pool)
        membership.everyone.barrier()
    except RankFailed as error:
        raise followers.explained(error) from error
    followers.is_waiting = False
    membership.wait_at_most(wait_limit_s(config))
    return ParallelExecutor(executor, followers, num_stages=layout.num_stages)


def layout_of(config: EngineConfig) -> RankLayout:
    return RankLayout(config.tensor_parallel_size, config.pipeline_parallel_size)


def join(config: EngineConfig, memory: int, rank: int) -> Membership:
    """memory: the descriptor of what all ranks share."""
    return Membership.join(
        load_ranks_library(),
        memory,
        layout_of(config),
        link_size(config),
        rank,
        timeout_s=START_TIMEOUT_S,
    )


def link_size(config: EngineConfig) -> LinkSize:
    """Between stages: room for the states, in float32, of as many steps as may be in flight."""
    model = ModelConfig.from_dir(Path(config.model))
    num_rows = num_passed(model) * config.scheduler.max_num_batched_tokens
    return LinkSize(config.pipeline_parallel_size, 4 * num_rows * model.hidden_size)


def wait_limit_s(config: EngineConfig) -> float:
    """For how long a rank waits for another in a step: less than the server waits for the engine,
    which does not know the rank."""
    return 0.75 * config.stall_timeout_s


def check_parallel(config: EngineConfig, model_dir: Path) -> None:
    """Raises InvalidConfig for what several ranks do not compute."""
    layout = layout_of(config)
    flag = flags_of(layout)
    if layout.size > MAX_RANKS:
        raise InvalidConfig(
            f"{flag}: at most {MAX_RANKS} ranks are supported, and these are {layout.size}"
        )
    if config.quantization_report:
        raise InvalidConfig(
            f"{flag} cannot be combined with --quantization-report, as each rank rounds its own "
            "part, and none could compute the whole model to compare; leave it out, or measure "
            "with one rank"
        )
    is_read = config.load_format is not LoadFormat.DUMMY
    if layout.tensor_size > 1 and is_gguf(model_dir) and is_read:
        raise InvalidConfig(
            f"--tensor-parallel-size {layout.tensor_size}: the layers of a GGUF file cannot be "
            "split over ranks; use the model's safetensors, or --pipeline-parallel-size"
        )
    model = ModelConfig.from_dir(model_dir)
    if layout.tensor_size > 1:
        model = Shard(model, 0, layout.tensor_size).config
    if layout.num_stages > 1:
        Stage(model, 0, layout.num_stages)


def flags_of(layout: RankLayout) -> str:
    """That ask for so many ranks, for messages."""
    flags = []
    if layout.tensor_size > 1:
        flags.append(f"--tensor-parallel-size {layout.tensor_size}")
    if layout.num_stages > 1:
        flags.append(f"--pipeline-parallel-size {layout.num_stages}")
    return " with ".join(flags)


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
