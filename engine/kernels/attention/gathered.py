"""Attention in plain torch: keys and values are gathered by block table, then SDPA computes it.

Runs on every device. The gather copies the whole context of a decode, whatever the window; the
kernels of `engine/kernels/attention/paged` and `engine/native/model.py` read blocks in place
instead.
"""

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.memory.pool.kv_codes import KVPages, gather
from penstock.engine.step.device_step import DeviceStep
from penstock.engine.step.model_input import ModelInput


def gathered_attention(
    query: Tensor,
    keys: KVPages,
    values: KVPages,
    step: ModelInput,
    window: int | None,
    sinks: Tensor | None = None,
    reaches: Tensor | None = None,
) -> Tensor:
    """Causal attention of each token to its own sequence: (T, num_heads, value_dim). Decodes are in
    batches of similar length, prefill chunks one by one.

    query: (T, num_heads, head_dim). keys, values: one layer of the pool, (num_blocks, block_size,
    num_kv_heads, head_dim or value_dim), this step's tokens already written. window: how many
    positions a token attends to, its own included, or None for all. sinks: (num_heads,) float32, a
    score of each head that takes its share of the softmax and has no value. reaches: as of
    `ModelInput`, of layers that read them; in decodes they have no effect.
    """
    output = query.new_empty(*query.shape[:2], values.shape[3])
    block_size = keys.shape[1]
    for rows, num_blocks in _buckets(step.context_lens[: step.num_decodes], block_size):
        tables = step.block_tables[rows, :num_blocks]
        # The query heads of one KV head become query rows: (rows, kv_heads, group, head_dim).
        grouped_query = query[rows].view(len(rows), keys.shape[2], -1, query.shape[-1])
        mask = visible(step.positions[rows], num_blocks * block_size, window)
        # Past a sequence's end a block holds what others left, and 0 times NaN would be NaN.
        unseen = ~mask[:, None, :, None]
        key = gather(keys, tables, query.dtype).masked_fill_(unseen, 0)
        value = gather(values, tables, query.dtype).masked_fill_(unseen, 0)
        mask = mask[:, None, None, :]
        if sinks is not None:
            key, value, mask = _with_sinks(key, value, mask, sinks.view(1, keys.shape[2], -1, 1))
        mixed = scaled_dot_product_attention(grouped_query, key, value, mask)
        output[rows] = mixed.flatten(1, 2)
    for row in range(step.num_decodes, len(step.context_lens)):
        first, end = step.query_starts[row], step.query_starts[row + 1]
        output[first:end] = _chunk(
            query[first:end], keys, values, step, row, window, sinks, reaches
        )
    return output


def _chunk(
    query: Tensor,
    keys: KVPages,
    values: KVPages,
    step: ModelInput,
    row: int,
    window: int | None,
    sinks: Tensor | None,
    reaches: Tensor | None,
) -> Tensor:
    """A prefill chunk's row: query and result are (tokens of the row, num_heads, head_dim or
    value_dim)."""
    first, end = step.query_starts[row], step.query_starts[row + 1]
    block_size = keys.shape[1]
    # Blocks behind the first token's window may be another sequence's.
    start = step.context_lens[row] - (end - first)
    skipped = 0 if window is None else max(0, start - window + 1) // block_size
    context_len = step.context_lens[row] - skipped * block_size
    table = step.block_tables[row : row + 1, skipped : skipped + -(-context_len // block_size)]
    key = gather(keys, table, query.dtype)[:, :, :context_len]
    value = gather(values, table, query.dtype)[:, :, :context_len]
    shift = skipped * block_size
    mask = visible(
        step.positions[first:end] - shift,
        context_len,
        window,
        None if reaches is None else reaches[first:end] - shift,
    )
    if values.shape[3] != keys.shape[3]:  # latents, of which no head needs a copy
        key, value = (each.expand(-1, query.shape[1], -1, -1) for each in (key, value))
    if sinks is not None:
        key, value, mask = _with_sinks(key, value, mask[None, None], sinks.view(1, -1, 1, 1))
    mixed = scaled_dot_product_attention(
        query[None].transpose(1, 2), key, value, mask, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def _with_sinks(
    key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with one more of zeros, and the mask as what is added to scores: to those of
    that key, the sinks. key, value: (B, kv_heads, keys, head_dim). mask: (B or 1, 1, queries or 1,
    keys). sinks: (1, kv_heads or heads, group or 1, 1)."""
    zeros = key.new_zeros(*key.shape[:2], 1, key.shape[3])
    shape = (mask[..., :1] + sinks).shape[:-1]
    scores = torch.zeros_like(mask, dtype=key.dtype).masked_fill_(~mask, -torch.inf)
    scores = torch.cat((scores.expand(*shape, -1), sinks.to(key.dtype).expand(*shape, 1)), dim=-1)
    return torch.cat((key, zeros), dim=2), torch.cat((value, zeros), dim=2), scores


def _buckets(context_lens: list[int], block_size: int) -> list[tuple[list[int], int]]:
    """Groups rows by block count between powers of two, so padding at most doubles the work."""
    buckets = defaultdict(list)
    for row, context_len in enumerate(context_lens):
        buckets[((context_len - 1) // block_size).bit_length()].append(row)
    return [
        (rows, -(-max(context_lens[row] for row in rows) // block_size))
        for rows in buckets.values()
    ]


def visible(
    positions: Tensor, num_keys: int, window: int | None, reaches: Tensor | None = None
) -> Tensor:
    """Which of the keys 0 to num_keys - 1 each query attends to: (..., num_keys) bool. reaches:
    before which, where it is not its own position and those before."""
    keys = torch.arange(num_keys, device=positions.device)
    queries = positions.unsqueeze(-1)
    seen = keys <= queries if reaches is None else keys < reaches.unsqueeze(-1)
    return seen if window is None else seen & (keys > queries - window)


class TorchAttention:
    """`DeviceAttention` by `gathered_attention`.

    It needs every length on the host, so each step waits for the device once, and no CUDA graph can
    capture it.
    """

    is_capturable = False
    takes_decode_lens = False

    def __init__(self) -> None:
        self._inputs: dict[int, ModelInput] = {}  # by group of layers

    def plan(self, step: DeviceStep) -> None:
        num, chunk_starts = step.num_decodes, step.chunk_starts
        query_starts = torch.arange(num + 1, dtype=torch.int32, device=step.slots.device)
        if chunk_starts is not None:
            query_starts = torch.cat((query_starts, chunk_starts[1:] + num))
        self._inputs[step.group] = ModelInput(
            token_ids=step.token_ids,
            positions=step.positions,
            kv_slots=step.kv_slots,
            block_tables=step.block_tables.index_select(0, step.slots),
            query_starts=query_starts.tolist(),
            context_lens=step.context_lens.tolist(),
            num_decodes=num,
            sample_rows=query_starts[1:] - 1,
            reaches=step.reaches,
        )

    def __call__(self, query: Tensor, layer: LayerContext, step: DeviceStep, out: Tensor) -> None:
        keys, values, window, sinks, has_spans = layer
        own, reaches = self._inputs[step.group], step.reaches if has_spans else None
        out.copy_(gathered_attention(query, keys, values, own, window, sinks, reaches))
