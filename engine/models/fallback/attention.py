"""Serves a transformers class as its attention: keys and values go to the paged pool, and
each token attends to its own sequence there.

A step's tokens are one row, whichever sequences they belong to. How the registry calls a function,
and what the options mean: transformers' `modeling_utils.AttentionInterface` and the functions
`eager_attention_forward` of its classes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.engine.kernels.attention.gathered import visible
from penstock.engine.memory.pool.kv_codes import KVPages, gather, store
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.step.model_input import ModelInput

# These are names in transformers' registries, which make masks for the second name only.
PAGED = "penstock"
TRACED = "penstock_traced"
# At most so many scores at a time, in float32: 64 MiB.
_MAX_SCORES = 2**24


class Call(NamedTuple):
    """How a layer of a class calls attention. query: (T, num_heads, key_dim). key, value: (T,
    num_kv_heads, key_dim or value_dim). module: the layer's. options: what the class gives
    besides."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]


# Computes attention in one pass through a class: the mixed values of one layer, (T, num_heads,
# value_dim).
Attends = Callable[[Call], Tensor]


# Not an argument of the class's forward: some classes do not hand theirs on to attention.
_ATTENDS: ContextVar[Attends] = ContextVar("attends")


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Sets the attention of classes that are called inside."""
    token = _ATTENDS.set(attends)
    try:
        yield
    finally:
        _ATTENDS.reset(token)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registry calls it: query (1, num_heads, T, key_dim), key and value likewise; gives (1, T,
    num_heads, value_dim), and no weights."""
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    mixed = _ATTENDS.get()(Call(module, query, key, value, attention_mask, options))
    return mixed[None], None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One layer's attention. index: of its keys and values in the pool. window: how many positions
    a token attends to, its own included; None for all before it."""

    index: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class PagedStep:
    """See `Attends`: one step over the pool, all on one device."""

    layers: Mapping[nn.Module, AttentionLayer]
    step: ModelInput
    pool: LayerPools

    def __call__(self, call: Call) -> Tensor:
        layer, step, query = self.layers[call.module], self.step, call.query
        keys, values = self.pool.layer(layer.index)
        store(keys, step.kv_slots, _padded(call.key, keys))
        store(values, step.kv_slots, _padded(call.value, values))
        mixed = query.new_empty(len(query), layer.num_heads, layer.value_dim)
        for row, context_len in enumerate(step.context_lens):
            first, end = step.query_starts[row], step.query_starts[row + 1]
            # Blocks behind the first token's window are not read.
            block_size = keys.shape[1]
            behind = 0 if layer.window is None else context_len - (end - first) + 1 - layer.window
            first_block = max(0, behind) // block_size
            table = step.block_tables[row : row + 1, first_block : -(-context_len // block_size)]
            start = first_block * block_size
            read = slice(layer.num_kv_heads), slice(context_len - start)
            mixed[first:end] = attend_densely(
                query[first:end],
                gather(keys, table, query.dtype)[0][(*read, slice(layer.key_dim))],
                gather(values, table, query.dtype)[0][(*read, slice(layer.value_dim))],
                step.positions[first:end] - start,
                layer.window,
                call.options,
            )
        return mixed


def attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    window: int | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Attention of one sequence, in float32: (T, num_heads, value_dim).

    query: (T, num_heads, key_dim). key, value: (num_kv_heads, L, ...), of the positions 0 to L - 1.
    positions: (T,), the queries' own. options: `scaling`; `softcap`, of the scores; `s_aux`,
    (num_heads,): one more score in each head's denominator, without a value (a sink).
    """
    num_heads, num_kv_heads, num_keys = query.shape[1], *key.shape[:2]
    scale = options.get("scaling")
    scale = query.shape[2] ** -0.5 if scale is None else scale
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    grouped = query.float().view(len(query), num_kv_heads, -1, query.shape[2]) * scale
    key, value = key.float(), value.float()
    parts = []
    rows = max(1, _MAX_SCORES // (num_heads * num_keys))
    for queries, at in zip(torch.split(grouped, rows), torch.split(positions, rows), strict=True):
        scores = torch.einsum("tkgd,kld->kgtl", queries, key)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible(at, num_keys, window), -torch.inf)
        if sinks is not None:
            column = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=-1)
        shares = scores.softmax(-1)[..., :num_keys]
        parts.append(torch.einsum("kgtl,kld->tkgd", shares, value).flatten(1, 2))
    return torch.cat(parts).to(query.dtype)


def _padded(x: Tensor, pages: KVPages) -> Tensor:
    """With zeros, to what the pool has for a token: layers may differ in heads and widths."""
    num_heads, width = pages.shape[2:]
    if x.shape[1:] == (num_heads, width):
        return x
    return functional.pad(x, (0, width - x.shape[2], 0, num_heads - x.shape[1]))
