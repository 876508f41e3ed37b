"""Sizes and owns the memory of keys and values. Knows blocks, not sequences."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.config import EngineConfig
from penstock.engine.memory.machine import available_memory_bytes
from penstock.engine.memory.pool.journal import Journal
from penstock.engine.memory.pool.kv_codes import LIMITS, Codes, KVPages
from penstock.engine.memory.pool.kv_layout import (
    GroupPool,
    KVLayout,
    bytes_needed,
    divide,
    longest_that_fits,
)
from penstock.engine.memory.pool.kv_memory import KVMemory, MappedPool
from penstock.engine.memory.pool.kv_shape import KVHeads, KVShape
from penstock.engine.memory.pool.pool_tensors import PoolTensors, TensorShape, mapped_pools
from penstock.engine.memory.pool.state_pool import StatePool
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

# The default share of the free memory: a CPU machine rarely runs only this server.
_DEFAULT_FRACTION = 0.25


class LayerPools(Protocol):
    """Where the layers of a model have their keys and values."""

    def layer(self, index: int) -> tuple[KVPages, KVPages]:
        """The keys and the values of one layer."""
        ...

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """The state of one layer with a recurrence; see `StatePool`."""
        ...

    def group_of(self, index: int) -> int:
        """Which of a step's block tables are a layer's."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """The layers of a pool whose heads are alike. stored: keys, and values where these are not the
    beginning of keys. scales: of both, where they are codes."""

    heads: KVHeads
    stored: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]

    @classmethod
    def of(cls, heads: KVHeads, tensors: Iterator[Tensor], *, has_scales: bool) -> "_Part":
        """Takes its own of a pool's tensors, which are as `_shapes` has them."""
        stored = tuple(islice(tensors, heads.num_stored))
        return cls(heads, stored, tuple(islice(tensors, has_scales * heads.num_stored)))

    def layer(self, number: int) -> tuple[KVPages, KVPages]:
        keys, values = self.stored[0][number], self.stored[-1][number]
        values = values[..., : self.heads.value_dim]
        if not self.scales:
            return keys, values
        return Codes(keys, self.scales[0][number]), Codes(values, self.scales[-1][number])

    def pairs(self) -> Iterator[tuple[Tensor, ...]]:
        if self.scales:
            yield tuple(each.view(torch.int8) for each in self.stored)
            yield self.scales
        else:
            yield self.stored


class KVPool(PoolTensors):
    """Layers that share block tables have it. Keys and values apart, for all layers whose heads are
    alike (num_layers, num_blocks, block_size, num_kv_heads, head_dim) each. Values that are the
    beginning of keys (`KVHeads.latent_dim`) are in these alone.

    In 8 bits they are codes, with scales beside them: (num_layers, num_blocks, num_kv_heads,
    block_size) float32, see `penstock.engine.memory.pool.kv_codes`.
    """

    def __init__(
        self,
        kv: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        mapped: MappedPool | None = None,
    ) -> None:
        super().__init__(_shapes(kv, num_blocks, block_size, dtype), device, mapped)
        alike = _alike(kv)
        rest, has_scales = iter(self.tensors), dtype in LIMITS
        self._parts = [_Part.of(heads, rest, has_scales=has_scales) for heads in alike]
        # The part of each layer that has keys and values of its own, and its number in that.
        places = {
            layer: (part, number)
            for part, layers in zip(self._parts, alike.values(), strict=True)
            for number, layer in enumerate(layers)
        }
        self._places = [places[kv.source_of(layer)] for layer in range(kv.num_layers)]

    def layer(self, index: int) -> tuple[KVPages, KVPages]:
        part, number = self._places[index]
        return part.layer(number)

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """See `LayerPools`."""
        raise AssertionError(f"layer {index} has keys and values, and no state")

    def group_of(self, index: int) -> int:
        """See `LayerPools`."""
        return 0

    def pairs(self) -> list[tuple[Tensor, ...]]:
        """All that belongs to a block, of keys and of values, or of keys alone where values are
        their beginning: (num_layers, num_blocks, ...) each, in types that can be copied
        everywhere."""
        return [pair for part in self._parts for pair in part.pairs()]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """(source, target): each target block gets its source's content, in every layer."""
        sources, targets = ([pair[i] for pair in copies] for i in (0, 1))
        for pair in self.pairs():
            for tensor in pair:
                tensor[:, targets] = tensor[:, sources]


