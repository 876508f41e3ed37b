"""A model on devices that are not there: what a start would tell of it, and its step model.

From config.json, the datasheet and the memory's size alone. Of several ranks that compute each
layer together, bytes, operations and memory are those of one, as a rank 0 that is started tells.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.engine.executors.cuda.chunk_steps import CHUNK_SIZES
from penstock.engine.executors.cuda.graphs import captured_sizes
from penstock.engine.loading.description import describe, dtype_name
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.hardware import link_of, peak_bandwidth, peak_flops
from penstock.engine.memory.pool.kv_layout import GroupPool, longest_that_fits
from penstock.engine.memory.pool.kv_pool import PoolSize, size_pool
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.sizing.sizing import GB, Machine, Sizing
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.stats import GraphSizes
from penstock.scheduler.step_model.analytic import Exchange, analytic_model
from penstock.scheduler.step_model.model import StepModel

_BLOCK_SIZE = 64
# Numbers of GPUs in one machine. Over a network, two sums a layer take longer than the layer.
MACHINE_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    info: ModelInfo
    step_model: StepModel


def planned_model(
    sizing: Sizing,
    scheduler: SchedulerConfig,
    *,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    block_size: int | None = None,
    kv_cache_memory_bytes: int | None = None,
) -> PlannedModel:
    """sizing: of the whole model. kv_cache_memory_bytes: of each rank.

    Raises InvalidConfig where the device is unknown, the model does not fit on so many or cannot be
    split over them."""
    rank = sizing.on_rank(tensor_parallel_size)
    model, machine = rank.model, rank.machine
    bandwidth, flops = _peaks(machine, sizing.dtype)
    exchange = _exchange(sizing, tensor_parallel_size)
    block_size = block_size or _BLOCK_SIZE
    longest = min(max_model_len or model.max_model_len, model.max_model_len)
    room = _Room(longest, block_size, kv_cache_memory_bytes)
    pools, budget = room.pools(rank), room.budget(rank)
    what_would_fit = partial(_what_would_fit, sizing, tensor_parallel_size, room)
    if not longest_that_fits(pools, budget, longest):
        raise InvalidConfig(
            f"the weights take {rank.weight_bytes / GB:.1f} GB"
            + (" of each rank" if tensor_parallel_size > 1 else "")
            + ", which leaves no room for keys and values in the "
            f"{machine.memory_bytes / GB:.0f} GB of --device {machine.name}; {what_would_fit()}"
            "raise --memory-gb, or take a smaller model or another device"
        )
    size = size_pool(
        pools,
        scheduler,
        budget=budget,
        max_blocks=scheduler.max_num_seqs * -(-longest // block_size),
        max_len=longest,
        may_shorten=max_model_len is None,
        advice=lambda needed: (
            f"it needs {needed} bytes of keys and values; {what_would_fit()}raise --memory-gb"
        ),
    )
    info = _info(sizing, rank, size, room, RankLayout(tensor_parallel_size), scheduler)
    step_model = analytic_model(
        bandwidth=bandwidth,
        flops=flops,
        weight_bytes=info.weight_bytes,
        flops_per_token=info.flops_per_token,
        num_layers=model.num_layers,
        exchange=exchange,
    )
    return PlannedModel(info, step_model)


def _peaks(machine: Machine, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes and operations per second. Raises InvalidConfig where they are not known."""
    bandwidth, flops = peak_bandwidth(machine.name), peak_flops(machine.name, dtype)
    if bandwidth is None or flops is None:
        raise InvalidConfig(
            f"configs/hardware.toml has no peaks of --device {machine.name} in "
            f"{dtype_name(dtype)}; add the device there, or use a file of penstock calibrate"
        )
    return bandwidth, flops


def _info(
    sizing: Sizing,
    rank: Sizing,
    size: PoolSize,
    room: "_Room",
    ranks: RankLayout,
    scheduler: SchedulerConfig,
) -> ModelInfo:
    """sizing: of the whole model."""
    info = describe(
        rank.model,
        sizing.dtype,
        rank.machine.name,
        size,
        room.block_size,
        load_seconds={},
        weight_bytes=rank.step_weight_bytes,
        expert_bytes=rank.expert_bytes,
        kv_dtype=kv_dtype(sizing.kv_cache_dtype, sizing.dtype),
        layout=rank.model.kv_layout(room.longest),
        whole=sizing.model,
        ranks=ranks,
    )
    graph_sizes = GraphSizes(tuple(captured_sizes(scheduler.max_num_seqs)), CHUNK_SIZES)
    return replace(info, runs_ahead=True, graph_sizes=graph_sizes)


def _exchange(sizing: Sizing, num_ranks: int) -> Exchange | None:
    """None for one rank. Raises InvalidConfig where it is not known how the devices are joined."""
    if num_ranks == 1:
        return None
    device, model, itemsize = sizing.machine.name, sizing.model, sizing.dtype.itemsize
    link = link_of(device)
    if link is None:
        raise InvalidConfig(
            f"--tensor-parallel-size {num_ranks}: configs/hardware.toml has no link between two "
            f"--device {device}; add it there, or use --tensor-parallel-size 1"
        )
    return Exchange(
        link=link,
        num_ranks=num_ranks,
        num_sums=1 + 2 * model.num_layers,  # of the embedding, attention and MLPs
        token_bytes=model.hidden_size * itemsize,
        row_bytes=model.vocab_size * itemsize,
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """For keys and values on one device. longest: sequence. limit: of bytes, where there is one."""

    longest: int
    block_size: int
    limit: int | None

    def pools(self, rank: Sizing) -> list[GroupPool]:
        itemsize = kv_dtype(rank.kv_cache_dtype, rank.dtype).itemsize
        layout = rank.model.kv_layout(self.longest)
        return layout.pools(rank.model.kv_shape, self.block_size, itemsize)

    def budget(self, rank: Sizing) -> int:
        return rank.kv_bytes if self.limit is None else min(rank.kv_bytes, self.limit)

    def is_enough(self, rank: Sizing) -> bool:
        budget = self.budget(rank)
        return longest_that_fits(self.pools(rank), budget, self.longest) == self.longest


def _what_would_fit(sizing: Sizing, num_ranks: int, room: _Room) -> str:
    """The flag with the fewest ranks of which each has enough room; empty where none has."""
    if link_of(sizing.machine.name) is None:
        return ""
    for size in MACHINE_SIZES:
        if size <= num_ranks:
            continue
        try:
            rank = sizing.on_rank(size)
        except InvalidConfig:
            continue
        if room.is_enough(rank):
            return f"use --tensor-parallel-size {size}, "
    return ""
