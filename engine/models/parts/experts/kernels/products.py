"""Products of tiles of rows with their experts' weights.

Each row is written to a place of its own, and added up afterwards in the order of its token's
experts: so there are no atomic additions, and a step that is run twice has the same bits.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.activation import gelu, silu
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.linear import add_up
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.kernels.routing import Tiles

# By the rows of a tile: outputs of a program, bytes of each row that it reads at a time, warps, and
# stages. With 64 rows, and as many outputs of gate and up each, a program does 43 operations for a
# byte of the cache, with 128 twice that: the matrix units of an H200 do 144 in the time of one.
# Shapes like these are the fastest of those that vLLM has measured there.
_SHAPES = {16: (32, 256, 4, 3), 32: (64, 128, 4, 3), 64: (64, 128, 4, 3), 128: (128, 128, 8, 4)}


def gate_up(x: Tensor, linear: PlainLinear, tiles: Tiles, experts: Experts, out: Tensor) -> None:
    """out = activation(gate) * up of each row, in the order of the tiles: (T * num_per_token,
    size).

    x: (T, columns). linear: of (experts * 2 * size, columns), of each expert the gate's rows first.
    Sums are float32.
    """
    size, columns = out.shape[1], x.shape[1]
    clamp, is_gelu = experts.activation.clamp, experts.activation.is_gelu
    options = _options(tiles, x)
    _gate_up[(ceil_div(size, options["OUTPUTS"]), len(tiles.experts))](
        x, linear.weight, linear.bias, *tiles[1:], out, columns, size, *(clamp or (0.0, 0.0)),
        EACH=experts.num_per_token, IS_CLAMPED=clamp is not None, IS_GELU=is_gelu, **options,
    )  # fmt: skip


def down(x: Tensor, linear: PlainLinear, tiles: Tiles, weights: Tensor, out: Tensor) -> None:
    """out = the sum of each token's experts' outputs by weight: (T, hidden).

    x: (T * num_per_token, size), in the order of the tiles. linear: of (experts * hidden, size).
    weights: as in `Routes`.
    """
    num_tokens, hidden = out.shape
    each, columns = weights.shape[1], x.shape[1]
    options = _options(tiles, x)
    parts = weights.new_empty(num_tokens, each, hidden)
    _down[(ceil_div(hidden, options["OUTPUTS"]), len(tiles.experts))](
        x, linear.weight, linear.bias, weights, *tiles[1:], parts, columns, hidden, **options
    )  # fmt: skip
    add_up(parts, out)


def _options(tiles: Tiles, x: Tensor) -> dict[str, Any]:
    outputs, chunk, warps, stages = _SHAPES[tiles.rows]
    columns = max(16, min(chunk // x.element_size(), next_power_of_2(x.shape[1])))
    options = {"num_warps": warps, "num_stages": stages, **overlapped()}
    return {"ROWS": tiles.rows, "OUTPUTS": outputs, "CHUNK": columns, **options}


@triton.jit
def _activated(gate, up, alpha, limit, IS_CLAMPED: tl.constexpr, IS_GELU: tl.constexpr):
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        active = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    elif IS_GELU:
        active = gelu(gate) * up
    else:
        active = silu(gate) * up
    return active


@triton.jit
def _gate_up(
    x, weight, bias, order, experts, firsts, counts, out, columns, size, alpha, limit,
    EACH: tl.constexpr, IS_CLAMPED: tl.constexpr, IS_GELU: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    tile = tl.program_id(1)
    count = tl.load(counts + tile)
    expert = tl.load(experts + tile).to(tl.int64)
    place = tl.load(firsts + tile) + tl.arange(0, ROWS)
    if count == 0:
        return
    is_row = tl.arange(0, ROWS) < count
    token = (tl.load(order + place, mask=is_row, other=0) // EACH).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < size
    gate_row = expert * 2 * size + output
    up_row = gate_row + size
    gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        is_column = column < columns
        source = x + token[:, None] * columns + column[None, :]
        a = tl.load(source, mask=is_row[:, None] & is_column[None, :], other=0.0)
        mask = is_output[:, None] & is_column[None, :]
        g = tl.load(weight + gate_row[:, None] * columns + column[None, :], mask=mask, other=0.0)
        u = tl.load(weight + up_row[:, None] * columns + column[None, :], mask=mask, other=0.0)
        gate = tl.dot(a, tl.trans(g), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(u), up, input_precision="ieee")
    if bias is not None:
        gate += tl.load(bias + gate_row, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + up_row, mask=is_output, other=0.0).to(tl.float32)[None, :]
    active = _activated(gate, up, alpha, limit, IS_CLAMPED, IS_GELU)
    target = out + place.to(tl.int64)[:, None] * size + output[None, :]
    tl.store(target, active.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _down(
    x, weight, bias, weights, order, experts, firsts, counts, out, columns, hidden,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    tile = tl.program_id(1)
    count = tl.load(counts + tile)
    expert = tl.load(experts + tile).to(tl.int64)
    place = tl.load(firsts + tile) + tl.arange(0, ROWS)
    if count == 0:
        return
    is_row = tl.arange(0, ROWS) < count
    pair = tl.load(order + place, mask=is_row, other=0)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < hidden
    weight_row = expert * hidden + output
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        is_column = column < columns
        source = x + place.to(tl.int64)[:, None] * columns + column[None, :]
        a = tl.load(source, mask=is_row[:, None] & is_column[None, :], other=0.0)
        source = weight + weight_row[:, None] * columns + column[None, :]
        w = tl.load(source, mask=is_output[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + weight_row, mask=is_output, other=0.0).to(tl.float32)[None, :]
    total *= tl.load(weights + pair, mask=is_row, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * hidden + output[None, :]
    tl.store(target, total, mask=is_row[:, None] & is_output[None, :])
