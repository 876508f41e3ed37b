"""Lists of work, and a tile of keys in a running softmax: for decode and prefill."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.kernels.kv_codes import decode, unit_of
from penstock.engine.kernels.sizes import next_power_of_2

# The most rows of a decode's tile whose heads read one latent: of 64 with 512 dimensions, the sums
# and products would spill registers.
_LATENT_ROWS = 32
# Only test models have such small heads: in the interpreter, many small tiles are slow.
SMALL_HEAD = 16
# Fields of a work item of a decode: the row's first token, begin, end, how many pieces the row has,
# the first of them, its slot, context and, where rows have drafts, queries. Of a prefill: row,
# begin, end. In a sector of the cache each.
ITEM = 8
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class WorkList:
    """The pieces that a step's attention consists of, on the device.

    items: (max_items, 8) int32, see `ITEM`. first_item: (max_rows + 1,) int32, where each row's
    items begin; the last entry is their number. tokens: (max_rows, 4) int32, of a decode whose rows
    have drafts: by token its row's first item, how many that has, and which of its queries it is.
    """

    items: Tensor
    first_item: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, max_items: int, max_rows: int, device: torch.device) -> "WorkList":
        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(empty(max_items, ITEM), empty(max_rows + 1), empty(max_rows, 4))


def shape_constants(shape: AttentionShape, queries: int = 1) -> dict[str, int]:
    """queries: of a row that a tile has at once. HEAD_DIM: of values; REST: how many more numbers a
    key has. NUM_KV_HEADS: the parts that heads are divided into, each of which is a tile's; where
    all heads read one latent, as few parts as keep a tile within _LATENT_ROWS."""
    parts, rest = shape.num_kv_heads, shape.head_dim - shape.value_dim
    if rest:
        divisors = (n for n in range(1, shape.num_heads) if shape.num_heads % n == 0)
        fitting = (n for n in divisors if _rows(shape.num_heads // n, queries) <= _LATENT_ROWS)
        parts = next(fitting, shape.num_heads)
    return {
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": parts,
        "HEAD_DIM": shape.value_dim,
        "DIMS": max(16, next_power_of_2(shape.value_dim)),  # as matrix units need
        "REST": rest,
        "REST_DIMS": max(16, next_power_of_2(rest)) if rest else 0,
        "BLOCK_SIZE": shape.block_size,
    }


def _rows(heads: int, queries: int) -> int:
    return next_power_of_2(heads) * queries


@triton.jit
def _blocks(table, position, is_key, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The pool's blocks that have the tokens at these TILE successive positions; a scalar if it is
    one."""
    if BLOCK_SIZE % TILE == 0:
        first = tl.min(position)
        blocks = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
    else:
        blocks = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    return blocks


@triton.jit
def sink_scores(sinks, head, mask):
    """The sinks of some heads, scaled as `attend` scales scores: in powers of two."""
    return tl.load(sinks + head, mask=mask, other=0.0) * 1.4426950408889634


@triton.jit
def _scores(q, k, scales, place, is_key, scale):
    """Multiplies queries and a tile of keys; where these are codes, each has a scale besides."""
    if scales is not None:
        key_scale = tl.load(scales + place, mask=is_key, other=0.0)
        key_scale = key_scale * (unit_of(k.dtype) * scale)
        scores = tl.dot(q, tl.trans(decode(k, q.dtype)), input_precision="ieee")
        scores = scores * key_scale[None, :]
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return scores


@triton.jit
def _mixed(weights, v, scales, place, is_key, kind: tl.constexpr):
    """The values of a tile, added up by weight; where these are codes, each has a scale besides."""
    if scales is not None:
        value_scale = tl.load(scales + place, mask=is_key, other=0.0) * unit_of(v.dtype)
        numbers = decode(v, kind)
        if (v.dtype == tl.int8) & (kind == tl.float16):
            # Weights times scales would be below what float16 holds in full precision.
            numbers = numbers * 0.015625
            value_scale = value_scale * 64.0
        mixed = tl.dot((weights * value_scale[None, :]).to(kind), numbers, input_precision="ieee")
    else:
        mixed = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return mixed


@triton.jit
def attend(
    q, q_rest, query_position, last_seen, table, keys, values, key_scales, value_scales, start, end,
    window, scale, kv_head, acc, peak, total,
    IS_MASKED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, REST: tl.constexpr, REST_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, start + TILE) below `end` to a running softmax, in powers of two.

    last_seen: the last position that each query attends to, mostly its own.
    q_rest: the queries' last REST numbers, if there are any. Then all heads read the same keys,
    whose first numbers are the values, so that these are read once.
    """
    dim = tl.arange(0, DIMS)
    position = start + tl.arange(0, TILE)
    is_key = position < end
    blocks = _blocks(table, position, is_key, BLOCK_SIZE, TILE)
    rows = blocks * BLOCK_SIZE + position % BLOCK_SIZE
    if REST > 0:
        first = rows[:, None] * (HEAD_DIM + REST)
        place = rows  # of scales
    else:
        first = rows[:, None] * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        place = (blocks * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
    offset = first + dim[None, :]
    # Values past the end have weight 0, but 0 times NaN is NaN: they are not read.
    is_there = is_key[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(keys + offset, mask=is_there, other=0.0)
    scores = _scores(q, k, key_scales, place, is_key, scale)
    if REST > 0:
        rest = tl.arange(0, REST_DIMS)
        is_rest = is_key[:, None] & (rest < REST)[None, :]
        k_rest = tl.load(keys + first + HEAD_DIM + rest[None, :], mask=is_rest, other=0.0)
        scores += _scores(q_rest, k_rest, key_scales, place, is_key, scale)
    if IS_MASKED:
        seen = is_key[None, :] & (position[None, :] <= last_seen[:, None])
        if window > 0:
            seen = seen & (position[None, :] > query_position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    v = k if REST > 0 else tl.load(values + offset, mask=is_there, other=0.0)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    share = tl.exp2(peak - new_peak)
    total = total * share + tl.sum(weights, 1)
    mixed = _mixed(weights, v, value_scales, place, is_key, q.dtype)
    return acc * share[:, None] + mixed, new_peak, total
