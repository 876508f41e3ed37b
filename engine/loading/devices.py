"""A start measures a device and divides a GPU's memory, or says which flag to lower."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cuda.device import Device
from penstock.engine.memory.gpu_budget import MemoryBudget, out_of_memory, pool_advice, pool_bytes
from penstock.engine.memory.pool.kv_layout import GroupPool
from penstock.engine.memory.pool.kv_pool import PoolSize, size_pool
from penstock.engine.process.phases import Phases
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

# The scheduler's lists of them cost the host some 50 bytes each; no useful model needs more.
_MAX_BLOCKS = 2**20


def measure_rates(device: Device, dtype: torch.dtype, phases: Phases) -> dict[str, Any]:
    """Returns the fields of `ModelInfo`; None where one is not measured."""
    with phases.timed("bandwidth", f"measuring how fast memory is {device.moves_memory}"):
        bandwidth = device.bandwidth()
    with phases.timed("flops", "measuring how fast matrices are multiplied"):
        flops = device.matmul_flops(dtype)
    return {"measured_bandwidth_bytes_per_s": bandwidth, "measured_flops_per_s": flops}


def size_gpu_pool(
    config: EngineConfig,
    pools: Sequence[GroupPool],
    budget: MemoryBudget,
    longest: int,
    padding_bytes: int = 0,
) -> PoolSize:
    """longest: sequence, in tokens. padding_bytes: of blocks that hold no sequence. Raises
    InvalidConfig where one sequence does not fit."""
    advice = pool_advice(config, budget)
    return size_pool(
        pools,
        config.scheduler,
        budget=pool_bytes(config, budget) - padding_bytes,
        max_blocks=_MAX_BLOCKS,
        max_len=longest,
        may_shorten=config.max_model_len is None,
        advice=lambda needed: advice(needed + padding_bytes),
    )


@contextmanager
def out_of_memory_advice(config: EngineConfig, phases: Phases) -> Iterator[None]:
    """Raises InvalidConfig where a GPU's memory runs out: by the phase of the start, with the flag
    to lower."""
    try:
        yield
    except RuntimeError as error:
        # torch.OutOfMemoryError, or the driver's error where torch did not allocate.
        if "out of memory" not in str(error).lower():
            raise
        logger.exception("the GPU's memory ran out")
        raise InvalidConfig(out_of_memory(config, phases.current)) from error
