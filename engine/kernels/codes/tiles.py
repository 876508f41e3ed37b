"""Linear layers for 17 to some hundreds of rows whose weights are codes: on the matrix units.

The codes of a tile become weights of the model's type in registers, where Hopper's matrix units
take them, once for all of up to 256 rows. A layer whose tiles are too few to occupy every
multiprocessor is split along its columns, and a second kernel adds the parts up, always in the same
order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.codes.numbers import scaled_numbers
from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.linear import add_up
from penstock.engine.kernels.sizes import NUM_SMS, ceil_div, next_power_of_2

# Hopper's matrix units multiply so many outputs at once for each four warps.
_OUTPUTS = 64
# Rows of a tile; a kernel is compiled for each number.
TILE_ROWS = (32, 64, 128, 256)
# Columns of a stage: with fewer, waiting for the matrix units takes as long as they do.
_COLUMNS = 128
_MAX_SPLITS = 8


class _Tile(NamedTuple):
    rows: int
    outputs: int
    columns: int
    stages: int
    warps: int


def _tile(num_rows: int) -> _Tile:
    rows = next((rows for rows in TILE_ROWS if rows >= num_rows), TILE_ROWS[-1])
    if rows <= 64:
        return _Tile(rows, _OUTPUTS, _COLUMNS, stages=3, warps=4)
    # Two groups of warps, one of which makes weights of codes while the other multiplies.
    return _Tile(rows, 2 * _OUTPUTS, _COLUMNS if rows < 256 else 64, stages=3, warps=8)


def _num_splits(programs: int, rounds: int) -> int:
    """Two programs for each multiprocessor, where there are columns enough."""
    wanted = 2 * NUM_SMS // max(1, programs)
    splits = 1
    while 2 * splits <= min(wanted, _MAX_SPLITS, rounds // 4):
        splits *= 2
    return splits


def tiled_linear(x: Tensor, weight: CodedWeight, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x W^T + bias. x: (T, columns). out: (T, outputs), or columns of a wider tensor.

    Sums are float32; weights are rounded to the type of x.
    """
    num_rows, columns = x.shape
    outputs = out.shape[1]
    assert columns == weight.columns, (x.shape, weight.columns)
    tile = _tile(num_rows)
    row_bytes = weight.codes.shape[1]
    size = min(tile.columns * weight.bits // 8, next_power_of_2(row_bytes))
    rounds = ceil_div(row_bytes, size)
    tiles = ceil_div(outputs, tile.outputs), ceil_div(num_rows, tile.rows)
    splits = _num_splits(tiles[0] * tiles[1], rounds)
    parts = None
    if splits > 1:
        parts = torch.empty(num_rows, splits, outputs, dtype=torch.float32, device=x.device)
    target = out if parts is None else parts
    _tiled[(*tiles, splits)](
        x, weight.codes, weight.scales, weight.zeros, bias if parts is None else None, target,
        num_rows, columns, outputs, row_bytes, weight.scales.shape[1], target.stride(0),
        ceil_div(rounds, splits) * size,
        # One scale for all columns of an output is exact after the sum, and costs less.
        **weight.constants, IS_ONE_GROUP=weight.group_size >= columns, ROWS=tile.rows,
        OUTPUTS=tile.outputs, SIZE=size, STAGES=tile.stages, num_warps=tile.warps, **overlapped(),
    )  # fmt: skip
    if parts is not None:
        add_up(parts, out, bias)


@triton.jit(do_not_specialize=["num_rows"])
def _tiled(
    x, codes, scales, zeros, bias, out, num_rows, columns, outputs, row_bytes, scale_stride,
    out_stride, split_bytes,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, LEVELS: tl.constexpr, RUN: tl.constexpr,
    IS_ONE_GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of ROWS rows, of split_bytes of each row's codes."""
    wait_for_kernels_before(PDL)
    kind: tl.constexpr = x.dtype.element_ty
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_output = output < outputs
    is_row = (row < num_rows)[None, :]
    codes_row = codes + output.to(tl.int64)[:, None] * row_bytes
    x_row = x + row.to(tl.int64)[None, :] * columns
    inside = tl.arange(0, SIZE)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    first = tl.program_id(2) * split_bytes
    end = tl.minimum(first + split_bytes, row_bytes)
    for start in tl.range(first, end, SIZE, num_stages=STAGES):
        byte = start + inside
        mask = is_output[:, None] & (byte < end)[None, :]
        w = tl.load(codes_row + byte[None, :], mask=mask, other=0)
        low, high = scaled_numbers(
            w, start, scales, zeros, scale_stride, columns, output, is_output, kind,
            not IS_ONE_GROUP, BITS, GROUP_SIZE, LEVELS, RUN,
        )  # fmt: skip
        if BITS == 8:
            a = tl.load(x_row + byte[:, None], mask=is_row & (byte < columns)[:, None], other=0.0)
            acc = tl.dot(low, a, acc, input_precision="ieee")
        else:
            column = byte // RUN * (2 * RUN) + byte % RUN
            mask = is_row & (column < columns)[:, None]
            a = tl.load(x_row + column[:, None], mask=mask, other=0.0)
            mask = is_row & (column + RUN < columns)[:, None]
            b = tl.load(x_row + column[:, None] + RUN, mask=mask, other=0.0)
            acc = tl.dot(low, a, acc, input_precision="ieee")
            acc = tl.dot(high, b, acc, input_precision="ieee")
    if IS_ONE_GROUP:
        acc *= tl.load(scales + output, mask=is_output, other=0.0)[:, None]
    if bias is not None:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    part = out + tl.program_id(2) * outputs
    target = row[None, :].to(tl.int64) * out_stride + output[:, None]
    tl.store(part + target, acc.to(out.dtype.element_ty), mask=is_output[:, None] & is_row)
