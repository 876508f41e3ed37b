"""What the GPU's fused step computes linear layers with, whatever the format of their weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.formats.kept import OnGpu
from penstock.engine.models.layers.fused_linear import fused_linear
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import Linear, PlainLinear, StackedLinear, StoredLinear
from tests.support.kernels import DEVICE, error, poisoned, random, scaled
from tests.support.weight_formats import NegatedLinear, coded

COLUMNS, OUTPUTS, EPS, TOLERANCE = 80, 64, 1e-5, 1e-5


def weight_of(linear: StoredLinear) -> Tensor:
    weight = poisoned(OUTPUTS, COLUMNS)
    linear.write_weight(weight)
    return weight


def stored(linear: Linear) -> GroupedLinear:
    assert isinstance(linear, GroupedLinear)
    return linear


def held(linear: StoredLinear) -> Linear:
    layer = OnGpu(DEVICE).layer(linear)
    assert layer is not None
    return layer


def int4() -> StoredLinear:
    return stored(coded(4, 32)(random(OUTPUTS, COLUMNS), random(OUTPUTS)))


def stacked() -> StoredLinear:
    """As `--quantization int4` stores queries, keys and values, with a plain part too."""
    weight, bias = random(OUTPUTS, COLUMNS), random(OUTPUTS)
    return StackedLinear(
        [
            stored(coded(4, 32)(weight[:30], bias[:30])),
            stored(coded(8, 32)(weight[30:50], bias[30:50])),
            PlainLinear(weight[50:], bias[50:]),
        ]
    )


@pytest.mark.parametrize("make", [int4, stacked])
def test_few_rows_and_many_are_multiplied_with_what_codes_stand_for(
    make: Callable[[], StoredLinear],
) -> None:
    linear = make()
    weight, bias, product = weight_of(linear), random(OUTPUTS), fused_linear(held(linear))
    assert product.out_features == OUTPUTS
    x, norm, residual = random(3, COLUMNS), random(COLUMNS, seed=1), random(3, OUTPUTS)
    out = residual.clone()
    product.few(x, out, residual=out)
    assert error(out, x @ weight.T + bias + residual) < TOLERANCE
    gated = poisoned(3, OUTPUTS // 2)
    product.few_gated(scaled(x, norm), gated, eps=EPS)
    normed = functional.rms_norm(x, (COLUMNS,), norm, EPS)
    gate, up = (normed @ weight.T + bias).chunk(2, -1)
    assert error(gated, functional.silu(gate) * up) < TOLERANCE
    for num_rows in (20, 520):
        many, given = random(num_rows, COLUMNS), poisoned(600, OUTPUTS)[:num_rows]
        assert error(product.many(many), many @ weight.T + bias) < TOLERANCE
        assert product.many(many, given) is given
        assert error(given, many @ weight.T + bias) < TOLERANCE


def test_a_weight_that_is_larger_than_a_slab_is_dequantized_in_slabs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.engine.models.layers.fused_linear._SLAB_BYTES", 0)
    monkeypatch.setattr("penstock.engine.models.layers.fused_linear._SLAB_ROWS", 25)
    linear = stored(coded(4, 32)(random(OUTPUTS, COLUMNS), None))
    weight, x = weight_of(linear), random(520, COLUMNS)
    assert error(fused_linear(held(linear)).many(x), x @ weight.T) < TOLERANCE


def test_a_part_in_an_unknown_format_is_refused_by_name() -> None:
    weight = torch.ones(4, COLUMNS, device=DEVICE)
    parts: list[Any] = [PlainLinear(weight, None), NegatedLinear(weight, None)]
    with pytest.raises(UnsupportedWeightFormat, match="'negated'"):
        fused_linear(StackedLinear(parts))
