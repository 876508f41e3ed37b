"""The recurrence of prefill chunks, tile by tile of tokens, on the matrix units.

Of a tile whose first state is S, with keys k, G_i the sum of the logarithms of decay up to token i,
and beta, what the tokens add to the state is u with

    (I + A) u = beta (v - exp(G) k S),  A_ij = beta_i exp(G_i - G_j) k_i k_j  for j < i, else 0

so that o = exp(G) q S + P u, where P_ij = exp(G_i - G_j) q_i k_j for j <= i, and the next tile
begins with exp(G_last) S + sum_i exp(G_last - G_i) k_i (x) u_i. The inverse of I + A depends on no
state: it is computed for all tiles at once, and only the rest is done tile after tile.

Products have operands of the model's type, and sums in float32; a state is kept in float32, and
rounded where it is read. So a sequence's state depends on how its tokens are divided into tiles by
such rounding alone. Source: Yang et al. 2024 (arXiv:2406.06484, and 2412.06464 with the decay).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.memory.pool.state_shape import StateShape
from penstock.engine.models.parts.delta_net.kernels.shape import (
    Gates,
    gated,
    gates_of,
    sizes,
    tile_programs,
)
from penstock.engine.step.device_step import DeviceStep

# A tile has so many. With twice as many, which Hopper's wide products would take, registers
# spill.
TILE_TOKENS = 32
# Columns of a state that one program keeps in registers.
_COLUMNS = 32


def recur_chunks(
    shape: StateShape,
    projected: Tensor,
    mixed: Tensor,
    gates: Gates,
    norm: Tensor,
    eps: float,
    step: DeviceStep,
    matrices: Tensor,
    out: Tensor,
) -> None:
    """As `recur_decodes`, of the step's chunks; also writes the snapshots on their way."""
    if (tiles := step.state_tiles) is None:
        return
    tables, constants = step.block_tables, sizes(shape)
    size, heads, programs = tiles.most_tokens, shape.num_heads, tile_programs(step)
    # Without matrix units float32 is multiplied exactly; its products then need no other type.
    is_exact = mixed.dtype is torch.float32
    inverses = mixed.new_empty(len(tiles.tiles), heads, size, size)
    values = constants.pop("VALUES")
    _invert_tiles[(programs, heads)](
        mixed, *gates, *tiles.lists, inverses,
        **constants, TILE=size, LEVELS=size.bit_length() - 1, IS_EXACT=is_exact, num_warps=4,
        **overlapped(),
    )  # fmt: skip
    columns = min(_COLUMNS, values)
    num_chunks = min(len(tiles.chunks), programs)
    _scan_chunks[(num_chunks, heads, values // columns)](
        mixed, *gates, tables, step.slots, step.positions, *tiles.lists, inverses, matrices, out,
        tables.stride(0),
        **constants, TILE=size, COLUMNS=columns, IS_EXACT=is_exact, num_warps=4, num_stages=2,
        **overlapped(),
    )  # fmt: skip
    _gate_tiles[(programs, heads)](
        projected, norm, *tiles.lists, out, eps,
        **{name: constants[name] for name in ("KEY_HEADS", "VALUE_HEADS", "KEY_DIM", "VALUE_DIM")},
        VALUES=values, TILE=size, num_warps=4, **overlapped(),
    )  # fmt: skip


@triton.jit
def _dot(a, b, IS_EXACT: tl.constexpr):
    """In float32, of operands of the model's type."""
    if IS_EXACT:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _inverse(below, row, column, LEVELS: tl.constexpr, IS_EXACT: tl.constexpr):
    """The inverse of I plus a matrix of which only what is below the diagonal is read.

    From inverses of the blocks on the diagonal, of 1 row at first, come those of twice the size:
    the inverse of [[a, 0], [c, b]] is [[1/a, 0], [-1/b c 1/a, 1/b]], and the lower left of all
    blocks is a product of whole matrices. Powers of A, which would need as few products, grow far
    beyond the inverse where keys repeat themselves, and cancel each other badly.
    """
    PRECISION: tl.constexpr = "ieee" if IS_EXACT else "tf32x3"
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(
        (row % 2 == 1) & (column == row - 1), below, 0.0
    )
    for level in range(1, LEVELS):  # of blocks of 2 ** level rows
        block = row >> level
        part = tl.where((block % 2 == 1) & (column >> level == block - 1), below, 0.0)
        part = tl.dot(inverse, part, input_precision=PRECISION)
        inverse -= tl.dot(part, inverse, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize_on_alignment=["counts", "chunks", "tiles"])
def _invert_tiles(
    mixed, gates, decay, bias, counts, chunks, tiles, inverses,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
    IS_EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The inverse of I + A, of tiles and one value head."""
    wait_for_kernels_before(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(1)
    i = tl.arange(0, TILE)
    key = tl.arange(0, KEYS)
    row = i[:, None]
    column = i[None, :]
    for tile in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        token = tl.load(tiles + tile * 4) + i
        is_token = token < tl.load(tiles + tile * 4 + 1)
        first = mixed + KEY_HEADS * KEY_DIM + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        k = tl.load(
            first + token.to(tl.int64)[:, None] * CHANNELS + key[None, :],
            mask=is_token[:, None] & (key < KEY_DIM)[None, :],
            other=0.0,
        )
        g, beta = gates_of(gates, decay, bias, token, head, is_token, VALUE_HEADS)
        sums = tl.cumsum(g, 0)
        # Above the diagonal it might be infinite.
        decayed = tl.exp(tl.where(column < row, sums[:, None] - sums[None, :], float("-inf")))
        below = _dot(k, tl.trans(k), IS_EXACT) * decayed * beta[:, None]
        inverse = _inverse(below, row, column, LEVELS, IS_EXACT)
        target = inverses + (tile * VALUE_HEADS + head.to(tl.int64)) * (TILE * TILE)
        tl.store(target + row * TILE + column, inverse.to(inverses.dtype.element_ty))


@triton.jit
def _scanned(q, k, v, inverse, matrix, g, beta, i, kind: tl.constexpr, IS_EXACT: tl.constexpr):
    """A tile's o, and its head's state after it. matrix: the state before it. i: the tokens."""
    sums = tl.cumsum(g, 0)
    last = tl.sum(g, 0)
    rounded = matrix.to(kind)
    grown = tl.exp(sums)[:, None]
    known = _dot(k, rounded, IS_EXACT) * grown
    added = (v.to(tl.float32) - known) * beta[:, None]
    added = _dot(inverse, added.to(kind), IS_EXACT)
    is_before = i[None, :] <= i[:, None]
    decayed = tl.exp(tl.where(is_before, sums[:, None] - sums[None, :], float("-inf")))
    weights = _dot(q, tl.trans(k), IS_EXACT) * decayed
    o = _dot(q, rounded, IS_EXACT) * grown + _dot(weights.to(kind), added.to(kind), IS_EXACT)
    added *= tl.exp(last - sums)[:, None]
    return o, matrix * tl.exp(last) + _dot(tl.trans(k), added.to(kind), IS_EXACT)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["slots", "positions", "counts", "chunks", "tiles"],
)
def _scan_chunks(
    mixed, gates, decay, bias, tables, slots, positions, counts, chunks, tiles, inverses, matrices,
    out, table_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    IS_EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chunks, one value head, some columns of its state. Writes o, before norm and gate."""
    wait_for_kernels_before(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    kind: tl.constexpr = mixed.dtype.element_ty
    head = tl.program_id(1)
    i = tl.arange(0, TILE)
    key = tl.arange(0, KEYS)
    value = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key = key < KEY_DIM
    is_value = value < VALUE_DIM
    is_there = is_key[:, None] & is_value[None, :]
    place = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    STATE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    for index in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        chunk = chunks + index * 4
        slot = tl.load(slots + tl.load(chunk)).to(tl.int64)
        own = matrices + tl.load(tables + slot * table_stride).to(tl.int64) * STATE
        # A sequence begins with zeros.
        num_keys = tl.where(tl.load(positions + tl.load(chunk + 1)) == 0, 0, KEY_DIM)
        matrix = tl.load(own + place, mask=is_there & (key < num_keys)[:, None], other=0.0)
        for tile in range(tl.load(chunk + 2), tl.load(chunk + 3)):
            token = tl.load(tiles + tile * 4) + i
            is_token = token < tl.load(tiles + tile * 4 + 1)
            source = mixed + token.to(tl.int64)[:, None] * CHANNELS
            query = source + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key[None, :]
            mask = is_token[:, None] & is_key[None, :]
            q = tl.load(query, mask=mask, other=0.0)
            k = tl.load(query + KEY_HEADS * KEY_DIM, mask=mask, other=0.0)
            first_value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
            mask = is_token[:, None] & is_value[None, :]
            v = tl.load(source + first_value + value[None, :], mask=mask, other=0.0)
            square = inverses + (tile * VALUE_HEADS + head.to(tl.int64)) * (TILE * TILE)
            inverse = tl.load(square + i[:, None] * TILE + i[None, :])
            g, beta = gates_of(gates, decay, bias, token, head, is_token, VALUE_HEADS)
            o, matrix = _scanned(q, k, v, inverse, matrix, g, beta, i, kind, IS_EXACT)
            target = out + token.to(tl.int64)[:, None] * (VALUE_HEADS * VALUE_DIM)
            target = target + head * VALUE_DIM + value[None, :]
            tl.store(target, o.to(out.dtype.element_ty), mask=mask)
            snapshot = tl.load(tiles + tile * 4 + 3).to(tl.int64)
            if snapshot >= 0:
                tl.store(matrices + snapshot * STATE + place, matrix, mask=is_there)
        tl.store(own + place, matrix, mask=is_there)


@triton.jit(do_not_specialize_on_alignment=["counts", "chunks", "tiles"])
def _gate_tiles(
    projected, norm, counts, chunks, tiles, out, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The norm and the gate of tiles and one value head, in place."""
    wait_for_kernels_before(PDL)
    ALL: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + ALL
    head = tl.program_id(1)
    i = tl.arange(0, TILE)
    j = tl.arange(0, VALUES)
    is_value = (j < VALUE_DIM)[None, :]
    weight = tl.load(norm + j, mask=j < VALUE_DIM, other=0.0)[None, :]
    for tile in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        token = tl.load(tiles + tile * 4) + i
        mask = (token < tl.load(tiles + tile * 4 + 1))[:, None] & is_value
        row = token.to(tl.int64)[:, None]
        place = head * VALUE_DIM + j[None, :]
        o = tl.load(out + row * ALL + place, mask=mask, other=0.0).to(tl.float32)
        gate = projected + row * (CHANNELS + ALL) + CHANNELS + place
        z = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
        o = gated((tl.sum(o * o, 1) / VALUE_DIM)[:, None], o, weight, z, eps)
        tl.store(out + row * ALL + place, o.to(out.dtype.element_ty), mask=mask)
