"""The pools of keys and values of several ranks on this machine, in memory that rank 0 has too.

A tier below the pool then moves a block of all ranks as one piece, under one digest: it is stored,
found, verified and loaded as a whole, and no rank has to be asked. Rank 0 has its own pool in its
own memory; a descriptor for each of the others is made by it and inherited by all.
"""

from collections.abc import Sequence

import torch

from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_memory import KVMemory
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.shared_memory import shared_memory

# The memory is of one start alone, so there is nothing that it could be taken for.
_IDENTITY = bytes(32)
_CPU = torch.device("cpu")


def rank_pools(layout: RankLayout) -> tuple[int, ...]:
    """Descriptors for the ranks after the first, to be closed once all have them."""
    return tuple(shared_memory(0) for _ in range(1, layout.size))


def pool_memory(pools: Sequence[int], rank: int) -> KVMemory | None:
    """Where this rank's pool is to be. None for rank 0."""
    return KVMemory(pools[rank - 1], _IDENTITY) if rank else None


def pools_of_others(
    pools: Sequence[int],
    ranks: RankLayout,
    whole: ModelConfig,
    max_model_len: int,
    num_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
) -> list[KVPools]:
    """Those of ranks 1 and up, once all have made theirs. whole: the model that they compute
    together. max_model_len: before the pools' sizes limited it."""
    found = []
    for rank, descriptor in enumerate(pools, start=1):
        model = whole
        if ranks.tensor_size > 1:
            model = Shard(whole, ranks.tensor_rank_of(rank), ranks.tensor_size).config
        layout: KVLayout = model.kv_layout(max_model_len)
        if ranks.num_stages > 1:
            stage = Stage(model, ranks.stage_of(rank), ranks.num_stages)
            model, layout = stage.config, stage.layout(layout)
        memory = KVMemory(descriptor, _IDENTITY)
        assert memory.num_blocks == tuple(num_blocks), (rank, memory.num_blocks, num_blocks)
        found.append(KVPools(model.kv_shape, layout, num_blocks, block_size, dtype, _CPU, memory))
    return found
