"""FP8 by FP8 on the matrix units: in Triton's interpreter and torch on a CPU, or on a GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.kernels.codes.scaled import scaled_linear, takes
from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.memory.pool.kv_codes import decode, encode
from penstock.engine.models.layers.coded import CodedLinear
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.fused_linear import fused_linear
from penstock.engine.models.layers.grouped import GroupedLinear
from tests.support.kernels import DEVICE, error, poisoned, random

ROWS, COLUMNS, OUTPUTS = 20, 300, 64


def fp8(block: tuple[int, int], outputs: int = OUTPUTS) -> CodedWeight:
    codes = (100 * random(outputs, COLUMNS)).clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = [-(-size // step) for size, step in zip(codes.shape, block, strict=True)]
    linear = Fp8Linear(codes, random(*grid, seed=1).abs() / 100 + 0.001, None, block=block)
    weight = linear.coded_weight(DEVICE)
    assert weight is not None
    return weight


def numbers(weight: CodedWeight) -> Tensor:
    out = poisoned(weight.out_features, weight.columns)
    CodedLinear(weight, None).write_weight(out)
    return out


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rows_are_rounded_to_fp8_with_a_scale_each(size: float) -> None:
    weight = fp8((1, COLUMNS))
    sizes = torch.logspace(-2, 2, ROWS, device=DEVICE).unsqueeze(1) * size
    x = (random(ROWS, COLUMNS) * sizes).bfloat16()
    rounded = decode(*encode(x, torch.float8_e4m3fn))
    bias = (size * random(OUTPUTS, seed=2)).bfloat16()
    expected = rounded @ numbers(weight).T + bias.float()
    assert error(scaled_linear(x, weight, bias), expected) < 0.01


def test_a_row_has_the_same_bits_alone_and_in_company() -> None:
    weight, x = fp8((1, COLUMNS)), random(ROWS, COLUMNS, dtype=torch.bfloat16)
    together = scaled_linear(x, weight)
    assert torch.equal(scaled_linear(x[3:4], weight), together[3:4])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_makes_no_other_so(bad: float) -> None:
    weight, x = fp8((1, COLUMNS)), random(ROWS, COLUMNS, dtype=torch.bfloat16)
    x[5, 7] = bad
    out = scaled_linear(x, weight)
    assert out.isnan().all(dim=1).nonzero().flatten().tolist() == [5]
    assert bool(torch.cat((out[:5], out[6:])).isfinite().all())


def test_a_row_of_zeros_is_zero() -> None:
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(scaled_linear(x, fp8((1, COLUMNS))), x.new_zeros(ROWS, OUTPUTS))


def test_many_rows_of_a_layer_with_a_scale_by_row_are_computed_so() -> None:
    weight, x = fp8((1, COLUMNS)), random(ROWS, COLUMNS, dtype=torch.bfloat16)
    layer = fused_linear(CodedLinear(weight, None))
    assert torch.equal(layer.many(x), scaled_linear(x, weight))
    out = poisoned(ROWS, OUTPUTS, dtype=torch.bfloat16)
    assert torch.equal(layer.many(x, out), out) and torch.equal(out, scaled_linear(x, weight))


def test_other_formats_types_and_sizes_are_not() -> None:
    assert takes(fp8((1, COLUMNS)), torch.bfloat16)
    assert not takes(fp8((1, COLUMNS)), torch.float16)  # torch has no such product
    assert not takes(fp8((32, 64)), torch.bfloat16)
    assert not takes(fp8((1, COLUMNS), outputs=70), torch.bfloat16)


def test_four_bits_with_one_scale_for_a_row_are_no_fp8() -> None:
    codes = torch.zeros(OUTPUTS, 64, dtype=torch.uint8, device=DEVICE)
    linear = GroupedLinear(codes, random(OUTPUTS, 1), None, group_size=128, in_features=128)
    weight = linear.coded_weight(DEVICE)
    assert weight and weight.codes.dtype is torch.uint8 and len(weight.scales) == 1
    assert not takes(weight, torch.bfloat16)
