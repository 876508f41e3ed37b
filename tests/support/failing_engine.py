"""`python -m tests.support.failing_engine`: an engine process whose third step fails as on a GPU.

That is, late: the step after it is launched already, and its message has many lines.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from penstock.engine.config import EngineConfig
from penstock.engine.ipc.process import main
from penstock.engine.loading.executor import build_executor
from penstock.engine.process.phases import Phases
from penstock.engine.step.executor import Executor, PendingTokens
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.types import Request, RequestId, SampledTokens, ScheduledBatch

MESSAGE = "CUDA error: an illegal memory access was encountered"


class _Failed:
    def wait(self) -> SampledTokens:
        raise RuntimeError(f"{MESSAGE}\nand how to debug that")


class FailsInItsThirdStep:
    """Another executor, until then."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._num_steps = 0

    @property
    def info(self) -> ModelInfo:
        return replace(self._executor.info, runs_ahead=True)

    @property
    def adapters(self) -> None:
        return None

    @property
    def journals(self) -> Sequence[BlockJournal]:
        return ()  # it runs ahead

    @property
    def tier(self) -> BlockTier | None:
        return self._executor.tier

    def prepare(self, request: Request) -> "Future[Any] | None":
        return self._executor.prepare(request)

    def release(self, request_id: RequestId) -> None:
        self._executor.release(request_id)

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        self._num_steps += 1
        return _Failed() if self._num_steps >= 3 else self._executor.execute(batch)


def build(config: EngineConfig, phases: Phases) -> Executor:
    return FailsInItsThirdStep(build_executor(config, phases))


if __name__ == "__main__":
    main(build)
