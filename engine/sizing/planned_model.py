"""A model on devices that are not there: what a start would tell of it, and its step model.

From config.json, the datasheet and the memory's size alone. Of several ranks that compute each
layer together, bytes, operations and memory are those of one, as a rank 0 that is started tells.
"""

from dataclasses import dataclass, replace
from functools import partial

from penstock.engine.executors.cuda.chunk_steps import chunk_sizes
from penstock.engine.executors.cuda.graphs import captured_sizes
from penstock.engine.loading.description import describe, dtype_name
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.hardware import link_of, peak_bandwidth, peak_flops
from penstock.engine.memory.pool.kv_pool import PoolSize, size_pool
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.sizing.sizing import GB, Sizing
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.stats import GraphSizes
from penstock.scheduler.step_model.analytic import Exchange, analytic_model
from penstock.scheduler.step_model.model import StepModel

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
    """sizing: of the whole model. kv_cache_memory_bytes: of each rank. Raises InvalidConfig where
    the device is unknown, the model does not fit on so many or cannot be split over them."""
    sizing = replace(
        sizing,
        max_model_len=max_model_len,
        block_size=block_size or sizing.block_size,
        kv_limit=kv_cache_memory_bytes,
    )
    rank = sizing.on_rank(tensor_parallel_size)
    bandwidth, flops = _peaks(rank)
    exchange = _exchange(sizing, tensor_parallel_size)
    size = _pool_size(sizing, rank, scheduler, tensor_parallel_size, may_shorten=not max_model_len)
    info = _info(sizing, rank, size, RankLayout(tensor_parallel_size), scheduler)
    step_model = analytic_model(
        bandwidth=bandwidth,
        flops=flops,
        weight_bytes=info.weight_bytes,
        flops_per_token=info.flops_per_token,
        num_layers=rank.model.num_layers,
        exchange=exchange,
    )
    return PlannedModel(info, step_model)


def _pool_size(
    sizing: Sizing, rank: Sizing, scheduler: SchedulerConfig, num_ranks: int, *, may_shorten: bool
) -> PoolSize:
    """Raises InvalidConfig where the model does not fit."""
    what_would_fit = partial(_what_would_fit, sizing, num_ranks)
    machine, longest = rank.machine, rank.longest
    if not rank.longest_that_fits:
        raise InvalidConfig(
            f"the weights take {rank.weight_bytes / GB:.1f} GB"
            + (" of each rank" if num_ranks > 1 else "")
            + ", which leaves no room for keys and values in the "
            f"{machine.memory_bytes / GB:.0f} GB of --device {machine.name}; {what_would_fit()}"
            "raise --memory-gb, or take a smaller model or another device"
        )
    return size_pool(
        rank.pools,
        scheduler,
        budget=rank.kv_bytes,
        max_blocks=scheduler.max_num_seqs * -(-longest // rank.block_size),
        max_len=longest,
        may_shorten=may_shorten,
        advice=lambda needed: (
            f"it needs {needed} bytes of keys and values; {what_would_fit()}raise --memory-gb"
        ),
    )


def _peaks(rank: Sizing) -> tuple[float, float]:
    """Bytes and operations per second. Raises InvalidConfig where they are not known."""
    machine, dtype = rank.machine, rank.dtype
    bandwidth, flops = peak_bandwidth(machine.name), peak_flops(machine.name, dtype)
    if bandwidth is None or flops is None:
        raise InvalidConfig(
            f"configs/hardware.toml has no peaks of --device {machine.name} in "
            f"{dtype_name(dtype)}; add the device there, or use a file of penstock calibrate"
        )
    return bandwidth, flops


def _info(
    sizing: Sizing, rank: Sizing, size: PoolSize, ranks: RankLayout, scheduler: SchedulerConfig
) -> ModelInfo:
    """sizing: of the whole model."""
    decode_sizes, most = captured_sizes(scheduler.max_num_seqs), scheduler.max_step_tokens
    chunks = chunk_sizes(sizing.model, ranks.tensor_size, rank.machine.name, sizing.dtype, most)
    graph_sizes = GraphSizes(tuple(decode_sizes), chunks)
    return describe(
        rank.model,
        sizing.dtype,
        rank.machine.name,
        size,
        rank.block_size,
        load_seconds={},
        weight_bytes=rank.step_weight_bytes,
        expert_bytes=rank.expert_bytes,
        kv_dtype=kv_dtype(sizing.kv_cache_dtype, sizing.dtype),
        layout=rank.layout,
        whole=sizing.model,
        ranks=ranks,
        runs_ahead=True,
        graph_sizes=graph_sizes,
    )


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


def _what_would_fit(sizing: Sizing, num_ranks: int) -> str:
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
        if rank.longest_that_fits == rank.longest:
            return f"use --tensor-parallel-size {size}, "
    return ""
