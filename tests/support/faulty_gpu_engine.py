"""`python -m tests.support.faulty_gpu_engine`: a scripted engine that says it computes on a GPU,
and fails there in some ways.

FAULTS in the environment: a JSON object from a way to what fails in it. `start`: the check of the
start finds it; `hang`: it waits there for the GPU for ever; `step`, `stall`: the third step.
"""

import json
import os
import signal
import time
from dataclasses import replace

from penstock.engine.config import EngineConfig
from penstock.engine.ipc.process import main
from penstock.engine.loading.executor import build_executor
from penstock.engine.process.phases import Phases
from penstock.engine.step.executor import Executor, PendingTokens
from penstock.engine.step.gpu_fault import GpuWayFailed
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.types import ScheduledBatch
from tests.support.failing_engine import FailsInItsThirdStep

FAULTS = "FAULTS"


class OnFaultyGpu(FailsInItsThirdStep):
    def __init__(self, executor: Executor, config: EngineConfig, fault: str | None) -> None:
        super().__init__(executor)
        self._way, self._fault = config.gpu_way, fault

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, gpu_way=self._way)

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        if self._fault == "step":
            return super().execute(batch)
        self._num_steps += 1
        if self._fault == "stall" and self._num_steps >= 3:
            time.sleep(3600)
        return self._executor.execute(batch)


def build(config: EngineConfig, phases: Phases) -> Executor:
    fault = json.loads(os.environ[FAULTS]).get(config.gpu_way)
    if fault == "start":
        raise GpuWayFailed(config.gpu_way, "it computes something else")
    if fault == "hang":
        signal.alarm(1)
        time.sleep(3600)
    return OnFaultyGpu(build_executor(config, phases), config, fault)


if __name__ == "__main__":
    main(build)
