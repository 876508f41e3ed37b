"""Ranks as threads of this process: each with an executor and a group of its own, as processes
would have them, at a fraction of their start."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.engine.config import EngineConfig
from penstock.engine.executor import PendingTokens
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.memory.kv_pool import LayerPools
from penstock.engine.model_info import ModelInfo
from penstock.engine.model_input import ModelInput
from penstock.engine.models.llama import Model
from penstock.engine.native.library import load_ranks_library
from penstock.engine.ranks.group import Group, RankFailed
from penstock.engine.ranks.shared_memory import SharedMemoryGroup, shared_memory
from penstock.scheduler.types import Request, RequestId, ScheduledBatch


def shared_groups(size: int, timeout_s: float = 20.0) -> list[SharedMemoryGroup]:
    """One for each rank."""
    library = load_ranks_library()
    memory = shared_memory(library, size)
    groups = [
        SharedMemoryGroup(library, memory, rank, size, timeout_s=timeout_s) for rank in range(size)
    ]
    os.close(memory)
    return groups


class RankThreads:
    """See `penstock.engine.executor.Executor`."""

    journals, adapters, tier, runs_ahead = (), None, None, False

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[Group],
        change: Callable[[CpuExecutor], None] = lambda _: None,
    ) -> None:
        """change: what is done to each executor before it runs."""
        self._threads = [ThreadPoolExecutor(1) for _ in groups]
        self.ranks: list[CpuExecutor] = self._on_all(
            [partial(CpuExecutor, config, Path(config.model), group=group) for group in groups]
        )
        for rank in self.ranks:
            change(rank)
        self._last_ids: Sequence[int] = ()

    @property
    def info(self) -> ModelInfo:
        return self.ranks[0].info

    def prepare(self, request: Request) -> "Future[Any] | None":
        return self.ranks[0].prepare(request)

    def release(self, request_id: RequestId) -> None:
        self.ranks[0].release(request_id)

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        first, *others = self.ranks
        pending, *_ = self._on_all(
            [
                lambda: first.execute(batch),
                *(partial(other.follow, batch, self._last_ids) for other in others),
            ]
        )
        self._last_ids = pending.wait().token_ids
        result: PendingTokens = pending
        return result

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def _on_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Each call in the thread of its rank."""
        futures = [thread.submit(call) for thread, call in zip(self._threads, calls, strict=True)]
        wait(futures)
        errors = [error for future in futures if (error := future.exception())]
        # What another rank says of it is not the cause.
        for error in sorted(errors, key=lambda each: isinstance(each, RankFailed)):
            raise error
        return [future.result() for future in futures]


class Digested:
    """Another `Model`, of which it keeps a digest of all states that were asked for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.digests: list[str] = []

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        return self._model.logits(self.states(step, pool, step.sample_rows))

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        states = self._model.states(step, pool, rows)
        self.digests.append(hashlib.sha256(states.float().numpy().tobytes()).hexdigest())
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self._model.logits(states)
