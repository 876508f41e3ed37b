"""Linear layers in torch, for whatever this processor multiplies."""

import pytest
import torch
from torch.nn import functional

from penstock.engine.models.layers.linear import WidenedLinear, cpu_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("num_rows", [1, 7, 24, 25, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layers_of_this_processor_give_the_product_and_its_bias(
    dtype: torch.dtype, num_rows: int
) -> None:
    torch.manual_seed(num_rows)
    weight, bias = torch.randn(48, 64).to(dtype) / 8, torch.randn(48).to(dtype)
    x = torch.randn(num_rows, 64).to(dtype)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    makes = {cpu_linear(dtype, has_experts=has_experts) for has_experts in (False, True)}
    for make in makes | ({WidenedLinear} if dtype is not torch.float32 else set()):
        error = (make(weight, bias)(x).double() - expected).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * expected.abs().max()
