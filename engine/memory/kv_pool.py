"""Sizes and owns the memory that keys and values live in. Knows blocks, knows no sequences."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.config import EngineConfig
from penstock.engine.memory.host import zeros_on_touch
from penstock.engine.memory.machine import available_memory_bytes
from penstock.engine.models.config import ModelConfig
from penstock.scheduler.errors import InvalidConfig

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

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """(source, target): each target block gets its source's content, in every layer."""
        sources, targets = ([pair[i] for pair in copies] for i in (0, 1))
        self.keys[:, targets] = self.keys[:, sources]
        self.values[:, targets] = self.values[:, sources]


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    max_model_len: int


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one position, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def size_cpu_pool(
    engine: EngineConfig, model: ModelConfig, block_size: int, dtype: torch.dtype
) -> PoolSize:
    """As `size_pool`, with a quarter of what the weights leave free, unless more or less is asked
    for. No more than max_num_seqs full sequences can hold is taken."""
    free = max(0, available_memory_bytes() - model.num_parameters * dtype.itemsize)
    budget = engine.kv_cache_memory_bytes or int(_DEFAULT_FRACTION * free)
    max_len = longest_sequence(engine.max_model_len, model.max_model_len)
    most_blocks = engine.scheduler.max_num_seqs * -(-max_len // block_size)
    block_bytes = block_size * kv_bytes_per_token(model, dtype)
    return size_pool(
        budget=budget,
        most_blocks=most_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        max_len=max_len,
        may_cut=engine.max_model_len is None,
        advice=lambda needed: f"set --kv-cache-memory-bytes to at least {needed}",
    )


def longest_sequence(wanted: int | None, allowed: int) -> int:
    """The model's own limit where nobody wants another. Raises InvalidConfig for more."""
    if wanted is not None and wanted > allowed:
        raise InvalidConfig(
            f"--max-model-len is {wanted}, but this model's config.json allows at most "
            f"{allowed} positions; lower it"
        )
    return wanted or allowed


def size_pool(
    *,
    budget: int,
    most_blocks: int,
    block_size: int,
    block_bytes: int,
    max_len: int,
    may_cut: bool,
    advice: Callable[[int], str],
) -> PoolSize:
    """How many blocks, and how long a sequence may be; a sentence where one would not fit.

    budget: bytes for keys and values. may_cut: a context that nobody asked for is cut to fit.
    advice: what to change, where so many bytes are needed.
    """
    num_blocks = max(0, min(budget // block_bytes, most_blocks))
    num_tokens = num_blocks * block_size
    if num_tokens >= max_len:
        return PoolSize(num_blocks, max_len)
    if may_cut and num_blocks:
        logger.warning(
            "the model's context of %d tokens does not fit the KV pool; --max-model-len is %d",
            max_len,
            num_tokens,
        )
        return PoolSize(num_blocks, num_tokens)
    needed = -(-max_len // block_size) * block_bytes
    raise InvalidConfig(
        f"the KV pool of {max(0, budget)} bytes holds {num_tokens} tokens, fewer than one "
        f"sequence of --max-model-len={max_len}; {advice(needed)}"
        + (f" or --max-model-len to at most {num_tokens}" if num_blocks else "")
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would take the whole pool from the machine at once.
    return zeros_on_touch(shape, dtype)
