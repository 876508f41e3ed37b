"""A model on a device that is not there: what a start would tell of it, and its step model.

From config.json, the datasheet and the memory's size alone.
"""

from dataclasses import dataclass, replace

from penstock.engine.executors.cuda.chunk_graphs import CHUNK_SIZES
from penstock.engine.executors.cuda.graphs import captured_sizes
from penstock.engine.executors.loading import describe
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.hardware import peak_bandwidth, peak_flops
from penstock.engine.memory.kv_layout import longest_that_fits
from penstock.engine.memory.kv_pool import size_pool
from penstock.engine.model_info import ModelInfo
from penstock.engine.sizing import GB, Sizing
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.stats import GraphSizes
from penstock.scheduler.step_model.analytic import analytic_model
from penstock.scheduler.step_model.model import StepModel

_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class PlannedModel:
    info: ModelInfo
    step_model: StepModel


def planned_model(
    sizing: Sizing,
    scheduler: SchedulerConfig,
    *,
    max_model_len: int | None = None,
    block_size: int | None = None,
    kv_cache_memory_bytes: int | None = None,
) -> PlannedModel:
    """Raises InvalidConfig where the device is unknown or the model does not fit on it."""
    model, machine = sizing.model, sizing.machine
    bandwidth, flops = peak_bandwidth(machine.name), peak_flops(machine.name, sizing.dtype)
    if bandwidth is None or flops is None:
        raise InvalidConfig(
            f"configs/hardware.toml has no peaks of --device {machine.name} in "
            f"{str(sizing.dtype).removeprefix('torch.')}; add the device there, or use a file of "
            "penstock calibrate"
        )
    block_size = block_size or _BLOCK_SIZE
    longest = min(max_model_len or model.max_model_len, model.max_model_len)
    layout = model.kv_layout(longest)
    itemsize = kv_dtype(sizing.kv_cache_dtype, sizing.dtype).itemsize
    pools = layout.pools(model.kv_shape, block_size, itemsize)
    budget = sizing.kv_bytes
    if kv_cache_memory_bytes is not None:
        budget = min(budget, kv_cache_memory_bytes)
    fitting = longest_that_fits(pools, budget, longest)
    if not fitting:
        raise InvalidConfig(
            f"the weights take {sizing.weight_bytes / GB:.1f} GB, which leaves no room for keys "
            f"and values in the {machine.memory_bytes / GB:.0f} GB of --device {machine.name}; "
            "raise --memory-gb, or take a smaller model or another device"
        )
    size = size_pool(
        pools,
        scheduler,
        budget=budget,
        max_blocks=scheduler.max_num_seqs * -(-longest // block_size),
        max_len=longest,
        may_shorten=max_model_len is None,
        advice=lambda needed: f"it needs {needed} bytes of keys and values; raise --memory-gb",
    )
    info = describe(
        model,
        sizing.dtype,
        machine.name,
        size,
        block_size,
        None,
        {},
        weight_bytes=sizing.step_weight_bytes,
        expert_bytes=sizing.expert_bytes,
        kv_dtype=kv_dtype(sizing.kv_cache_dtype, sizing.dtype),
        layout=layout,
    )
    graph_sizes = GraphSizes(tuple(captured_sizes(scheduler.max_num_seqs)), CHUNK_SIZES)
    step_model = analytic_model(
        bandwidth=bandwidth,
        flops=flops,
        weight_bytes=info.weight_bytes,
        flops_per_token=info.flops_per_token,
        num_layers=model.num_layers,
    )
    return PlannedModel(replace(info, runs_ahead=True, graph_sizes=graph_sizes), step_model)
