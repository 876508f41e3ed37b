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

from penstock.engine.config import AdapterSource, EngineConfig
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.first_rank import FirstRank
from penstock.engine.executors.followers import Step, layout_of
from penstock.engine.loading.ranks import join, link_size, rank_pools
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.decoder.model import Model
from penstock.engine.native.library import load_ranks_library
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.membership import Membership, membership_bytes
from penstock.engine.ranks.shared_memory import shared_memory
from penstock.engine.step.model_input import ModelInput
from tests.support.executors import cpu_executor


def memberships(config: EngineConfig) -> list[Membership]:
    """One for each rank that the config asks for."""
    library, layout = load_ranks_library(), layout_of(config)
    memory = shared_memory(membership_bytes(library, layout, link_size(config)))
    pools = rank_pools(config)
    made = [join(config, memory, rank, pools) for rank in range(layout.size)]
    os.close(memory)
    for each in made:
        each.wait_at_most(20.0)
    return made


class RankThreads(FirstRank[CpuExecutor]):
    """See `penstock.engine.step.executor.Executor`. Rank 0 computes in the thread that calls it."""

    def __init__(
        self,
        config: EngineConfig,
        members: Sequence[Membership],
        change: Callable[[CpuExecutor], None] = lambda _: None,
    ) -> None:
        """change: what is done to each executor before it runs."""
        threads = [ThreadPoolExecutor(1) for _ in members]
        start = partial(cpu_executor, config, Path(config.model), None)
        futures = [
            thread.submit(start, each) for thread, each in zip(threads, members, strict=True)
        ]
        self.ranks = _results(futures)
        for pool in members[0].pools:
            os.close(pool)
        for rank in self.ranks:
            change(rank)
        followers = FollowerThreads(self.ranks[1:], threads)
        super().__init__(self.ranks[0], followers)  # type: ignore[arg-type]


class FollowerThreads:
    """See `penstock.engine.executors.followers.Followers`."""

    def __init__(self, ranks: Sequence[CpuExecutor], threads: Sequence[ThreadPoolExecutor]) -> None:
        """threads: one more than ranks."""
        self._ranks, self._threads = ranks, threads
        self._futures: list[Future[None]] = []
        self.is_waiting = False

    def send(self, step: Step) -> None:
        for rank, thread in zip(self._ranks, self._threads[1:], strict=True):
            self._futures.append(thread.submit(rank.follow, step.batch, step.sampled))

    def load_adapter(self, source: AdapterSource) -> None:
        for rank in self._ranks:
            rank.adapters.load(source).result()

    def unload_adapter(self, adapter_id: str) -> None:
        for rank, thread in zip(self._ranks, self._threads[1:], strict=True):
            self._futures.append(thread.submit(rank.adapters.unload, adapter_id))

    def on_end(self, callback: Callable[[int], None]) -> None:
        """No process of theirs ends."""

    def check(self) -> None:
        """None of them fails by itself."""

    def explained(self, error: RankFailed) -> Exception:
        """What another rank says of it is not the cause."""
        failed = [each for future in self._futures if (each := future.exception())]
        return next((each for each in failed if isinstance(each, Exception)), error)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        _results(self._futures)


def _results(futures: "Sequence[Future[Any]]") -> list[Any]:
    wait(futures)
    errors = [error for future in futures if (error := future.exception())]
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
