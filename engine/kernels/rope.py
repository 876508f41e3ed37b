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

# Heads per program: with 16 KiB of them, there would be too few programs at batch 1.
_HEADS = 4


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    keys: KVPages,
    values: KVPages,
    query: Tensor,
    query_factors: Tensor | None = None,
    rotary_dim: int | None = None,
    *,
    kv_parts: int = 2,
    norms_values: bool = False,
) -> None:
    """Writes each token's rotated query, and its key and value to their slots in the pool.

    qkv: (T, (num_heads + kv_parts * num_kv_heads) * head_dim). positions: (T,) int32; kv_slots:
    (T,) int64, as in `ModelInput`. keys, values: one layer of the pool, written if there are
    kv_parts. query: (T, num_heads, head_dim), written. The others: as in `Rotation`.
    Source: Su et al. 2021 (arXiv:2104.09864), in pairs (i, i + rotary_dim / 2).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    num_stored = 2 * num_kv_heads if kv_parts else 0
    grid = (num_tokens, ceil_div(num_heads + num_stored, _HEADS))
    has_norm = query_norm is not None
    assert has_norm or not norms_values, "one sum of squares is for both"
    (key_codes, key_scales), (value_codes, value_scales) = pointers(keys), pointers(values)
    _rotate_and_store[grid](
        qkv,
        positions,
        kv_slots,
        cos,
        sin,
        query_norm if has_norm else qkv,
        qkv if key_norm is None else key_norm,
        key_codes,
        value_codes,
        key_scales,
        value_scales,
        query,
        query_factors,
        eps,
        cos.stride(0),
        HAS_NORM=has_norm,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=keys.shape[1],
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim or head_dim,
        HALF=next_power_of_2(head_dim // 2),
        HEADS=_HEADS,
        KV_PARTS=kv_parts,
        NORMS_VALUES=norms_values,
        num_warps=1 if head_dim <= 256 else 2,
        **overlapped(),
    )


@triton.jit(do_not_specialize_on_alignment=["positions"])  # see `_gather_chunks`
def _rotate_and_store(
    qkv,
    positions,
    kv_slots,
    cos,
    sin,
    query_norm,
    key_norm,
    keys,
    values,
    key_scales,
    value_scales,
    query,
    query_factors,
    eps,
    angles_stride,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_PARTS: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_kernels_before(PDL)
    NUM_STORED: tl.constexpr = 2 * NUM_KV_HEADS if KV_PARTS > 0 else 0
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_pair = pair < HEAD_DIM // 2
    is_there = (head < NUM_HEADS + NUM_STORED)[:, None] & is_pair[None, :]
    kind = query.dtype.element_ty
    # The dimensions of a pair. Those that are not rotated make pairs too, whose angle is 0.
    first = pair
    second = pair + HEAD_DIM // 2
    if ROTARY_DIM < HEAD_DIM:
        is_rotated = pair < ROTARY_DIM // 2
        first = tl.where(is_rotated, pair, pair + ROTARY_DIM // 2)
        second = tl.where(is_rotated, pair + ROTARY_DIM // 2, second)

    part = head
    if KV_PARTS == 1:  # a value is what its key is made of
        part = tl.where(head < NUM_HEADS + NUM_KV_HEADS, head, head - NUM_KV_HEADS)
    source = qkv + (token * (NUM_HEADS + KV_PARTS * NUM_KV_HEADS) + part)[:, None] * HEAD_DIM
    left = tl.load(source + first[None, :], mask=is_there, other=0.0).to(tl.float32)
    right = tl.load(source + second[None, :], mask=is_there, other=0.0).to(tl.float32)
    is_query = (head < NUM_HEADS)[:, None]
    is_key = (head >= NUM_HEADS)[:, None] & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    value_left = left
    value_right = right

    if HAS_NORM:
        square = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        if NORMS_VALUES:
            value_left = left * scale
            value_right = right * scale
        q_left = tl.load(query_norm + first, mask=is_pair, other=0.0).to(tl.float32)
        q_right = tl.load(query_norm + second, mask=is_pair, other=0.0).to(tl.float32)
        k_left = q_left
        k_right = q_right
        if KV_PARTS > 0:
            k_left = tl.load(key_norm + first, mask=is_pair, other=0.0).to(tl.float32)
            k_right = tl.load(key_norm + second, mask=is_pair, other=0.0).to(tl.float32)
        left = (left * scale).to(query_norm.dtype.element_ty).to(tl.float32)
        right = (right * scale).to(query_norm.dtype.element_ty).to(tl.float32)
        left = (left * tl.where(is_query, q_left[None, :], k_left[None, :])).to(kind).to(tl.float32)
        right = (right * tl.where(is_query, q_right[None, :], k_right[None, :])).to(kind)
        right = right.to(tl.float32)

    position = tl.load(positions + token).to(tl.int64)
    angle = position * angles_stride + pair
    c = tl.load(cos + angle, mask=is_pair, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=is_pair, other=0.0)[None, :]
    left_turned = left * c - right * s
    right_turned = right * c + left * s
    if query_factors is not None:
        factor = tl.where(is_query, tl.load(query_factors + position), 1.0)
        left_turned *= factor
        right_turned *= factor
    rotated_left = left_turned.to(kind)
    rotated_right = right_turned.to(kind)
    if kind == tl.float16:
        # NaN for what it cannot hold, as in penstock.engine.models.layers.rotary.
        rotated_left += rotated_left - rotated_left
        rotated_right += rotated_right - rotated_right

    target = query + (token * NUM_HEADS + head)[:, None] * HEAD_DIM
    tl.store(target + first[None, :], rotated_left, mask=is_there & is_query)
    tl.store(target + second[None, :], rotated_right, mask=is_there & is_query)
    if KV_PARTS > 0:
        slot = tl.load(kv_slots + token)
        row = slot * NUM_KV_HEADS
        key_left = rotated_left
        key_right = rotated_right
        value_left = value_left.to(kind)
        value_right = value_right.to(kind)
        if key_scales is not None:
            codes: tl.constexpr = keys.dtype.element_ty
            # Of a key or a value, whichever the head is; of a query it is not used.
            left = tl.where(is_value, value_left, rotated_left).to(tl.float32)
            right = tl.where(is_value, value_right, rotated_right).to(tl.float32)
            peak = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
            not_finite = tl.sum(left * 0.0, 1) + tl.sum(right * 0.0, 1)
            inverse = inverse_scale(peak, codes)[:, None]
            key_left = encode(left, inverse, codes)
            key_right = encode(right, inverse, codes)
            value_left = key_left
            value_right = key_right
            size = scale_of(peak, not_finite, codes)
            kv_head = head - NUM_HEADS
            place = scale_offsets(slot, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
            of_key = (kv_head >= 0) & (kv_head < NUM_KV_HEADS)
            tl.store(key_scales + place, size, mask=of_key)
            kv_head = kv_head - NUM_KV_HEADS
            place = scale_offsets(slot, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
            of_value = (kv_head >= 0) & (kv_head < NUM_KV_HEADS)
            tl.store(value_scales + place, size, mask=of_value)
        target = keys + (row + head - NUM_HEADS)[:, None] * HEAD_DIM
        tl.store(target + first[None, :], key_left, mask=is_there & is_key)
        tl.store(target + second[None, :], key_right, mask=is_there & is_key)
        target = values + (row + head - NUM_HEADS - NUM_KV_HEADS)[:, None] * HEAD_DIM
        tl.store(target + first[None, :], value_left, mask=is_there & is_value)
        tl.store(target + second[None, :], value_right, mask=is_there & is_value)
