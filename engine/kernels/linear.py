"""Linear layers for few rows, fused with what surrounds them in a decode layer.

At batch 1 to 16 a matrix product is bound by reading the weight, and every further launch costs as
much as reading 6 MB of weights. So one kernel reads the weight once, far ahead, and also computes
the RMSNorm of its input (a scale per row, applied at the end, except in float16), SiLU(gate) * up,
the bias, and the residual addition.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.activation import silu
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2

# The largest row count it is meant for: twice the smallest that the matrix units take.
MAX_ROWS = 16
_FEW_ROWS = 8


class Tile(NamedTuple):
    """A program's outputs, and the columns that it reads at a time; stages of these in flight."""

    outputs: int
    chunk: int
    stages: int
    warps: int


# With four stages, 24 KiB of the weight are in flight, and 12 or 24 of x. Twice the chunk would
# spill registers if there is a norm. Each warp reads all of the program's weights from shared
# memory, for its part of the rows. Counted from the machine code, a KiB takes 37 to 57 clocks; with
# four warps, 60 to 88. An H200's memory delivers a KiB to a multiprocessor in some 50.
TILE = Tile(outputs=16, chunk=256, stages=4, warps=2)
# Prefetched of a weight to the L2 cache while the previous kernel still runs: what memory delivers
# in the 2 us that one kernel takes to drain and the next to fill, a small part of the cache.
_AHEAD_BYTES = 2**23


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    tile: Tile = TILE,
) -> None:
    """out = x' W^T + bias + residual, where x' is x, or its RMSNorm if `norm` is given.

    x: (T, columns), T at most MAX_ROWS. weight: (outputs, columns). out, residual: (T, outputs);
    they may be the same tensor. is_gated: weight is (2 * outputs, columns), the gate's rows first,
    and out = silu(gate) * up, without a bias or residual. Sums are float32.
    """
    num_rows, columns = x.shape
    outputs = out.shape[1]
    assert num_rows <= MAX_ROWS and not (is_gated and (bias is not None or residual is not None))
    _skinny[(ceil_div(outputs, tile.outputs),)](
        x,
        weight,
        x if norm is None else norm,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        num_rows,
        columns,
        outputs,
        eps,
        _ahead_of_row(weight, columns, tile.chunk),
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        # Before its norm, a row times the norm's weight may exceed what float16 holds.
        NORM_FIRST=norm is not None and x.dtype is torch.float16,
        IS_GATED=is_gated,
        ROWS=_FEW_ROWS if num_rows <= _FEW_ROWS else MAX_ROWS,
        OUTPUTS=tile.outputs,
        CHUNK=max(16, min(tile.chunk, next_power_of_2(columns))),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapped(),
    )


def _ahead_of_row(weight: Tensor, columns: int, chunk: int) -> int:
    """Bytes of each row to prefetch; a multiple of 16, as the instruction requires."""
    row_bytes = columns * weight.element_size()
    if row_bytes % 16:
        return 0
    share = _AHEAD_BYTES // len(weight) // 16 * 16
    return min(row_bytes, max(share, chunk * weight.element_size()))


# One thread in four, so that the rows are spread over the warps.
_FETCH = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.b32 wanted, $2, 0;
    @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, 0;
}""")


@triton.jit
def _fetch_ahead(weight, first, end, columns, ahead, ROWS: tl.constexpr):
    """Prefetches the first bytes of weight rows [first, first + ROWS) below end to L2."""
    thread = tl.arange(0, ROWS * 4)
    row = first + thread // 4
    size = tl.where((thread % 4 == 0) & (row < end), ahead, 0)
    address = (weight + row.to(tl.int64) * columns).to(tl.int64)
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows", "ahead"])
def _skinny(
    x,
    weight,
    norm,
    bias,
    residual,
    out,
    num_rows,
    columns,
    outputs,
    eps,
    ahead,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS outputs of all rows. The weight is the left operand, so its rows fill the matrix
    units."""
    if PDL:
        first = tl.program_id(0) * OUTPUTS
        _fetch_ahead(weight, first, outputs, columns, ahead, OUTPUTS)
        if IS_GATED:
            _fetch_ahead(weight, first + outputs, 2 * outputs, columns, ahead, OUTPUTS)
    wait_for_kernels_before(PDL)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_output = output < outputs
    is_row = row < num_rows
    weight_row = weight + output.to(tl.int64)[:, None] * columns
    up_row = weight + (output + outputs).to(tl.int64)[:, None] * columns
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    acc_up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    inverse = tl.full((ROWS,), 1.0, tl.float32)
    if NORM_FIRST:
        for start in range(0, columns, CHUNK):
            column = start + tl.arange(0, CHUNK)
            part = x + row[:, None] * columns + column[None, :]
            a = tl.load(part, mask=is_row[:, None] & (column < columns)[None, :], other=0.0)
            square += tl.sum(a.to(tl.float32) * a.to(tl.float32), 1)
        inverse = tl.rsqrt(square / columns + eps)
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        is_column = column < columns
        mask = is_output[:, None] & is_column[None, :]
        w = tl.load(weight_row + column[None, :], mask=mask, other=0.0)
        part = x + row[:, None] * columns + column[None, :]
        a = tl.load(part, mask=is_row[:, None] & is_column[None, :], other=0.0)
        if HAS_NORM:
            wide = a.to(tl.float32)
            scale = tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
            if NORM_FIRST:
                wide = wide * inverse[:, None]
            else:
                square += tl.sum(wide * wide, 1)
            a = (wide * scale[None, :]).to(a.dtype)
        a = tl.trans(a)
        acc = tl.dot(w, a, acc, input_precision="ieee")
        if IS_GATED:
            u = tl.load(up_row + column[None, :], mask=mask, other=0.0)
            acc_up = tl.dot(u, a, acc_up, input_precision="ieee")
    if HAS_NORM and not NORM_FIRST:
        scale = tl.rsqrt(square / columns + eps)[None, :]
        acc = acc * scale
        acc_up = acc_up * scale
    kind = out.dtype.element_ty
    mask = is_output[:, None] & is_row[None, :]
    target = row[None, :].to(tl.int64) * outputs + output[:, None]
    if IS_GATED:
        gate = silu(acc.to(x.dtype.element_ty).to(tl.float32))
        up = acc_up.to(x.dtype.element_ty).to(tl.float32)
        acc = gate.to(x.dtype.element_ty).to(tl.float32) * up
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        acc = acc.to(kind).to(tl.float32)
        acc += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, acc.to(kind), mask=mask)
