"""`python -m tests.support.troubled_engine`: an engine process that one request can end.

A step that begins a prompt in which one of the ids below occurs raises, hangs or ends the process,
each time that it is tried; or it says that the prompt's logits are NaN. LATE raises in the step
that would give such a prompt's answer more than LATE_TOKENS tokens.
"""

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from penstock.engine.config import EngineConfig
from penstock.engine.ipc.process import main
from penstock.engine.loading.executor import build_executor
from penstock.engine.process.phases import Phases
from penstock.engine.step.executor import Executor, PendingTokens
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.types import (
    FinishReason,
    Request,
    RequestId,
    SampledTokens,
    ScheduledBatch,
)

# Ids of the demo model's tokenizer that no other prompt of a test has.
RAISES, HANGS, CRASHES, NAN, LATE = 2001, 2002, 2003, 2004, 2005
LATE_TOKENS = 24


class Troubled:
    """Another executor, until it is given such a prompt."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._with_nan: set[int] = set()  # slots
        self._most: dict[int, int] = {}  # tokens of a slot

    @property
    def info(self) -> ModelInfo:
        return self._executor.info

    @property
    def adapters(self) -> None:
        return None

    @property
    def journals(self) -> Sequence[BlockJournal]:
        return self._executor.journals

    @property
    def tier(self) -> BlockTier | None:
        return self._executor.tier

    def prepare(self, request: Request) -> "Future[Any] | None":
        return self._executor.prepare(request)

    def release(self, request_id: RequestId) -> None:
        self._executor.release(request_id)

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        for assignment in batch.assignments:
            prompt = assignment.token_ids[: assignment.num_prompt_tokens]
            if RAISES in prompt:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if HANGS in prompt:
                time.sleep(3600)
            if CRASHES in prompt:
                os.kill(os.getpid(), signal.SIGSEGV)
            if NAN in prompt:
                self._with_nan.add(assignment.slot)
            else:
                self._with_nan.discard(assignment.slot)
            self._most.pop(assignment.slot, None)
            if LATE in prompt:
                self._most[assignment.slot] = len(prompt) + LATE_TOKENS
        for slot, start, num in zip(batch.slots, batch.starts, batch.num_tokens, strict=True):
            if start + num >= self._most.get(slot, start + num + 1):
                raise RuntimeError("CUDA error: device-side assert triggered")
        pending = self._executor.execute(batch)
        rows = [slot for slot, samples in zip(batch.slots, batch.samples, strict=True) if samples]
        failed = [row for row, slot in enumerate(rows) if slot in self._with_nan]
        return _Failing(pending, failed) if failed else pending


class _Failing:
    """A step of which some rows had NaN logits."""

    def __init__(self, pending: PendingTokens, rows: list[int]) -> None:
        self._pending = pending
        self._rows = rows

    def wait(self) -> SampledTokens:
        sampled = self._pending.wait()
        failed = dict.fromkeys(self._rows, FinishReason.INVALID_LOGITS)
        return sampled._replace(failed={**sampled.failed, **failed})


def build(config: EngineConfig, phases: Phases) -> Executor:
    return Troubled(build_executor(config, phases))


if __name__ == "__main__":
    main(build)
