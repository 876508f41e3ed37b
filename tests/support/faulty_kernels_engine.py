"""`python -m tests.support.faulty_kernels_engine`: an engine that takes Triton's interpreter for a
GPU, and checks it, with kernels that fail in some ways.

FAULTS in the environment: a JSON object from a way to how a kernel fails in it: `wrong`, it
computes something else; `compile`, it does not compile; `hang`, the device never ends a step.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from triton.compiler.errors import CompilationError

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.launched_step import LaunchedStep
from penstock.engine.ipc.process import main
from penstock.engine.loading import gpu
from penstock.engine.loading.load import load_executor
from penstock.engine.models.decoder import fused
from penstock.engine.process.phases import Phases
from penstock.engine.step.executor import Executor
from tests.support.faulty_gpu_engine import FAULTS
from tests.support.interpreter import hasten_interpreter


class TakenForGpu(Interpreter):
    compiles_kernels = True


def _wrong(token_ids: Any, table: Any, out: Any, *args: Any, **kwargs: Any) -> None:
    out.fill_(1.0)


def _does_not_compile(*args: Any, **kwargs: Any) -> None:
    raise CompilationError("def kernel():", None, "gdc_wait is unknown")


def _never_ends(step: LaunchedStep) -> None:
    time.sleep(3600)


def build(config: EngineConfig, phases: Phases) -> Executor:
    way = "graphs" if config.gpu_way == "pdl" else config.gpu_way  # no kernel starts early here
    fault = json.loads(os.environ[FAULTS]).get(way)
    loading: Any = gpu
    launched: Any = LaunchedStep
    if fault == "wrong":
        vars(fused)["embed"] = _wrong
    elif fault == "compile":
        vars(fused)["embed"] = _does_not_compile
    elif fault == "hang":
        launched.wait_for_device = _never_ends
        loading.COMPILE_S = 1.0  # for the device to end the largest step
    loading.small_steps = lambda *_: iter(())  # which compile kernels
    hasten_interpreter()
    return load_executor(config, Path(config.model), None, TakenForGpu(), phases)


if __name__ == "__main__":
    main(build)
