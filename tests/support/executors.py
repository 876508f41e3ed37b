"""Executors of a directory, as a start makes them."""

from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.loading.cpu import load_on_cpu
from penstock.engine.loading.place import ALONE, Place
from penstock.engine.process.phases import Phases


def cpu_executor(
    config: EngineConfig, directory: Path, phases: Phases | None = None, place: Place = ALONE
) -> CpuExecutor:
    return CpuExecutor(load_on_cpu(config, directory, phases or Phases(), place))
