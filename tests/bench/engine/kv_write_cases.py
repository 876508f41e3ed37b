"""What writes keys and values to the pool: by itself, in codes too, and inside of the decode
attention. What no token writes has to stay."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.rope import rotate_and_store
from penstock.engine.memory.pool.kv_codes import LIMITS, Codes, KVPages, decode, encode, store
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.attention.rotary import rotary_table, rotate
from penstock.engine.step.device_step import Rotation
from tests.bench.engine.attention_cases import Inputs, Lengths
from tests.bench.engine.case import Bench, Case, MakeCase, size_of
from tests.bench.engine.models import model_config
from tests.bench.engine.timing import relative_error

_MODEL = "Llama-3.1-8B"
_BLOCK_SIZE = 64
_MAX_LEN = 1200
_TOKENS, _CHECKED_TOKENS, _TINY_TOKENS = (1, 256, 8192), (70,), (5,)
_CONTEXTS, _TINY_CONTEXTS = (1, 5, 64, 65, 300, 1100), (1, 17, 70)


def kv_write(bench: Bench) -> Iterator[MakeCase]:
    for tokens in bench.pick(_TOKENS, _CHECKED_TOKENS, _TINY_TOKENS):
        for codes in (None, *LIMITS):
            yield partial(_rotate_and_store, bench, tokens, codes)
    yield partial(_decode, bench, list(_TINY_CONTEXTS if bench.tiny else _CONTEXTS))


def _attention(bench: Bench) -> tuple[Attention, Rotation]:
    config = model_config(_MODEL, bench.tiny)
    attention = config.attentions[0]
    assert isinstance(attention, Attention) and attention.rope is not None
    cos, sin = rotary_table(attention.rope, attention.head_dim, _MAX_LEN, bench.device)
    return attention, Rotation(cos=cos, sin=sin, query_norm=None, key_norm=None, eps=1e-5)


def _parts(
    qkv: Tensor, attention: Attention, rotation: Rotation, positions: Tensor
) -> list[Tensor]:
    """Rotated queries and keys, and values, by torch in float64."""
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    wide = qkv.double().view(len(qkv), -1, attention.head_dim)
    query, key, value = torch.split(wide, [heads, kv_heads, kv_heads], 1)
    cos, sin = (table[positions.long()].unsqueeze(1) for table in (rotation.cos, rotation.sin))
    return [rotate(query, cos, sin), rotate(key, cos, sin), value]


def _width(attention: Attention) -> int:
    return (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim


def _rotate_and_store(bench: Bench, tokens: int, codes: torch.dtype | None) -> Case:
    attention, rotation = _attention(bench)
    qkv = bench.random(tokens, _width(attention))
    positions = bench.ints(range(tokens)) % _MAX_LEN
    num_blocks = tokens // _BLOCK_SIZE + 3
    pool = (num_blocks, _BLOCK_SIZE, attention.num_kv_heads, attention.head_dim)
    keys, values, *expected = (_pages(bench, pool, codes) for _ in range(4))
    kv_slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=bench.device)[:tokens]
    query = bench.poisoned(tokens, attention.num_heads, attention.head_dim)
    call = partial(rotate_and_store, qkv, rotation, positions, kv_slots, keys, values, query)

    def error() -> float:
        rotated, *stored = _parts(qkv, attention, rotation, positions)
        for pages, same, x in zip((keys, values), expected, stored, strict=True):
            _copy(pages, same)
            store(same, kv_slots, x.to(bench.dtype))
        call()
        pairs = [(_plain(keys), _plain(expected[0])), (_plain(values), _plain(expected[1]))]
        return max(relative_error(out, wanted) for out, wanted in [(query, rotated), *pairs])

    kind = "plain" if codes is None else str(codes).removeprefix("torch.")
    return Case(
        kernel="rotate_and_store",
        at={"tokens": tokens, "kv": kind},
        calls=[call],
        error=error,
        num_bytes=2 * size_of(qkv),
    )


def _decode(bench: Bench, contexts: list[int]) -> Case:
    """The decode attention rotates queries and keys itself, and stores the new token's."""
    attention, rotation = _attention(bench)
    size = 16 if bench.tiny else _BLOCK_SIZE
    (shape,) = model_config(_MODEL, bench.tiny).attention_windows(size)
    inputs = Inputs(bench, shape, Lengths(contexts, [1] * len(contexts)))
    qkv, positions = bench.random(len(contexts), _width(attention)), bench.ints(contexts) - 1
    step = inputs.steps[0]
    rows = torch.arange(len(contexts), device=bench.device)
    blocks = step.block_tables[rows, (positions // size).long()].long()
    step = replace(step, positions=positions, kv_slots=blocks * size + positions % size)
    paged = PagedAttention(
        {shape: [None]}, len(contexts), len(contexts), bench.num_sms, bench.device, bench.dtype
    )
    paged.plan(step)
    layer = LayerContext(inputs.keys, inputs.values, None)
    call = partial(paged.rotated, qkv, rotation, layer, step, inputs.out)

    def error() -> float:
        query, *stored = _parts(qkv, attention, rotation, positions)
        inputs.queries[0].copy_(query)
        expected = [pages.clone() for pages in (inputs.keys, inputs.values)]
        for pages, x in zip(expected, stored, strict=True):
            store(pages, step.kv_slots, x.to(bench.dtype))
        inputs.out.fill_(float("nan"))
        call()
        pairs = zip((inputs.keys, inputs.values), expected, strict=True)
        errors = [relative_error(out, wanted) for out, wanted in pairs]
        return max(*errors, relative_error(inputs.out, inputs.reference()))

    return Case(
        kernel="decode attention that stores",
        at={"model": _MODEL, "batch": len(contexts), "context": f"1 to {max(contexts)}"},
        calls=[call],
        error=error,
        num_bytes=size_of(inputs.keys, inputs.values),
    )


def _pages(bench: Bench, pool: tuple[int, ...], codes: torch.dtype | None) -> KVPages:
    pages = bench.random(*pool)
    if codes is None:
        return pages
    written, scales = encode(pages, codes)
    return Codes(written, scales.transpose(1, 2).contiguous())


def _copy(pages: KVPages, to: KVPages) -> None:
    if isinstance(pages, Tensor) or isinstance(to, Tensor):
        assert isinstance(pages, Tensor) and isinstance(to, Tensor)
        to.copy_(pages)
        return
    to.codes.copy_(pages.codes)
    to.scales.copy_(pages.scales)


def _plain(pages: KVPages) -> Tensor:
    if isinstance(pages, Tensor):
        return pages
    return decode(pages.codes, pages.scales.transpose(1, 2))
