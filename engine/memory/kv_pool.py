"""Sizes and owns the memory of keys and values. Knows blocks, not sequences."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.config import EngineConfig
from penstock.engine.memory.host import zeros_on_touch
from penstock.engine.memory.huge_pages import GrowingHugePages
from penstock.engine.memory.journal import Journal
from penstock.engine.memory.kept import KeptMemory
from penstock.engine.memory.kv_codes import LIMITS, Codes, KVPages
from penstock.engine.memory.kv_shape import KVShape
from penstock.engine.memory.machine import available_memory_bytes
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

_Shape = tuple[tuple[int, ...], torch.dtype]

_SPARE = 256

# The default share of the free memory: a CPU machine rarely runs only this server.
_DEFAULT_FRACTION = 0.25


class KVPool:
    """Keys and values apart, each (num_layers, num_blocks, block_size, num_kv_heads, head_dim).

    In 8 bits they are codes, with scales beside them: (num_layers, num_blocks, num_kv_heads,
    block_size) float32, see `penstock.engine.memory.kv_codes`. Else the scales are None.
    """

    def __init__(
        self,
        kv: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: KeptMemory | None = None,
    ) -> None:
        """kept: where it is, for a pool in the host's memory; what is in there stays."""
        of_codes = (kv.num_layers, num_blocks, block_size, kv.num_kv_heads, kv.head_dim)
        of_scales = (kv.num_layers, num_blocks, kv.num_kv_heads, block_size)
        shapes: list[_Shape] = [(of_codes, dtype)] * 2
        if dtype in LIMITS:
            shapes += [(of_scales, torch.float32)] * 2
        self.journal: Journal | None = None
        """Of its blocks, where it outlives this process."""
        self._pages: GrowingHugePages | None = None
        if kept is None:
            tensors = [_zeros(*each, device) for each in shapes]
        else:
            tensors, self.journal, self._pages = _kept(kept, shapes)
        self.keys, self.values, *scales = tensors
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        if scales:
            self.key_scales, self.value_scales = scales

    def reach(self, block_ids: Iterable[int]) -> None:
        """To be called before these blocks are used for the first time."""
        if self._pages is not None:
            self._pages.reach(max(block_ids, default=0))

    def layer(self, index: int) -> tuple[KVPages, KVPages]:
        """The keys and the values of one layer."""
        keys, values = self.keys[index], self.values[index]
        if self.key_scales is None or self.value_scales is None:
            return keys, values
        return Codes(keys, self.key_scales[index]), Codes(values, self.value_scales[index])

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """All that belongs to a block, of keys and of values: (num_layers, num_blocks, ...) each,
        in types that can be copied everywhere."""
        if self.key_scales is None or self.value_scales is None:
            return [(self.keys, self.values)]
        codes = self.keys.view(torch.int8), self.values.view(torch.int8)
        return [codes, (self.key_scales, self.value_scales)]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """(source, target): each target block gets its source's content, in every layer."""
        sources, targets = ([pair[i] for pair in copies] for i in (0, 1))
        for pair in self.pairs():
            for tensor in pair:
                tensor[:, targets] = tensor[:, sources]


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    max_model_len: int


def size_cpu_pool(
    engine: EngineConfig,
    *,
    weight_bytes: int,
    max_model_len: int,
    block_size: int,
    block_bytes: int,
    kept: KeptMemory | None = None,
) -> PoolSize:
    """`size_pool` with --kv-cache-memory-bytes, or else a quarter of the memory that the weights
    leave free. Never more than max_num_seqs sequences of the full length can fill.

    max_model_len: the model's own limit. kept: a pool that is there already keeps its size, as its
    memory is no longer free.
    """
    if kept and kept.num_blocks:
        engine = replace(engine, kv_cache_memory_bytes=kept.num_blocks * block_bytes)
    free = max(0, available_memory_bytes() - weight_bytes)
    budget = engine.kv_cache_memory_bytes or int(_DEFAULT_FRACTION * free)
    max_len = resolve_max_model_len(engine.max_model_len, max_model_len)
    max_blocks = engine.scheduler.max_num_seqs * -(-max_len // block_size)
    return size_pool(
        budget=budget,
        max_blocks=max_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        max_len=max_len,
        may_shorten=engine.max_model_len is None,
        advice=lambda needed: f"set --kv-cache-memory-bytes to at least {needed}",
    )


def resolve_max_model_len(requested: int | None, limit: int) -> int:
    """limit: the model's own, which is the default. Raises InvalidConfig for a larger request."""
    if requested is not None and requested > limit:
        raise InvalidConfig(
            f"--max-model-len is {requested}, but this model's config.json allows at most "
            f"{limit} positions; lower it"
        )
    return requested or limit


def size_pool(
    *,
    budget: int,
    max_blocks: int,
    block_size: int,
    block_bytes: int,
    max_len: int,
    may_shorten: bool,
    advice: Callable[[int], str],
) -> PoolSize:
    """The number of blocks and the longest sequence. Raises InvalidConfig if max_len does not fit.

    budget: bytes for keys and values. may_shorten: reduce max_len to what fits instead of raising.
    advice: what to change if this many bytes are needed.
    """
    num_blocks = max(0, min(budget // block_bytes, max_blocks))
    num_tokens = num_blocks * block_size
    if num_tokens >= max_len:
        return PoolSize(num_blocks, max_len)
    if may_shorten and num_blocks:
        logger.warning(
            "the model's context of %d tokens does not fit the KV pool; --max-model-len is now %d",
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
    # torch.zeros would allocate the whole pool at once. Vectors are read that begin in the pool and
    # end behind it.
    count = torch.Size(shape).numel()
    return zeros_on_touch((count + _SPARE,), dtype)[:count].view(shape)


def _kept(kept: KeptMemory, shapes: list[_Shape]) -> tuple[list[Tensor], Journal, GrowingHugePages]:
    num_blocks = shapes[0][0][1]
    block_bytes = [
        (shape[0], torch.Size(shape[2:]).numel() * dtype.itemsize) for shape, dtype in shapes
    ]
    buffers, journal, pages = kept.map(num_blocks, block_bytes)
    # Not all types can be made of a buffer.
    tensors = [
        torch.frombuffer(buffer, dtype=torch.uint8)[: torch.Size(shape).numel() * dtype.itemsize]
        .view(dtype)
        .view(shape)
        for buffer, (shape, dtype) in zip(buffers, shapes, strict=True)
    ]
    return tensors, journal, pages
