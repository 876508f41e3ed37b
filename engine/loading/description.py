"""`describe`: what the scheduler and the metrics know of a model that has been loaded."""

from typing import Any

import torch

from penstock.engine.memory.hardware import peak_bandwidth, peak_flops
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import PoolSize
from penstock.engine.models.config import ModelConfig
from penstock.engine.ranks.layout import ONE_RANK, RankLayout
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.step_model.amounts import AttentionGroup


def describe(
    model: ModelConfig,
    dtype: torch.dtype,
    device_name: str,
    size: PoolSize,
    block_size: int,
    *,
    kv_dtype: torch.dtype,
    expert_bytes: int,
    layout: KVLayout | None = None,
    whole: ModelConfig | None = None,
    ranks: RankLayout = ONE_RANK,
    **measured: Any,
) -> ModelInfo:
    """model: what one rank has of `whole`; what a device reads and computes is that part's.
    expert_bytes: of all experts of a mixture. layout: of the pools; None where its groups were not
    made for a longer sequence than size.max_model_len. kv_dtype: of the KV cache. measured: fields
    of `ModelInfo` that do not follow from these, as weight_bytes."""
    whole = whole or model
    layout = layout or model.kv_layout(size.max_model_len)
    more_blocks, num_states, state_bytes = size.more_blocks, 0, 0
    if layout.state is not None:
        *others, num_states = more_blocks
        more_blocks, state_bytes = tuple(others), layout.state.num_bytes
    return ModelInfo(
        architecture=model.family,
        vocab_size=whole.vocab_size,
        hidden_size=model.hidden_size,
        **_pooled_fields(whole),
        eos_token_ids=model.eos_token_ids,
        num_parameters=whole.num_parameters,
        attention=_attention_groups(model, layout, kv_dtype.itemsize),
        more_blocks=more_blocks,
        num_states=num_states,
        state_bytes=state_bytes,
        flops_per_token=2 * model.num_token_weights,
        flops_per_sampled_token=2 * model.vocab_size * model.hidden_size,
        experts=model.routed(expert_bytes),
        generates=whole.generates,
        computes_whole=whole.is_encoder,
        tensor_parallel_size=ranks.tensor_size,
        pipeline_parallel_size=ranks.num_stages,
        **device_fields(dtype, kv_dtype, device_name, size, block_size),
        **measured,
    )


def _pooled_fields(model: ModelConfig) -> dict[str, Any]:
    if (head := model.pooled) is None:
        return {"pooled_size": model.hidden_size}
    named = ("labels", "problem_type", "pooling")
    return {"pooled_size": head.size, **{name: getattr(head, name) for name in named}}


def device_fields(
    dtype: torch.dtype, kv_dtype: torch.dtype, device_name: str, size: PoolSize, block_size: int
) -> dict[str, Any]:
    """Returns the fields of `ModelInfo` that say of any model where it is computed."""
    return {
        "dtype": dtype_name(dtype),
        "kv_cache_dtype": dtype_name(kv_dtype),
        "device": device_name,
        "max_model_len": size.max_model_len,
        "block_size": block_size,
        "num_blocks": size.num_blocks,
        "peak_bandwidth_bytes_per_s": peak_bandwidth(device_name),
        "peak_flops_per_s": peak_flops(device_name, dtype),
    }


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
                flops_per_pair=2
                * model.num_heads
                * sum(kv.heads[i].head_dim + kv.heads[i].value_dim for i in layers),
                held_bytes_per_token=None if own == layers else held,
            )
        )
    return tuple(groups)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
