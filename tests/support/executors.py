"""Executors of a directory, as a start makes them."""

from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device import Device, Processor
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.loading.devices import choose_device
from penstock.engine.loading.load import load_executor
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.membership import Membership
from penstock.engine.ranks.torch_ranks import SoleDevice, TorchRanks


def cpu_executor(
    config: EngineConfig,
    directory: Path,
    phases: Phases | None = None,
    place: Membership | None = None,
) -> CpuExecutor:
    executor = load_executor(config, directory, place, Processor(), phases or Phases())
    assert isinstance(executor, CpuExecutor), executor
    return executor


def cuda_executor(
    config: EngineConfig,
    directory: Path,
    device: Device | None = None,
    ranks: TorchRanks | SoleDevice | None = None,
) -> CudaExecutor:
    """device: that of --device where none is given."""
    device = device or choose_device(config.device)
    executor = load_executor(config, directory, ranks, device, Phases())
    assert isinstance(executor, CudaExecutor), executor
    return executor
