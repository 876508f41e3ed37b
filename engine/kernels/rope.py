"""Between the QKV product and attention: QK-norm, rotary positions, the KV write."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.kv_codes import (
    encode,
    inverse_scale,
    pointers,
    scale_of,
    scale_offsets,
)
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2
from penstock.engine.memory.pool.kv_codes import KVPages
from penstock.engine.step.device_step import Rotation, rotation_arguments

# Heads per program: with 16 KiB of them, there would be too few programs at batch 1.
_HEADS = 4


def rotate_and_store(
    qkv: Tensor,
    rotation: Rotation,
    positions: Tensor,
    kv_slots: Tensor,
    keys: KVPages,
    values: KVPages,
    query: Tensor,
) -> None:
    """Writes each token's rotated query, and its key and value to their slots in the pool.

    qkv: (T, (num_heads + kv_parts * num_kv_heads) * head_dim). positions: (T,) int32, rows of
    cosines and sines; kv_slots: (T,) int64, as in `ModelInput`. keys, values: one layer of the
    pool, written if there are kv_parts. query: (T, num_heads, head_dim), written.
    Source: Su et al. 2021 (arXiv:2104.09864), in pairs (i, i + rotary_dim / 2).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    num_stored = 2 * num_kv_heads if rotation.kv_parts else 0
    has_norm = rotation.query_norm is not None
    assert has_norm or not rotation.norms_values, "one sum of squares is for both"
    key_codes, value_codes, key_scales, value_scales = pointers(keys, values)
    _rotate_and_store[(num_tokens, ceil_div(num_heads + num_stored, _HEADS))](
        qkv, positions, kv_slots, keys=key_codes, values=value_codes, key_scales=key_scales,
        value_scales=value_scales, query=query, **rotation_arguments(rotation, head_dim),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=keys.shape[1],
        HEAD_DIM=head_dim, HALF=next_power_of_2(head_dim // 2), HEADS=_HEADS,
        num_warps=1 if head_dim <= 256 else 2, **overlapped(),
    )  # fmt: skip


@triton.jit
def _pairs(pair, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """The two dimensions of a pair. Those that are not rotated make pairs too, whose angle is 0."""
    first = pair
    second = pair + HEAD_DIM // 2
    if ROTARY_DIM < HEAD_DIM:
        is_rotated = pair < ROTARY_DIM // 2
        first = tl.where(is_rotated, pair, pair + ROTARY_DIM // 2)
        second = tl.where(is_rotated, pair + ROTARY_DIM // 2, second)
    return first, second


@triton.jit
def _normed(x, dim, scale, is_pair, is_query, query_norm, key_norm, kind: tl.constexpr):
    """One dimension of each pair, (heads, pairs): x times its head's scale and its weight."""
    weight = tl.load(query_norm + dim, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    if key_norm is not None:
        for_keys = tl.load(key_norm + dim, mask=is_pair, other=0.0).to(tl.float32)
        weight = tl.where(is_query, weight, for_keys[None, :])
    x = (x * scale).to(query_norm.dtype.element_ty).to(tl.float32)
    return (x * weight).to(kind).to(tl.float32)


@triton.jit
def rotated_pairs(left, right, cos, sin, factor, kind: tl.constexpr):
    """The pairs of heads, turned by their angles. factor: of each head, or None."""
    left_turned = left * cos - right * sin
    right_turned = right * cos + left * sin
    if factor is not None:
        left_turned *= factor
        right_turned *= factor
    rotated_left = left_turned.to(kind)
    rotated_right = right_turned.to(kind)
    if kind == tl.float16:
        # NaN for what it cannot hold, as in penstock.engine.models.layers.rotary.
        rotated_left += rotated_left - rotated_left
        rotated_right += rotated_right - rotated_right
    return rotated_left, rotated_right


@triton.jit
def _coded(left, right, kind: tl.constexpr):
    """Codes of the heads' pairs, and the scale of each head."""
    peak = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
    not_finite = tl.sum(left * 0.0, 1) + tl.sum(right * 0.0, 1)
    inverse = inverse_scale(peak, kind)[:, None]
    left_codes = encode(left, inverse, kind)
    right_codes = encode(right, inverse, kind)
    return left_codes, right_codes, scale_of(peak, not_finite, kind)


@triton.jit
def _store_scales(
    scales, slot, kv_head, scale, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    place = scale_offsets(slot, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
    tl.store(scales + place, scale, mask=(kv_head >= 0) & (kv_head < NUM_KV_HEADS))


@triton.jit
def _store_pairs(rows, row, first, second, left, right, mask, HEAD_DIM: tl.constexpr):
    target = rows + row[:, None] * HEAD_DIM
    tl.store(target + first[None, :], left, mask=mask)
    tl.store(target + second[None, :], right, mask=mask)


@triton.jit
def _store_keys_and_values(
    slot, kv_head, first, second, is_there, left, right, value_left, value_right, keys, values,
    key_scales, value_scales,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Stores a token's heads that are. kv_head: below 0 those of queries, then of keys, then of
    values."""
    is_key = is_there & (kv_head >= 0)[:, None] & (kv_head < NUM_KV_HEADS)[:, None]
    is_value = is_there & (kv_head >= NUM_KV_HEADS)[:, None]
    if key_scales is not None:
        codes: tl.constexpr = keys.dtype.element_ty
        # A head is a key or a value; for a query nothing of this is used.
        left = tl.where(is_value, value_left, left).to(tl.float32)
        right = tl.where(is_value, value_right, right).to(tl.float32)
        left, right, scale = _coded(left, right, codes)
        _store_scales(key_scales, slot, kv_head, scale, NUM_KV_HEADS, BLOCK_SIZE)
        kv_value = kv_head - NUM_KV_HEADS
        _store_scales(value_scales, slot, kv_value, scale, NUM_KV_HEADS, BLOCK_SIZE)
        value_left = left
        value_right = right
    row = slot * NUM_KV_HEADS + kv_head
    _store_pairs(keys, row, first, second, left, right, is_key, HEAD_DIM)
    row -= NUM_KV_HEADS
    _store_pairs(values, row, first, second, value_left, value_right, is_value, HEAD_DIM)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # see `_gather_chunks`
def _rotate_and_store(
    qkv, positions, kv_slots, cos, sin, query_norm, key_norm, keys, values, key_scales,
    value_scales, query, query_factors, eps, angles_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    KV_PARTS: tl.constexpr, NORMS_VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    NUM_STORED: tl.constexpr = 2 * NUM_KV_HEADS if KV_PARTS > 0 else 0
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_pair = pair < HEAD_DIM // 2
    is_there = (head < NUM_HEADS + NUM_STORED)[:, None] & is_pair[None, :]
    kind: tl.constexpr = query.dtype.element_ty
    first, second = _pairs(pair, HEAD_DIM, ROTARY_DIM)

    part = head
    if KV_PARTS == 1:  # a value is what its key is made of
        part = tl.where(head < NUM_HEADS + NUM_KV_HEADS, head, head - NUM_KV_HEADS)
    source = qkv + (token * (NUM_HEADS + KV_PARTS * NUM_KV_HEADS) + part)[:, None] * HEAD_DIM
    left = tl.load(source + first[None, :], mask=is_there, other=0.0).to(tl.float32)
    right = tl.load(source + second[None, :], mask=is_there, other=0.0).to(tl.float32)
    is_query = (head < NUM_HEADS)[:, None]
    value_left = left
    value_right = right
    if query_norm is not None:
        square = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        if NORMS_VALUES:
            value_left = left * scale
            value_right = right * scale
        left = _normed(left, first, scale, is_pair, is_query, query_norm, key_norm, kind)
        right = _normed(right, second, scale, is_pair, is_query, query_norm, key_norm, kind)

    position = tl.load(positions + token).to(tl.int64)
    angle = position * angles_stride + pair
    c = tl.load(cos + angle, mask=is_pair, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=is_pair, other=0.0)[None, :]
    factor = None
    if query_factors is not None:
        factor = tl.where(is_query, tl.load(query_factors + position), 1.0)
    left, right = rotated_pairs(left, right, c, s, factor, kind)
    mask = is_there & is_query
    _store_pairs(query, token * NUM_HEADS + head, first, second, left, right, mask, HEAD_DIM)
    if KV_PARTS > 0:
        _store_keys_and_values(
            tl.load(kv_slots + token), head - NUM_HEADS, first, second, is_there, left, right,
            value_left.to(kind), value_right.to(kind), keys, values, key_scales, value_scales,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
        )  # fmt: skip
