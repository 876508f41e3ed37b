"""The inputs that each layer of Gemma 4 E2B and E4B has of its own.

`penstock.engine.models.parts.per_layer_inputs.layer` computes the same; every operator there
rounds to the type of the states, and so do these kernels.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.activation import gelu
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2

_BLOCK = 1024


def add_table_rows(
    projected: Tensor, token_ids: Tensor, table: Tensor, norm: Tensor, eps: float, scale: float
) -> None:
    """projected = (norm(projected * scale) + row * sqrt(size)) / sqrt(2), in place.

    projected: (T, num_layers, size), of the tokens' embeddings. table: (vocab_size, num_layers *
    size), of which each token has a row, in whatever type. norm: (size,), of an RMSNorm.
    """
    num_tokens, num_layers, size = projected.shape
    _add_table_rows[(num_tokens, num_layers)](
        projected, token_ids, table, norm, eps, scale, math.sqrt(size), math.sqrt(0.5), num_layers,
        size, SIZE=next_power_of_2(size), num_warps=1, **overlapped(),
    )  # fmt: skip


def gate_input(gate: Tensor, inputs: Tensor, layer: int) -> None:
    """gate = gelu(gate) * inputs[:, layer], in place: (T, size). inputs: (T, num_layers, size)."""
    num_tokens, num_layers, size = inputs.shape
    grid = (num_tokens, ceil_div(size, _BLOCK))
    _gate_input[grid](
        gate, inputs, layer, num_layers, size, BLOCK=min(_BLOCK, next_power_of_2(size)),
        num_warps=1, **overlapped(),
    )  # fmt: skip


@triton.jit
def _add_table_rows(
    projected, token_ids, table, norm, eps, scale, factor, share, num_layers, size,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, SIZE)
    mask = column < size
    kind = projected.dtype.element_ty
    place = projected + (token * num_layers + layer) * size + column
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    x = (x * scale).to(kind).to(tl.float32)
    weight = tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x) / size + eps) * weight).to(kind).to(tl.float32)
    token_id = tl.load(token_ids + token).to(tl.int64)
    row = table + (token_id * num_layers + layer) * size
    added = tl.load(row + column, mask=mask, other=0.0).to(kind).to(tl.float32)
    added = (added * factor).to(kind).to(tl.float32)
    total = (x + added).to(kind).to(tl.float32)
    tl.store(place, (total * share).to(kind), mask=mask)


@triton.jit(do_not_specialize=["layer"])
def _gate_input(gate, inputs, layer, num_layers, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    kind = gate.dtype.element_ty
    place = gate + token * size + column
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    source = inputs + (token * num_layers + layer) * size
    own = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (gelu(x).to(kind).to(tl.float32) * own).to(kind), mask=mask)
