"""`describe`: what the scheduler and the metrics know of a model that has been loaded."""

import torch

from penstock.engine.memory.hardware import peak_bandwidth, peak_flops
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import PoolSize
from penstock.engine.models.config import ModelConfig
from penstock.engine.ranks.layout import ONE_RANK, RankLayout
from penstock.engine.step.model_info import AttentionGroup, ModelInfo, QuantizationInfo


def describe(
    model: ModelConfig,
    dtype: torch.dtype,
    device_name: str,
    size: PoolSize,
    block_size: int,
    measured_bandwidth: float | None,
    load_seconds: dict[str, float],
    measured_flops: float | None = None,
    *,
    weight_bytes: int,
    expert_bytes: int,
    kv_dtype: torch.dtype,
    computed_by: str | None = None,
    quantization: QuantizationInfo | None = None,
    layout: KVLayout | None = None,
    whole: ModelConfig | None = None,
    ranks: RankLayout = ONE_RANK,
) -> ModelInfo:
    """model: what one rank has of `whole`; what a device reads and computes is that part's.
    weight_bytes: as in `ModelInfo`. expert_bytes: of all experts of a mixture. layout: of the
    pools; None where its groups were not made for a longer sequence than size.max_model_len.
    kv_dtype: of the KV cache. load_seconds may still grow: it is not copied."""
    whole = whole or model
    layout = layout or model.kv_layout(size.max_model_len)
    more_blocks, num_states, state_bytes = size.more_blocks, 0, 0
    if layout.state is not None:
        *others, num_states = more_blocks
        more_blocks, state_bytes = tuple(others), layout.state.num_bytes
    return ModelInfo(
        architecture=model.family,
        dtype=dtype_name(dtype),
        kv_cache_dtype=dtype_name(kv_dtype),
        device=device_name,
        vocab_size=whole.vocab_size,
        hidden_size=model.hidden_size,
        max_model_len=size.max_model_len,
        block_size=block_size,
        num_blocks=size.num_blocks,
        eos_token_ids=model.eos_token_ids,
        num_parameters=whole.num_parameters,
        weight_bytes=weight_bytes,
        attention=_attention_groups(model, layout, kv_dtype.itemsize),
        more_blocks=more_blocks,
        num_states=num_states,
        state_bytes=state_bytes,
        flops_per_token=2 * model.num_token_weights,
        flops_per_sampled_token=2 * model.vocab_size * model.hidden_size,
        peak_bandwidth_bytes_per_s=peak_bandwidth(device_name),
        measured_bandwidth_bytes_per_s=measured_bandwidth,
        peak_flops_per_s=peak_flops(device_name, dtype),
        measured_flops_per_s=measured_flops,
        load_seconds=load_seconds,
        computed_by=computed_by,
        experts=model.routed(expert_bytes),
        quantization=quantization,
        tensor_parallel_size=ranks.tensor_size,
        pipeline_parallel_size=ranks.num_stages,
    )


def _attention_groups(
    model: ModelConfig, layout: KVLayout, itemsize: int
) -> tuple[AttentionGroup, ...]:
    kv = model.kv_shape
    groups = []
    for group, window in enumerate(layout.windows):
        layers = [layer for layer, its in enumerate(layout.group_of) if its == group]
        own = layout.layers_of(group, kv)
        held = sum(kv.heads[layer].bytes_per_token(itemsize) for layer in own)
        groups.append(
            AttentionGroup(
                window=window,
                kv_bytes_per_token=sum(kv.heads[i].bytes_per_token(itemsize) for i in layers),
                flops_per_pair=4 * model.num_heads * sum(kv.heads[i].head_dim for i in layers),
                held_bytes_per_token=None if own == layers else held,
            )
        )
    return tuple(groups)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