class KVPools:
    """The pools of all groups of a model's layers. See `LayerPools`."""

    def __init__(
        self,
        kv: KVShape,
        layout: KVLayout,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: KVMemory | None = None,
    ) -> None:
        """kv: of the whole model. num_blocks: of each group, where there are recurrent states their
        number last. memory: where pools outlive the process."""
        self.block_size = block_size
        layers = [layout.layers_of(group, kv) for group in range(len(num_blocks))]
        shapes = [
            KVShape(tuple(kv.heads[layer] for layer in each))
            for each in layers[: len(layout.windows)]
        ]
        tensors = [
            _shapes(shape, num, block_size, dtype)
            for shape, num in zip(shapes, num_blocks, strict=False)
        ]
        if layout.state is not None:
            tensors.append(StatePool.shapes(layout.state, num_blocks[-1]))
        maps = mapped_pools(memory, list(zip(num_blocks, tensors, strict=True)))
        self.groups = [
            KVPool(shape, num, block_size, dtype, device, each)
            for shape, num, each in zip(shapes, num_blocks, maps, strict=False)
        ]
        # In the order in which the scheduler has them.
        self.all_groups: list[KVPool | StatePool] = [*self.groups]
        self.recurrent: StatePool | None = None
        """None where no layer has a recurrence."""
        if layout.state is not None:
            self.recurrent = StatePool(layout.state, num_blocks[-1], device, maps[-1])
            self.all_groups.append(self.recurrent)
        # The group of each layer of the model, and whose keys and values, or state, among the
        # group's layers it has.
        self._places = [
            (group, layers[group].index(kv.source_of(layer)))
            for layer, group in enumerate(layout.group_of)
        ]

    @property
    def journals(self) -> tuple[Journal, ...]:
        """They list the blocks of each group, where these outlive this process; else none."""
        return tuple(pool.journal for pool in self.all_groups if pool.journal is not None)

    def layer(self, index: int) -> tuple[KVPages, KVPages]:
        group, number = self._places[index]
        return self.groups[group].layer(number)

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        assert self.recurrent is not None
        return self.recurrent.layer(self._places[index][1])

    def group_of(self, index: int) -> int:
        return self._places[index][0]


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks: of the first group's pool; more_blocks: of those of the others."""

    num_blocks: int
    max_model_len: int
    more_blocks: tuple[int, ...] = ()

    @property
    def by_group(self) -> tuple[int, ...]:
        return (self.num_blocks, *self.more_blocks)

    def num_bytes(self, pools: Sequence[GroupPool]) -> int:
        return _num_bytes(self.by_group, pools)


