"""`skinny_linear` compared with torch's product (cuBLAS), at the shapes of a model's layers.

Both do the bare product of the same inputs; the further work of `skinny_linear` in a layer
(norm, gate, residual) is checked and timed once for each shape, under its own name.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.kernels.linear import MAX_ROWS, Scaled, skinny_linear
from penstock.engine.models.config import ModelConfig
from tests.bench.engine.case import Bench, Case, MakeCase, size_of
from tests.bench.engine.models import model_config
from tests.bench.engine.timing import relative_error

_MODELS = ("Llama-3.1-8B", "Qwen3-0.6B")
_ROWS, _CHECKED_ROWS, _TINY_ROWS = (1, 2, 4, 8, 16, 32), (1, 4, 16), (2, 32)
_EPS = 1e-5


def linear(bench: Bench) -> Iterator[MakeCase]:
    for model in bench.pick(_MODELS, _MODELS[:1], _MODELS[:1]):
        for name, (outputs, columns) in layer_shapes(model_config(model, bench.tiny)).items():
            for rows in bench.pick(_ROWS, _CHECKED_ROWS, _TINY_ROWS):
                at: dict[str, object] = {"model": model, "layer": name, "rows": rows}
                yield partial(_product, bench, at, rows, outputs, columns)
            at = {"model": model, "layer": name, "rows": 1}
            yield partial(_fused, bench, at, name, columns, outputs)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, columns) of each matrix of a layer as it is stacked, and of the output layer."""
    linears = {
        name: spec.shape for part in config.layers[0].parts for name, spec in part.linears.items()
    }
    return {**linears, "lm_head": (config.vocab_size, config.hidden_size)}


def _product(bench: Bench, at: dict[str, object], rows: int, outputs: int, columns: int) -> Case:
    """With more rows than `skinny_linear` takes, torch's product alone, for the picture."""
    sets = bench.sets(outputs * columns * bench.dtype.itemsize)
    inputs = [(bench.random(rows, columns), _weight(bench, outputs, columns)) for _ in range(sets)]
    x, weight = inputs[0]
    out = bench.poisoned(rows, outputs)
    is_ours = rows <= MAX_ROWS
    by_torch = [partial(torch.mm, a, w.T, out=out) for a, w in inputs]
    ours = [partial(skinny_linear, a, w, out) for a, w in inputs]

    def error() -> float:
        out.fill_(float("nan"))
        (ours if is_ours else by_torch)[0]()
        return relative_error(out, x.double() @ weight.double().T)

    return Case(
        kernel="skinny_linear" if is_ours else "torch.mm",
        at=at,
        calls=ours if is_ours else by_torch,
        error=error,
        num_bytes=size_of(x, weight, out),
        flops=2 * rows * outputs * columns,
        rivals={"torch": by_torch} if is_ours else {},
    )


def _fused(bench: Bench, at: dict[str, object], layer: str, columns: int, outputs: int) -> Case:
    """One row, as in a decode layer: with the norm before it, or the residual after it."""
    sets = bench.sets(outputs * columns * bench.dtype.itemsize)
    weights = [_weight(bench, outputs, columns) for _ in range(sets)]
    x, norm = bench.random(1, columns), bench.random(columns)
    is_gated, is_normed = layer == "gate_up", layer in ("qkv", "gate_up", "lm_head")
    num_out = outputs // 2 if is_gated else outputs
    residual = bench.random(1, num_out)
    out = bench.poisoned(1, num_out)
    scaled = Scaled(x * norm, x.float().square().sum(1, keepdim=True))

    def run(weight: Tensor) -> None:
        if is_normed:
            skinny_linear(scaled, weight, out, eps=_EPS, is_gated=is_gated)
        else:
            skinny_linear(x, weight, out, residual=residual)

    def error() -> float:
        out.fill_(float("nan"))
        run(weights[0])
        wide = x.double()
        if is_normed:
            wide = functional.rms_norm(wide, (columns,), norm.double(), _EPS)
        reference = wide @ weights[0].double().T
        if is_gated:
            gate, up = reference.chunk(2, -1)
            reference = functional.silu(gate) * up
        return relative_error(out, reference if is_normed else reference + residual.double())

    return Case(
        kernel="skinny_linear with norm, gate or residual",
        at=at,
        calls=[partial(run, weight) for weight in weights],
        error=error,
        num_bytes=size_of(x, weights[0], out) + size_of(norm if is_normed else residual),
        flops=2 * outputs * columns,
    )


def _weight(bench: Bench, outputs: int, columns: int) -> Tensor:
    return bench.random(outputs, columns).mul_(columns**-0.5)
