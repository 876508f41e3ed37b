"""The kernels between the products: norms, rotary positions, SiLU, the embedding's gather."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.kernels.activation import silu_mul
from penstock.engine.kernels.norm import add_rms_norm, embed, rms_norm
from penstock.engine.kernels.rope import rotate_and_store
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.parts.attention.config import Attention, HeadNorms
from penstock.engine.models.parts.attention.rotary import rotary_table, rotate
from penstock.engine.step.device_step import Rotation
from tests.bench.engine.case import Bench, Case, MakeCase, size_of
from tests.bench.engine.models import model_config
from tests.bench.engine.timing import relative_error

_MODELS = ("Llama-3.1-8B", "Qwen3-0.6B")
_TOKENS, _CHECKED_TOKENS, _TINY_TOKENS = (1, 32, 256, 8192), (17,), (3,)
_EPS = 1e-5


def small(bench: Bench) -> Iterator[MakeCase]:
    for model in _MODELS[-1:] if bench.tiny else _MODELS:
        config = model_config(model, bench.tiny)
        for tokens in bench.pick(_TOKENS, _CHECKED_TOKENS, _TINY_TOKENS):
            at: dict[str, object] = {"model": model, "tokens": tokens}
            for make in (_add_rms_norm, _rms_norm, _silu_mul, _rotate_and_store, _embed):
                yield partial(make, bench, config, tokens, at)


def _add_rms_norm(bench: Bench, config: ModelConfig, tokens: int, at: dict[str, object]) -> Case:
    hidden = config.hidden_size
    weight, normed = bench.random(hidden), bench.poisoned(tokens, hidden)
    sets = bench.sets(3 * normed.nbytes)
    inputs = [(bench.random(tokens, hidden), bench.random(tokens, hidden)) for _ in range(sets)]

    def error() -> float:
        x, residual = inputs[0][0], inputs[0][1].clone()
        total = residual + x
        normed.fill_(float("nan"))
        add_rms_norm(x, residual, weight, _EPS, normed)
        expected = functional.rms_norm(total.double(), (hidden,), weight.double(), _EPS)
        return max(relative_error(normed, expected), relative_error(residual, total))

    return Case(
        kernel="add_rms_norm",
        at=at,
        calls=[partial(add_rms_norm, x, r, weight, _EPS, normed) for x, r in inputs],
        error=error,
        num_bytes=4 * normed.nbytes + weight.nbytes,
    )


def _rms_norm(bench: Bench, config: ModelConfig, tokens: int, at: dict[str, object]) -> Case:
    hidden = config.hidden_size
    weight, normed = bench.random(hidden), bench.poisoned(tokens, hidden)
    inputs = [bench.random(tokens, hidden) for _ in range(bench.sets(2 * normed.nbytes))]

    def error() -> float:
        normed.fill_(float("nan"))
        rms_norm(inputs[0], weight, _EPS, normed)
        wide = inputs[0].double()
        return relative_error(normed, functional.rms_norm(wide, (hidden,), weight.double(), _EPS))

    return Case(
        kernel="rms_norm",
        at=at,
        calls=[partial(rms_norm, x, weight, _EPS, normed) for x in inputs],
        error=error,
        num_bytes=2 * normed.nbytes + weight.nbytes,
    )


def mlp_of(config: ModelConfig) -> int:
    mlp = config.layers[0].mlp
    assert mlp is not None
    return mlp.size


def _silu_mul(bench: Bench, config: ModelConfig, tokens: int, at: dict[str, object]) -> Case:
    mlp = mlp_of(config)
    out = bench.poisoned(tokens, mlp)
    inputs = [bench.random(tokens, 2 * mlp) for _ in range(bench.sets(3 * out.nbytes))]

    def error() -> float:
        out.fill_(float("nan"))
        silu_mul(inputs[0], out)
        gate, up = inputs[0].double().chunk(2, -1)
        return relative_error(out, functional.silu(gate) * up)

    return Case(
        kernel="silu_mul",
        at=at,
        calls=[partial(silu_mul, gate_up, out) for gate_up in inputs],
        error=error,
        num_bytes=3 * out.nbytes,
    )


def _embed(bench: Bench, config: ModelConfig, tokens: int, at: dict[str, object]) -> Case:
    embedding = bench.random(config.vocab_size, config.hidden_size)
    out = bench.poisoned(tokens, config.hidden_size)
    count = bench.sets(2 * out.nbytes)
    ids = torch.randint(config.vocab_size, (count, tokens), device=bench.device).int()

    def error() -> float:
        out.fill_(float("nan"))
        embed(ids[0], embedding, out)
        return relative_error(out, embedding[ids[0].long()])

    return Case(
        kernel="embed",
        at=at,
        calls=[partial(embed, row, embedding, out) for row in ids],
        error=error,
        num_bytes=2 * out.nbytes + ids[0].nbytes,
    )


def _rotate_and_store(
    bench: Bench, config: ModelConfig, tokens: int, at: dict[str, object]
) -> Case:
    attention = config.attentions[0]
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    query = bench.poisoned(tokens, heads, dim)
    pool = (tokens, 1, kv_heads, dim)
    keys, values = bench.poisoned(*pool), bench.poisoned(*pool)
    width = (heads + 2 * kv_heads) * dim
    inputs = [
        bench.random(tokens, width) for _ in range(bench.sets(2 * size_of(query, keys, values)))
    ]
    positions = torch.arange(tokens, dtype=torch.int32, device=bench.device)
    kv_slots = torch.randperm(tokens, device=bench.device)
    assert isinstance(attention, Attention) and attention.rope is not None
    cos, sin = rotary_table(attention.rope, dim, tokens, bench.device)
    query_norm = bench.random(dim) if attention.head_norms is HeadNorms.EACH else None
    key_norm = bench.random(dim) if attention.head_norms is HeadNorms.EACH else None

    rotation = Rotation(cos=cos, sin=sin, query_norm=query_norm, key_norm=key_norm, eps=_EPS)

    def run(qkv: Tensor) -> None:
        rotate_and_store(qkv, rotation, positions, kv_slots, keys, values, query)

    def error() -> float:
        for written in (query, keys, values):
            written.fill_(float("nan"))
        run(inputs[0])
        wide = inputs[0].double().view(tokens, -1, dim)
        q, k, v = torch.split(wide, [heads, kv_heads, kv_heads], 1)
        if query_norm is not None and key_norm is not None:
            q = functional.rms_norm(q, (dim,), query_norm.double(), _EPS)
            k = functional.rms_norm(k, (dim,), key_norm.double(), _EPS)
        q, k = (rotate(part, cos.unsqueeze(1), sin.unsqueeze(1)) for part in (q, k))
        stored = (written.flatten(0, 1)[kv_slots] for written in (keys, values))
        pairs = zip((query, *stored), (q, k, v), strict=True)
        return max(relative_error(out, expected) for out, expected in pairs)

    return Case(
        kernel="rotate_and_store",
        at=at,
        calls=[partial(run, qkv) for qkv in inputs],
        error=error,
        num_bytes=2 * size_of(query, keys, values) + size_of(cos, sin, positions, kv_slots),
    )