def size_cpu_pool(
    engine: EngineConfig,
    pools: Sequence[GroupPool],
    *,
    weight_bytes: int,
    max_model_len: int,
    memory: KVMemory | None = None,
    num_ranks: int = 1,
    only_of_steps: bool = False,
) -> PoolSize:
    """`size_pool` with --kv-cache-memory-bytes, or else a quarter of the memory that the weights
    leave free. Never more than max_num_seqs sequences of the full length can fill.

    max_model_len: the model's own limit. memory: pools that are in it already keep their sizes, as
    that is no longer free. num_ranks: how many processes do the same on this machine, each
    with such weights. only_of_steps: whether no more is needed than what a step computes, and as
    much that is admitted and waits for the next.
    """
    max_len = resolve_max_model_len(engine.max_model_len, max_model_len)
    sizes = memory.num_blocks if memory else None
    if sizes is not None and len(sizes) == len(pools):
        budget = _num_bytes(sizes, pools)
        if all(num >= pool.most_blocks(max_len) for num, pool in zip(sizes, pools, strict=True)):
            return PoolSize(sizes[0], max_len, sizes[1:])
    else:
        free = max(0, available_memory_bytes() // num_ranks - weight_bytes)
        budget = engine.kv_cache_memory_bytes or int(_DEFAULT_FRACTION * free)
    num_seqs, block_size = engine.scheduler.max_num_seqs, pools[0].block_size
    # The last block of each text may be nearly empty, and each that runs keeps one in reserve.
    of_steps = 2 * (-(-engine.scheduler.max_step_tokens // block_size) + 2 * num_seqs)
    return size_pool(
        pools,
        engine.scheduler,
        budget=budget,
        max_blocks=num_seqs * -(-max_len // block_size) if not only_of_steps else of_steps,
        max_len=max_len,
        may_shorten=engine.max_model_len is None,
        advice=lambda needed: f"set --kv-cache-memory-bytes to at least {needed}",
    )


def _num_bytes(num_blocks: Sequence[int], pools: Sequence[GroupPool]) -> int:
    return sum(num * pool.block_bytes for num, pool in zip(num_blocks, pools, strict=True))


def resolve_max_model_len(requested: int | None, default: int, limit: int = 0) -> int:
    """default: the model's own. limit: what it can be lengthened to, if it can. Raises
    InvalidConfig for a larger request."""
    limit = max(default, limit)
    if requested is not None and requested > limit:
        raise InvalidConfig(
            f"--max-model-len is {requested}, but this model's config.json allows at most "
            f"{limit} positions; lower it"
        )
    return requested or default


def size_pool(
    pools: Sequence[GroupPool],
    scheduler: SchedulerConfig,
    *,
    budget: int,
    max_blocks: int,
    max_len: int,
    may_shorten: bool,
    advice: Callable[[int], str],
) -> PoolSize:
    """The number of blocks and the longest sequence. Raises InvalidConfig if max_len does not fit.

    budget: bytes for keys and values. max_blocks: of one pool. may_shorten: reduce max_len to what
    fits instead of raising. advice: what to change if this many bytes are needed.
    """
    budget = max(0, min(budget, max_blocks * sum(pool.block_bytes for pool in pools)))
    longest = longest_that_fits(pools, budget, max_len)
    if longest < max_len and not (may_shorten and longest):
        needed = bytes_needed(pools, max_len)
        raise InvalidConfig(
            f"the KV pool of {budget} bytes holds {longest} tokens, fewer than one "
            f"sequence of --max-model-len={max_len}; {advice(needed)}"
            + (f" or --max-model-len to at most {longest}" if longest else "")
        )
    if longest < max_len:
        logger.warning(
            "the model's context of %d tokens does not fit the KV pool; --max-model-len is now %d",
            max_len,
            longest,
        )
    num_blocks = divide(
        pools,
        budget,
        max_model_len=longest,
        max_num_seqs=scheduler.max_num_seqs,
        max_step_tokens=scheduler.max_step_tokens,
    )
    first, *more = (min(num, max_blocks) for num in num_blocks)
    return PoolSize(first, longest, tuple(more))


def _alike(kv: KVShape) -> dict[KVHeads, list[int]]:
    """The layers that have keys and values of their own, by their heads."""
    found: dict[KVHeads, list[int]] = defaultdict(list)
    for layer in kv.own_layers:
        found[kv.heads[layer]].append(layer)
    return found


def _shapes(kv: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype) -> list[TensorShape]:
    """A pool's tensors, for each kind of heads: keys, values where they are stored, and where they
    are codes the scales of both."""
    shapes: list[TensorShape] = []
    for heads, layers in _alike(kv).items():
        blocks = len(layers), num_blocks
        stored = (*blocks, block_size, heads.num_kv_heads, heads.head_dim)
        shapes += [(stored, dtype)] * heads.num_stored
        if dtype in LIMITS:
            scales = (*blocks, heads.num_kv_heads, block_size)
            shapes += [(scales, torch.float32)] * heads.num_stored
    return shapes
