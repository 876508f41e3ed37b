"""Sizes and owns the memory that keys and values live in. Knows blocks, knows no sequences."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.memory import zeros_on_touch
from engine.models.config import ModelConfig
from scheduler.errors import InvalidConfig
from scheduler.types import BlockCopy

logger = logging.getLogger(__name__)

# Of the free memory, when the operator does not say: a server is rarely alone on a CPU machine.
_DEFAULT_FRACTION = 0.25


class KVPool:
    """Keys and values apart, each (num_layers, num_blocks, block_size, num_kv_heads, head_dim)."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Each target block gets its source's content, in every layer."""
        targets = [copy.target for copy in copies]
        sources = [copy.source for copy in copies]
        self.keys[:, targets] = self.keys[:, sources]
        self.values[:, targets] = self.values[:, sources]


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    max_model_len: int


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one position, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def size_pool(
    engine: EngineConfig, model: ModelConfig, block_size: int, dtype: torch.dtype
) -> PoolSize:
    """How many blocks, and how long a sequence may be; a sentence where one would not fit.

    By default the pool takes a quarter of what the weights leave free, but no more than
    max_num_seqs full sequences can hold. Only a context that nobody asked for is cut to fit.
    """
    block_bytes = block_size * kv_bytes_per_token(model, dtype)
    max_len = engine.max_model_len or model.max_model_len
    if max_len > model.max_model_len:
        raise InvalidConfig(
            f"--max-model-len is {max_len}, but this model's config.json allows at most "
            f"{model.max_model_len} positions; lower it"
        )
    free = max(0, available_memory_bytes() - model.num_parameters * dtype.itemsize)
    budget = engine.kv_cache_memory_bytes or int(_DEFAULT_FRACTION * free)
    most_blocks = engine.scheduler.max_num_seqs * -(-max_len // block_size)
    num_blocks = min(budget // block_bytes, most_blocks)
    if num_blocks * block_size >= max_len:
        return PoolSize(num_blocks, max_len)
    if engine.max_model_len is None and num_blocks > 0:
        logger.warning(
            "the model's context of %d tokens does not fit the KV pool; --max-model-len is %d",
            max_len,
            num_blocks * block_size,
        )
        return PoolSize(num_blocks, num_blocks * block_size)
    needed = -(-max_len // block_size) * block_bytes
    raise InvalidConfig(
        f"the KV pool of {budget} bytes holds {num_blocks * block_size} tokens, fewer than one "
        f"sequence of --max-model-len={max_len}; set --kv-cache-memory-bytes to at least {needed}"
        + (f" or --max-model-len to at most {num_blocks * block_size}" if num_blocks else "")
    )


def available_memory_bytes() -> int:
    """What this process can take without swapping, by Linux's own estimate."""
    with Path("/proc/meminfo").open(encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would take the whole pool from the machine at once.
    return zeros_on_touch(shape, dtype)
