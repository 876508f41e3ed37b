"""The scheduler and a real executor in this process, stepped by the test."""

import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.step.executor import Executor, PendingTokens
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, RequestId, RequestOutput
from tests.support.executors import cpu_executor


class SteppedEngine:
    """Runs what it is given to the end; blocks stay cached from one call to the next."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        num_blocks: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """executor: `CpuExecutor` where none is given. num_blocks: fewer than the pool has."""
        self.executor = executor or cpu_executor(config, Path(config.model))
        info = self.executor.info
        groups = info.kv_groups
        if num_blocks is not None:
            groups = tuple(
                replace(group, num_blocks=min(num_blocks, group.num_blocks)) for group in groups
            )
        settings = config.scheduler
        if info.computes_whole:
            settings = replace(settings, enable_prefix_caching=False)
        self.scheduler = Scheduler(
            settings,
            groups=groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            num_cohorts=info.pipeline_parallel_size,
            journals=self.executor.journals,
            tier=self.executor.tier,
            drafter=drafter,
            computes_whole=info.computes_whole,
        )
        self._num_requests = 0
        self.computed_s: list[float] = []
        """As in `SampledTokens`, of each step that has it."""

    def run(self, requests: list[Request]) -> list[list[RequestOutput]]:
        """The outputs of each request, all run together. Equal ids are made unique."""
        outputs: dict[RequestId, list[RequestOutput]] = {}
        for request in requests:
            self._num_requests += 1
            name = RequestId(f"{request.id}-{self._num_requests}")
            outputs[name] = []
            request = replace(request, id=name)
            if future := self.executor.prepare(request):
                future.result()
            self.scheduler.add(request)
        launched: deque[PendingTokens] = deque()
        while self.scheduler.has_work or launched:
            batch = self.scheduler.schedule(0.0)
            if batch:
                launched.append(self.executor.execute(batch))
            elif not launched:
                time.sleep(0.0002)  # blocks are being loaded
                continue
            if not batch or len(launched) >= self.executor.info.pipeline_parallel_size:
                sampled = launched.popleft().wait()
                if sampled.computed_s is not None:
                    self.computed_s.append(sampled.computed_s)
                for output in self.scheduler.update(sampled):
                    outputs[output.request_id].append(output)
        for name in outputs:
            self.executor.release(name)
        return list(outputs.values())


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]
