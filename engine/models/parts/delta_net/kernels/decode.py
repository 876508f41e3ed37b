"""The recurrence of sequences with one token each, as decodes have.

Its cost is to read and write each state once: 64 KiB of a value head of 128 x 128. So a program
holds all of one in registers, which also gives it the whole head for the norm and the gate. What
the state knows of the key and what it gives for the query are read of the decayed state together:
with S' = S + k (x) d, q S' = q S + (q k) d.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.memory.pool.state_shape import StateShape
from penstock.engine.models.parts.delta_net.kernels.shape import Gates, gated, gates_of, sizes
from penstock.engine.step.device_step import DeviceStep


def recur_decodes(
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
    """Writes out (T, values) of the step's decodes: what the layer's output projection reads.

    projected, mixed: of `convolve`. norm: (value_dim,). matrices: one layer's, see `StatePool`;
    those of the sequences are replaced.
    """
    if not step.num_decodes:
        return
    tables, constants = step.block_tables, sizes(shape)
    size = constants["KEYS"] * constants["VALUES"]
    _recur_decodes[(step.num_decodes, shape.num_heads)](
        projected,
        mixed,
        *gates,
        norm,
        tables,
        step.slots,
        step.positions,
        step.lens_of_decodes,
        matrices,
        out,
        eps,
        tables.stride(0),
        **constants,
        # 64 registers of a thread hold the state, of 128, so that two programs fit at once.
        num_warps=max(1, min(8, size // 2048)),
        maxnreg=128,
        **overlapped(),
    )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["slots", "positions", "lens"],
)
def _recur_decodes(
    projected, mixed, gates, decay, bias, norm, tables, slots, positions, lens, matrices, out, eps,
    table_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One value head of one sequence."""
    wait_for_kernels_before(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if tl.load(lens + row) == 0:
        return
    state = tl.load(tables + tl.load(slots + row).to(tl.int64) * table_stride).to(tl.int64)
    # A sequence begins with zeros.
    num_keys = tl.where(tl.load(positions + row) == 0, 0, KEY_DIM)
    i = tl.arange(0, KEYS)
    j = tl.arange(0, VALUES)
    is_key = i < KEY_DIM
    is_value = j < VALUE_DIM
    is_there = is_key[:, None] & is_value[None, :]
    place = matrices + (state * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    place = place + i[:, None] * VALUE_DIM + j[None, :]
    matrix = tl.load(place, mask=is_there & (i < num_keys)[:, None], other=0.0)
    source = mixed + row * CHANNELS
    query = source + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
    q = tl.load(query, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(query + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
    value = source + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    v = tl.load(value, mask=is_value, other=0.0).to(tl.float32)
    g, beta = gates_of(gates, decay, bias, row, head, None, VALUE_HEADS)

    matrix *= tl.exp(g)
    known = tl.sum(matrix * k[:, None], 0)
    read = tl.sum(matrix * q[:, None], 0)
    added = (v - known) * beta
    tl.store(place, matrix + k[:, None] * added[None, :], mask=is_there)
    o = read + tl.sum(q * k, 0) * added

    gate = projected + row * (CHANNELS + VALUE_HEADS * VALUE_DIM) + CHANNELS + head * VALUE_DIM + j
    z = tl.load(gate, mask=is_value, other=0.0).to(tl.float32)
    weight = tl.load(norm + j, mask=is_value, other=0.0)
    o = gated(tl.sum(o * o, 0) / VALUE_DIM, o, weight, z, eps)
    target = out + row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + j
    tl.store(target, o.to(out.dtype.element_ty), mask=is_value)
