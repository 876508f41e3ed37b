"""Products of each head's numbers with a matrix of its own."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.linear import MAX_ROWS
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2

# Of few rows and of many: rows and outputs of a program, bytes of each row that it reads at a time,
# and warps. With few, programs are many, so that all of the device reads the matrices.
_FEW, _MANY = (16, 32, 256, 4), (64, 64, 128, 4)


def head_products(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    factors: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:
    """out = x W^T of each head, times the factor of the token's position, where there are factors.

    x: (T, heads, columns). weight: (heads, rows, columns). out: (T, heads, rows). All may be views,
    of which x and out are contiguous in the last dimension. Sums are float32.
    """
    (num_tokens, num_heads, columns), rows = x.shape, out.shape[2]
    assert x.stride(2) == out.stride(2) == 1, (x.stride(), out.stride())
    size, outputs, chunk, warps = _FEW if num_tokens <= MAX_ROWS else _MANY
    columns_at_once = max(16, min(chunk // x.element_size(), next_power_of_2(columns)))
    _head_products[(ceil_div(num_tokens, size), ceil_div(rows, outputs), num_heads)](
        x, weight, factors, positions, out, num_tokens, rows, columns, *x.stride()[:2],
        *weight.stride(), *out.stride()[:2], ROWS=size, OUTPUTS=outputs, CHUNK=columns_at_once,
        num_warps=warps, num_stages=3, **overlapped(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions"])
def _head_products(
    x, weight, factors, positions, out, num_tokens, num_outputs, columns, x_token, x_head,
    weight_head, weight_row, weight_column, out_token, out_head,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    head = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token = token < num_tokens
    is_output = output < num_outputs
    source = x + head * x_head + token[:, None] * x_token
    matrix = weight + head * weight_head + output[None, :].to(tl.int64) * weight_row
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        is_column = column < columns
        a = tl.load(
            source + column[None, :], mask=is_token[:, None] & is_column[None, :], other=0.0
        )
        place = matrix + column[:, None].to(tl.int64) * weight_column
        w = tl.load(place, mask=is_column[:, None] & is_output[None, :], other=0.0)
        total = tl.dot(a, w, total, input_precision="ieee")
    if factors is not None:
        position = tl.load(positions + token, mask=is_token, other=0)
        total *= tl.load(factors + position, mask=is_token, other=0.0)[:, None]
    target = out + head * out_head + token[:, None] * out_token + output[None, :]
    mask = is_token[:, None] & is_output[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)
