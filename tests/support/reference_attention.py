"""Slow, simple attention: the reference that the backends are tested against."""

import torch
from torch import Tensor

from penstock.engine.kernels.attention.gathered import visible
from penstock.engine.step.model_input import ModelInput


def reference_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: ModelInput,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`gathered_attention` in float32, one sequence at a time, with the full matrix of scores."""
    output = query.new_empty(*query.shape[:2], values.shape[3])
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    group = query.shape[1] // num_kv_heads
    for row, context_len in enumerate(step.context_lens):
        first, end = step.query_starts[row], step.query_starts[row + 1]
        table = step.block_tables[row, : -(-context_len // block_size)]
        key, value = (
            pool[table].view(-1, num_kv_heads, pool.shape[3])[:context_len].float()
            for pool in (keys, values)
        )
        grouped = query[first:end].float().view(-1, num_kv_heads, group, head_dim)
        scores = torch.einsum("qkgd,skd->kgqs", grouped, key) * head_dim**-0.5
        seen = visible(step.positions[first:end], context_len, window)
        scores = scores.masked_fill(~seen.to(scores.device), -1e30)
        if sinks is not None:
            for_heads = sinks.view(num_kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, for_heads), dim=-1)
        weights = scores.softmax(-1)[..., :context_len]
        mixed = torch.einsum("kgqs,skd->qkgd", weights, value)
        output[first:end] = mixed.flatten(1, 2).to(query.dtype)
    return output
