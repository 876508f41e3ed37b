"""`FirstRank`: what is the same of every executor whose model several processes compute."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from penstock.engine.executors.followers import Followers
from penstock.engine.step.executor import AdapterStore, Executor
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.types import Request, RequestId

Own = TypeVar("Own", bound=Executor)


class FirstRank(Generic[Own]):
    """The part of `penstock.engine.step.executor.Executor` that rank 0's own executor answers."""

    def __init__(self, executor: Own, followers: Followers) -> None:
        """executor: of rank 0."""
        self._executor = executor
        self._followers = followers

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
    def adapters(self) -> AdapterStore | None:
        return self._executor.adapters

    @property
    def tier(self) -> BlockTier | None:
        return self._executor.tier

    @property
    def followers(self) -> Followers:
        """The other ranks' processes."""
        return self._followers

    def prepare(self, request: Request) -> "Future[Any] | None":
        return self._executor.prepare(request)

    def release(self, request_id: RequestId) -> None:
        self._executor.release(request_id)
