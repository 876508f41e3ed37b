"""Writes each token's latent and shared key to the pool, and rotates queries."""

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
from penstock.engine.kernels.rope import rotated_pairs
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2
from penstock.engine.memory.pool.kv_codes import KVPages
from penstock.engine.models.parts.attention.rotary import Angles
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.step.device_step import DeviceStep

# Heads of queries per program.
_HEADS = 16


def rotate_and_store_latents(
    config: LatentAttention,
    latents: Tensor,
    heads: Tensor,
    norm: Tensor,
    angles: Angles,
    step: DeviceStep,
    keys: KVPages,
    query: Tensor,
) -> None:
    """Normalises and stores latents, with the rotated key beside each; and writes what is rotated
    of queries to their last rope_dim numbers.

    latents: (T, latent_dim + rope_dim), columns of a wider tensor. heads: (T, num_heads,
    query_dim), likewise. keys: one layer of the pool. query: (T, num_heads, head_dim).
    """
    num_tokens, num_heads, _ = query.shape
    codes, _, scales, _ = pointers(keys, keys)
    _rotate_and_store_latents[(num_tokens, 1 + ceil_div(num_heads, _HEADS))](
        latents, heads, step.positions, step.kv_slots, angles.cos, angles.sin,
        angles.query_factors, norm, codes, scales, query, config.norm_eps, latents.stride(0),
        heads.stride(0), angles.cos.stride(0), NUM_HEADS=num_heads, NOPE=config.nope_dim,
        ROPE=config.rope_dim, LATENT=config.latent_dim, DIMS=next_power_of_2(config.latent_dim),
        PAIRS=next_power_of_2(config.rope_dim // 2), IS_INTERLEAVED=config.is_interleaved,
        BLOCK_SIZE=keys.shape[1], HEADS=_HEADS, num_warps=2, **overlapped(),
    )  # fmt: skip


@triton.jit
def _turned(
    source, pair, mask, cos, sin, factor,
    ROPE: tl.constexpr, IS_INTERLEAVED: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The pairs of numbers from `source` on, (heads, 1) pointers, turned by their angles; a pair is
    of neighbours, or of halves."""
    if IS_INTERLEAVED:
        left = tl.load(source + 2 * pair, mask=mask, other=0.0)
        right = tl.load(source + 2 * pair + 1, mask=mask, other=0.0)
    else:
        left = tl.load(source + pair, mask=mask, other=0.0)
        right = tl.load(source + pair + ROPE // 2, mask=mask, other=0.0)
    return rotated_pairs(left.to(tl.float32), right.to(tl.float32), cos, sin, factor, kind)


@triton.jit
def _store_latent(
    source, pair, is_pair, cos, sin, norm, eps, slot, keys, scales,
    ROPE: tl.constexpr, LATENT: tl.constexpr, DIMS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One token's."""
    dim = tl.arange(0, DIMS)[None, :]
    is_dim = dim < LATENT
    kind: tl.constexpr = norm.dtype.element_ty
    x = tl.load(source + dim, mask=is_dim, other=0.0)
    own: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / LATENT + eps)[:, None]
    weight = tl.load(norm + dim, mask=is_dim, other=0.0).to(tl.float32)
    latent = (x.to(kind).to(tl.float32) * weight).to(own)
    left, right = _turned(source + LATENT, pair, is_pair, cos, sin, None, ROPE, IS_INTERLEAVED, own)
    if scales is not None:
        codes: tl.constexpr = keys.dtype.element_ty
        latent, left, right = latent.to(tl.float32), left.to(tl.float32), right.to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        peak = tl.maximum(tl.max(tl.abs(latent), 1), peak)
        not_finite = tl.sum(latent * 0.0, 1) + tl.sum(left * 0.0, 1) + tl.sum(right * 0.0, 1)
        place = scale_offsets(slot, tl.arange(0, 1), 1, BLOCK_SIZE)
        tl.store(scales + place, scale_of(peak, not_finite, codes))
        inverse = inverse_scale(peak, codes)[:, None]
        latent = encode(latent, inverse, codes)
        left, right = encode(left, inverse, codes), encode(right, inverse, codes)
    target = keys + slot * (LATENT + ROPE)
    tl.store(target + dim, latent, mask=is_dim)
    tl.store(target + LATENT + pair, left, mask=is_pair)
    tl.store(target + LATENT + ROPE // 2 + pair, right, mask=is_pair)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # see `_gather_chunks`
def _rotate_and_store_latents(
    latents, heads, positions, kv_slots, cos, sin, query_factors, norm, keys, scales, query, eps,
    latents_stride, heads_stride, angles_stride,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr,
    DIMS: tl.constexpr, PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's latent, or some heads of its queries."""
    wait_for_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    is_pair = pair < ROPE // 2
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * angles_stride + pair, mask=is_pair, other=0.0)
    s = tl.load(sin + position * angles_stride + pair, mask=is_pair, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(kv_slots + token)
        _store_latent(
            latents + token * latents_stride, pair, is_pair, c, s, norm, eps, slot, keys, scales,
            ROPE, LATENT, DIMS, IS_INTERLEAVED, BLOCK_SIZE,
        )  # fmt: skip
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < NUM_HEADS) & is_pair
        source = heads + token * heads_stride + head * (NOPE + ROPE) + NOPE
        factor = None
        if query_factors is not None:
            factor = tl.load(query_factors + position)
        kind: tl.constexpr = query.dtype.element_ty
        left, right = _turned(source, pair, mask, c, s, factor, ROPE, IS_INTERLEAVED, kind)
        target = query + (token * NUM_HEADS + head) * (LATENT + ROPE) + LATENT
        tl.store(target + pair, left, mask=mask)
        tl.store(target + ROPE // 2 + pair, right, mask=mask)
