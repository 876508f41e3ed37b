"""Between the QKV product and attention: QK-norm, rotary positions, the KV write."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2

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
    keys: Tensor,
    values: Tensor,
    query: Tensor,
) -> None:
    """Writes each token's rotated query, and its key and value to their slots in the pool.

    qkv: (T, (num_heads + 2 * num_kv_heads) * head_dim). positions: (T,) int32; kv_slots: (T,)
    int64, as in `ModelInput`. cos, sin: (max_positions, head_dim / 2) float32. query_norm,
    key_norm: (head_dim,) or None. keys, values: one layer of the pool, written. query: (T,
    num_heads, head_dim), written. Source: Su et al. 2021 (arXiv:2104.09864), in pairs (i, i +
    head_dim / 2).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    grid = (num_tokens, ceil_div(num_heads + 2 * num_kv_heads, _HEADS))
    has_norm = query_norm is not None and key_norm is not None
    _rotate_and_store[grid](
        qkv,
        positions,
        kv_slots,
        cos,
        sin,
        query_norm if has_norm else qkv,
        key_norm if has_norm else qkv,
        keys,
        values,
        query,
        eps,
        HAS_NORM=has_norm,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=next_power_of_2(head_dim // 2),
        HEADS=_HEADS,
        num_warps=1,
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
    query,
    eps,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_pair = pair < HEAD_DIM // 2
    is_there = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_pair[None, :]
    kind = query.dtype.element_ty

    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * HEAD_DIM
    source = source + pair[None, :]
    left = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    right = tl.load(source + HEAD_DIM // 2, mask=is_there, other=0.0).to(tl.float32)
    is_query = (head < NUM_HEADS)[:, None]
    is_key = (head >= NUM_HEADS)[:, None] & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    value_left = left
    value_right = right

    if HAS_NORM:
        square = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        q_left = tl.load(query_norm + pair, mask=is_pair, other=0.0).to(tl.float32)
        q_right = tl.load(query_norm + HEAD_DIM // 2 + pair, mask=is_pair, other=0.0).to(tl.float32)
        k_left = tl.load(key_norm + pair, mask=is_pair, other=0.0).to(tl.float32)
        k_right = tl.load(key_norm + HEAD_DIM // 2 + pair, mask=is_pair, other=0.0).to(tl.float32)
        left = (left * scale).to(kind).to(tl.float32)
        right = (right * scale).to(kind).to(tl.float32)
        left = (left * tl.where(is_query, q_left[None, :], k_left[None, :])).to(kind).to(tl.float32)
        right = (right * tl.where(is_query, q_right[None, :], k_right[None, :])).to(kind)
        right = right.to(tl.float32)

    angle = tl.load(positions + token).to(tl.int64) * (HEAD_DIM // 2) + pair
    c = tl.load(cos + angle, mask=is_pair, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=is_pair, other=0.0)[None, :]
    rotated_left = (left * c - right * s).to(kind)
    rotated_right = (right * c + left * s).to(kind)
    if kind == tl.float16:
        # NaN for what it cannot hold, as in penstock.engine.models.layers.rotary.
        rotated_left += rotated_left - rotated_left
        rotated_right += rotated_right - rotated_right

    target = query + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + pair[None, :]
    tl.store(target, rotated_left, mask=is_there & is_query)
    tl.store(target + HEAD_DIM // 2, rotated_right, mask=is_there & is_query)
    row = tl.load(kv_slots + token) * NUM_KV_HEADS
    target = keys + (row + head - NUM_HEADS)[:, None] * HEAD_DIM + pair[None, :]
    tl.store(target, rotated_left, mask=is_there & is_key)
    tl.store(target + HEAD_DIM // 2, rotated_right, mask=is_there & is_key)
    target = values + (row + head - NUM_HEADS - NUM_KV_HEADS)[:, None] * HEAD_DIM + pair[None, :]
    tl.store(target, value_left.to(kind), mask=is_there & is_value)
    tl.store(target + HEAD_DIM // 2, value_right.to(kind), mask=is_there & is_value)
