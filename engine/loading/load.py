"""`load`: a model in a device's memory; and `load_executor`, which then computes it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.engine.config import DraftMethod, EngineConfig, GpuWay, SpeculativeConfig
from penstock.engine.executors.cpu import CpuExecutor, HostModel
from penstock.engine.executors.cuda.device import Device
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.hub.check import find_implementation
from penstock.engine.loading.steps import Loading, Place
from penstock.engine.memory.gpu_budget import out_of_memory
from penstock.engine.models.fallback.source import TransformersClass
from penstock.engine.process.phases import Phases
from penstock.scheduler.errors import InvalidConfig

if TYPE_CHECKING:  # which the kernels load
    from penstock.engine.executors.cuda.executor import CudaExecutor

logger = logging.getLogger(__name__)


def load(
    config: EngineConfig, directory: Path, place: "Place | None", device: Device, phases: Phases
) -> LoadedModel:
    """Loads what one rank has of a model; the place of the only one is None. Raises InvalidConfig
    and InvalidModel."""
    loading: Callable[..., Loading]
    wanted = config.speculative or SpeculativeConfig()
    has_draft, has_head = wanted.has_model, wanted.method is DraftMethod.MTP
    why = "it needs one process on a CPU, and a model that Penstock computes itself"
    may_have_own = False
    if isinstance(find_implementation(directory, config.model_impl), TransformersClass):
        from penstock.engine.loading.fallback import FallbackLoading

        loading = FallbackLoading
    elif device.has_kernels and config.gpu_way is GpuWay.TORCH:
        from penstock.engine.loading.torch_way import TorchLoading

        loading = TorchLoading
    elif device.has_kernels:
        from penstock.engine.loading.gpu import GpuLoading

        loading = GpuLoading
    elif has_draft and place is None:
        from penstock.engine.loading.draft import DraftedLoading

        loading, has_draft = DraftedLoading, False
    else:
        from penstock.engine.loading.cpu import CpuLoading
        from penstock.engine.loading.mtp import MtpLoading, why_no_head

        loading, may_have_own = CpuLoading, place is None
        if place is None and wanted.may_have_head:
            found = why_no_head(directory, config.load_format)
            if found is None:
                loading, has_head = MtpLoading, False
            why = found or why
    if has_head:
        raise InvalidConfig(f"--speculative-config: the method mtp cannot be had: {why}")
    if has_draft:
        raise InvalidConfig(
            "--speculative-config names a draft model, which needs one process on a CPU, and a "
            'served model that Penstock computes itself; leave "model" out'
        )
    others = directory, place, device, phases
    with torch.inference_mode():
        if may_have_own:
            from penstock.engine.loading.draft import load_with_own_draft

            if loaded := load_with_own_draft(config, *others):
                return loaded
        return loading(config, *others).load()


def load_executor(
    config: EngineConfig, directory: Path, place: "Place | None", device: Device, phases: Phases
) -> "CpuExecutor | CudaExecutor":
    """Makes an executor of what `load` returns, and writes where the memory went into the log.
    Raises InvalidConfig and InvalidModel."""
    with _advice(config, device, phases):
        loaded = load(config, directory, place, device, phases)
        if isinstance(loaded, HostModel):
            loaded.ledger.log()
            return CpuExecutor(loaded)
        from penstock.engine.loading.gpu import captured

        return captured(loaded, phases)


@contextmanager
def _advice(config: EngineConfig, device: Device, phases: Phases) -> Iterator[None]:
    """Raises InvalidConfig where a GPU is too small for the model, by the phase of the start, with
    the flag to lower; or for a kernel."""
    if not device.has_kernels:
        yield
        return
    from triton.runtime.errors import OutOfResources

    try:
        yield
    except OutOfResources as error:  # mostly in float32
        raise InvalidConfig(
            f"{device.name} allows a kernel {error.limit} bytes of {error.name}, and with this "
            f"model's head size and type ours needs {error.required}; use --dtype bfloat16, or "
            "--attention-backend torch"
        ) from error
    except RuntimeError as error:
        # torch.OutOfMemoryError, or the driver's error where torch did not allocate.
        if "out of memory" not in str(error).lower():
            raise
        logger.exception("the GPU's memory ran out")
        raise InvalidConfig(out_of_memory(config, phases.current)) from error
