"""Paged attention at the shapes of the models, compared with FlashAttention 3 (--flash-attn-3).

One large pool of random keys and values; each input set has its own blocks, in random order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.attention.protocol import DeviceAttention, LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.step.device_step import DeviceStep
from tests.bench.engine.case import Bench, Case, MakeCase, size_of
from tests.bench.engine.flash_attention_3 import FlashAttention3, interface_in
from tests.bench.engine.models import model_config
from tests.bench.engine.timing import Call, relative_error

_MODELS = ("Llama-3.1-8B", "Qwen3-0.6B")
_BLOCK_SIZE, _TINY_BLOCK_SIZE = 64, 16
# The row of the table of goals comes first.
_DECODES = ((32, 8192), (1, 1024), (1, 8192), (32, 1024), (256, 1024), (256, 8192))
_CHECKED_DECODES, _TINY_DECODES = ((1, 512),), ((3, 200),)
# Tokens of a chunk, and of the context before it.
_CHUNKS = ((1024, 0), (8192, 0), (1024, 7168))
_CHECKED_CHUNKS, _TINY_CHUNKS = ((70, 0), (300, 212)), ((20, 12),)
# Of a decode, for each multiprocessor, beside the present number.
_PROGRAMS = (2, 6)
# Query rows whose scores are held at once by the reference.
_REFERENCE_ROWS = 512


def decode_attention(bench: Bench) -> Iterator[MakeCase]:
    for model in bench.pick(_MODELS, _MODELS[:1], _MODELS[:1]):
        for batch, context in bench.pick(_DECODES, _CHECKED_DECODES, _TINY_DECODES):
            at: dict[str, object] = {"model": model, "batch": batch, "context": context}
            lengths = Lengths([context] * batch, [1] * batch)
            yield partial(_case, bench, model, lengths, at, "decode attention")
    if not bench.tiny:  # of unlike lengths
        longest, num_rows = (8192, 64) if bench.is_timed else (1100, 6)
        counts = [1 + (longest - 1) * row // (num_rows - 1) for row in range(num_rows)]
        at = {"model": _MODELS[0], "batch": num_rows, "context": f"1 to {longest}"}
        lengths = Lengths(counts, [1] * num_rows)
        yield partial(_case, bench, _MODELS[0], lengths, at, "decode attention")


def prefill_attention(bench: Bench) -> Iterator[MakeCase]:
    for model in bench.pick(_MODELS, _MODELS[:1], _MODELS[:1]):
        for chunk, before in bench.pick(_CHUNKS, _CHECKED_CHUNKS, _TINY_CHUNKS):
            at: dict[str, object] = {"model": model, "chunk": chunk, "before": before}
            lengths = Lengths([before + chunk], [chunk])
            yield partial(_case, bench, model, lengths, at, "prefill attention")
    if not bench.tiny:  # of unlike lengths
        at = {"model": _MODELS[0], "chunk": "1 to 400", "before": "0 to 110"}
        lengths = Lengths([1, 65, 170, 400], [1, 40, 60, 400])
        yield partial(_case, bench, _MODELS[0], lengths, at, "prefill attention")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of each row: context tokens, and how many of them are queries (1: a decode)."""

    contexts: list[int]
    queries_per_row: list[int]

    @property
    def is_decode(self) -> bool:
        return max(self.queries_per_row) == 1

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs."""
        pairs = zip(self.contexts, self.queries_per_row, strict=True)
        return sum(n * (c - n) + n * (n + 1) // 2 for c, n in pairs)


class Inputs:
    """A KV pool, and enough sets of rows on it to exceed the cache."""

    def __init__(self, bench: Bench, shape: AttentionShape, lengths: Lengths) -> None:
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * bench.dtype.itemsize
        num_sets = bench.sets(sum(lengths.contexts) * token_bytes)
        num_rows, size = len(lengths.contexts), shape.block_size
        per_row = -(-max(lengths.contexts) // size)
        blocks = torch.randperm(num_sets * num_rows * per_row, device=bench.device).int()
        pool = (len(blocks), size, shape.num_kv_heads, shape.head_dim)
        self.keys, self.values = bench.random(*pool), bench.random(*pool)
        num_tokens = sum(lengths.queries_per_row)
        self.out = bench.poisoned(num_tokens, shape.num_heads, shape.head_dim)
        self.queries = [bench.random(*self.out.shape) for _ in range(num_sets)]
        offsets = torch.tensor([0, *lengths.queries_per_row]).cumsum(0).tolist()
        empty = torch.empty(num_tokens, dtype=torch.int32, device=bench.device)
        self.steps = [
            DeviceStep(
                token_ids=empty,
                positions=empty,
                kv_slots=empty,
                slots=torch.arange(num_rows, dtype=torch.int32, device=bench.device),
                context_lens=bench.ints(lengths.contexts),
                num_decodes=num_rows if lengths.is_decode else 0,
                chunk_starts=None if lengths.is_decode else bench.ints(offsets),
                block_tables=tables,
            )
            for tables in blocks.view(num_sets, num_rows, per_row)
        ]
        self._lengths = lengths

    def calls(self, make: Callable[[], DeviceAttention]) -> list[Call]:
        """A layer's attention of each set. Planning, once per step, is not timed; each set
        has its own backend for it."""
        calls: list[Call] = []
        for query, step in zip(self.queries, self.steps, strict=True):
            attention = make()
            attention.plan(step)
            layer = LayerContext(self.keys, self.values, None)
            calls.append(partial(attention, query, layer, step, self.out))
        return calls

    def error(self, call: Call) -> float:
        """Of the first set."""
        self.out.fill_(float("nan"))
        call()
        return relative_error(self.out, self.reference())

    def reference(self) -> Tensor:
        reference = torch.empty(self.out.shape, dtype=torch.float64, device=self.out.device)
        first = 0
        tables = self.steps[0].block_tables.long()
        for row, count in enumerate(self._lengths.queries_per_row):
            context = self._lengths.contexts[row]
            keys, values = (
                pool[tables[row]].flatten(0, 1)[:context].double()
                for pool in (self.keys, self.values)
            )
            for start in range(0, count, _REFERENCE_ROWS):
                end = min(start + _REFERENCE_ROWS, count)
                tokens = slice(first + start, first + end)
                query = self.queries[0][tokens].double()
                reference[tokens] = _attend(query, keys, values, context - count + start)
            first += count
        return reference


def _attend(query: Tensor, keys: Tensor, values: Tensor, first_position: int) -> Tensor:
    """One sequence's, in the type of its inputs. keys, values: (context, kv_heads, head_dim)."""
    group = query.shape[1] // keys.shape[1]
    positions = first_position + torch.arange(len(query), device=query.device)
    unseen = torch.arange(len(keys), device=query.device) > positions[:, None]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ keys[:, head // group].T * query.shape[2] ** -0.5
        weights = scores.masked_fill_(unseen, float("-inf")).softmax(-1)
        heads.append(weights @ values[:, head // group])
    return torch.stack(heads, 1)


def _case(bench: Bench, model: str, lengths: Lengths, at: dict[str, object], kernel: str) -> Case:
    config = model_config(model, bench.tiny)
    (shape,) = config.attention_windows(_TINY_BLOCK_SIZE if bench.tiny else _BLOCK_SIZE)
    inputs = Inputs(bench, shape, lengths)
    rows, tokens, sms = len(lengths.contexts), len(inputs.out), bench.num_sms
    ours = partial(PagedAttention, {shape: [None]}, rows, tokens, sms, bench.device, bench.dtype)
    calls = inputs.calls(ours)
    makers = _rivals(bench, shape)
    if lengths.is_decode and bench.is_timed and not bench.tiny:  # decides DECODES_PER_SM
        for count in _PROGRAMS:
            makers[f"{count} programs a multiprocessor"] = partial(ours, decodes_per_sm=count)
    rivals = {name: inputs.calls(make) for name, make in makers.items()}
    pair_bytes = 2 * shape.num_kv_heads * shape.head_dim * bench.dtype.itemsize
    return Case(
        kernel=kernel,
        at=at,
        calls=calls,
        error=partial(inputs.error, calls[0]),
        num_bytes=sum(lengths.contexts) * pair_bytes + 2 * size_of(inputs.out),
        flops=4 * lengths.num_pairs * shape.num_heads * shape.head_dim,
        rivals=dict(rivals),
        rival_errors={name: partial(inputs.error, rival[0]) for name, rival in rivals.items()},
    )


def _rivals(bench: Bench, shape: AttentionShape) -> dict[str, Callable[[], DeviceAttention]]:
    if not bench.flash_attn_3:
        return {}
    make = partial(FlashAttention3, interface_in(bench.flash_attn_3), shape)
    return {FlashAttention3.name: make}
