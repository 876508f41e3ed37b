"""`ParallelExecutor`: a model of which several processes compute a part each (tensor parallelism).

Rank 0 is this process. The others run the same executor on the same batches, which they get from
here as the scheduler made them; each keeps its own token and block tables. Rank 0 alone samples.
"""

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.engine.config import EngineConfig, LoadFormat
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.followers import Followers, Step
from penstock.engine.gguf.file import is_gguf
from penstock.engine.model_info import ModelInfo
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.shard import Shard
from penstock.engine.native.library import load_ranks_library
from penstock.engine.phases import Phases
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.shared_memory import MAX_RANKS, SharedMemoryGroup, shared_memory
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.journal import BlockJournal
from penstock.scheduler.types import (
    Request,
    RequestId,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
)

# To read weights takes what the disk needs, and may have to wait for a compiler.
START_TIMEOUT_S = 3600.0
_NOT_SAMPLED = SamplingParams(max_tokens=1)


def build_parallel_executor(config: EngineConfig, phases: Phases) -> "ParallelExecutor":
    """Starts the other ranks, and loads this one's part. Raises PenstockError."""
    model_dir = Path(config.model)
    check_parallel(config, model_dir)
    size = config.tensor_parallel_size
    with phases.timed("ranks", f"starting {size - 1} more processes"):
        try:
            library = load_ranks_library()
        except (OSError, subprocess.SubprocessError) as error:
            raise InvalidConfig(
                f"--tensor-parallel-size {size} needs a C++ compiler for the sums over all ranks; "
                f"install g++ ({getattr(error, 'stderr', None) or error})"
            ) from error
        memory = shared_memory(library, size)
        followers = Followers(config, size, memory)
        group = SharedMemoryGroup(library, memory, 0, size, timeout_s=START_TIMEOUT_S)
        os.close(memory)
        followers.on_end(group.end)
    followers.is_waiting = True
    try:
        executor = CpuExecutor(config, model_dir, phases, group)
        group.barrier()
    except RankFailed as error:
        raise followers.explained(error) from error
    followers.is_waiting = False
    group.timeout_s = wait_limit_s(config)
    return ParallelExecutor(executor, followers)


def wait_limit_s(config: EngineConfig) -> float:
    """For how long a rank waits for another in a step: less than the server waits for the engine,
    which does not know the rank."""
    return 0.75 * config.stall_timeout_s


def check_parallel(config: EngineConfig, model_dir: Path) -> None:
    """Raises InvalidConfig for what several ranks do not compute."""
    size = config.tensor_parallel_size
    flag = f"--tensor-parallel-size {size}"
    if size > MAX_RANKS:
        raise InvalidConfig(f"{flag}: at most {MAX_RANKS} ranks are supported")
    if config.lora is not None:
        raise InvalidConfig(
            f"{flag} cannot be combined with --enable-lora so far; serve a model into which the "
            "adapter is merged, or leave one of the two out"
        )
    if config.quantization is not None:
        raise InvalidConfig(
            f"{flag} cannot be combined with --quantization {config.quantization} so far; leave "
            "one of the two out"
        )
    if config.kv_offload_dir is not None:
        raise InvalidConfig(
            f"{flag} cannot be combined with --kv-offload-dir so far; leave one of the two out"
        )
    if is_gguf(model_dir) and config.load_format is not LoadFormat.DUMMY:
        raise InvalidConfig(
            f"{flag}: a GGUF file cannot be split over ranks so far; use the model's safetensors, "
            "or --tensor-parallel-size 1"
        )
    Shard(ModelConfig.from_dir(model_dir), 0, size)


class ParallelExecutor:
    """See `penstock.engine.executor.Executor`."""

    def __init__(self, executor: CpuExecutor, followers: Followers) -> None:
        """executor: of rank 0."""
        self._executor = executor
        self._followers = followers
        self._last_ids: Sequence[int] = ()

    @property
    def info(self) -> ModelInfo:
        return self._executor.info

    @property
    def runs_ahead(self) -> bool:
        return self._executor.runs_ahead

    @property
    def journals(self) -> Sequence[BlockJournal]:
        return self._executor.journals

    @property
    def adapters(self) -> None:
        return None

    @property
    def tier(self) -> None:
        return None

    @property
    def followers(self) -> Followers:
        """The other ranks' processes."""
        return self._followers

    def prepare(self, request: Request) -> "Future[Any] | None":
        return self._executor.prepare(request)

    def release(self, request_id: RequestId) -> None:
        self._executor.release(request_id)

    def execute(self, batch: ScheduledBatch) -> "_Computed":
        """Raises RankFailed: then nothing more can be computed."""
        followers = self._followers
        followers.is_waiting = True
        followers.send(Step(without_sampling(batch), self._last_ids))
        try:
            sampled = self._executor.execute(batch).wait()
        except RankFailed as error:
            raise followers.explained(error) from error
        followers.is_waiting = False
        self._last_ids = sampled.token_ids
        return _Computed(sampled)

    def close(self) -> None:
        """Ends the other ranks."""
        self._followers.close()


class _Computed:
    """`PendingTokens` of a step that is complete."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._sampled = sampled

    def wait(self) -> SampledTokens:
        return self._sampled


def without_sampling(batch: ScheduledBatch) -> ScheduledBatch:
    """What the other ranks need of it: a grammar may be large."""
    if not batch.assignments:
        return batch
    assignments = [each._replace(sampling=_NOT_SAMPLED) for each in batch.assignments]
    return replace(batch, assignments=tuple(assignments))
