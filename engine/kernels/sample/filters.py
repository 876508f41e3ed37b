"""The passes of rows with top-k, top-p or min-p: the ids that survive, and the draw from them."""

import triton
import triton.language as tl

from penstock.engine.kernels.launch import wait_for_kernels_before
from penstock.engine.kernels.sample.rows import (
    CHUNK,
    FLAGS,
    HAS_MIN_P,
    HAS_TOP_K,
    HAS_TOP_P,
    INVALID,
    INVERSE_TEMPERATURE,
    IS_FILTERED,
    MAX_Z,
    NO_ID,
    TOP_K,
    TOP_P,
    WORDS,
    emit,
    first_of_best,
    is_valid,
    load_float,
    load_logits,
    race_score,
    row_key,
    row_peak,
)

# For `_select`, which has one program per row.
_WIDE_BLOCK = tl.constexpr(1024)

# Buckets of z: [0, 1) to [7, 8), then by 2 to 22, then the rest. They are the bits of z + 8 down to
# the third of its mantissa; 8.0 >> 20 is 1040.
BUCKETS = tl.constexpr(16)
_SHIFT = tl.constexpr(8.0)
_FIRST_BITS = tl.constexpr(1040)
# Weight of the most likely id. 2**22 of them sum to less than 2**63.
_ONE = tl.constexpr(2.0**40)
_INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _bucket(z):
    bits = (z + _SHIFT).to(tl.int32, bitcast=True)
    return tl.minimum((bits >> 20) - _FIRST_BITS, BUCKETS - 1)


@triton.jit
def _weight(z):
    return (tl.exp(-z) * _ONE).to(tl.int64)


@triton.jit
def _coarse(
    logits, slots, positions, table, bias, seen, masks, parts, size, stride, part_stride,
    counts, masses, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk's ids by buckets, (rows, chunks, 16), and its mass, (rows, chunks)."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    params = table + slot * WORDS
    flags = tl.load(params + FLAGS)
    if (flags & IS_FILTERED) == 0:
        return
    peak = row_peak(parts, row, tl.num_programs(1), CHUNKS)
    if not is_valid(peak):
        return
    position = tl.load(positions + row)
    scale = load_float(params + INVERSE_TEMPERATURE)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    source = logits, row, stride, size, position, slot, params, flags, bias, seen, masks
    x = load_logits(source, token, ADJUSTED)
    z = (peak - x) * scale
    # A bucket is a field of 4 bits, 16 of them in a word; 8 ids cannot overflow it.
    one = tl.full((CHUNK,), 1, tl.int64)
    ones = tl.where(token < size, one << (4 * _bucket(z)).to(tl.int64), 0)
    packed = tl.sum(tl.reshape(ones, (CHUNK // 8, 8)), 1)
    bucket = tl.arange(0, BUCKETS)
    fields = (packed[None, :] >> (4 * bucket)[:, None].to(tl.int64)).to(tl.int32) & 15
    part = row * tl.num_programs(1) + chunk
    tl.store(counts + part * BUCKETS + bucket, tl.sum(fields, 1))
    tl.store(masses + part, tl.sum(_weight(z)))


@triton.jit
def _total(masses, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(masses + row * chunks + chunk, mask=chunk < chunks, other=0))


@triton.jit
def _cut(params, flags, counts, masses, row, chunks, CHUNKS: tl.constexpr):
    """The last bucket that can have a survivor, and the number of ids up to it, per chunk."""
    chunk = tl.arange(0, CHUNKS)
    bucket = tl.arange(0, BUCKETS)
    cell = (row * chunks + chunk)[:, None] * BUCKETS + bucket[None, :]
    table = tl.load(counts + cell, mask=(chunk < chunks)[:, None], other=0)
    count = tl.sum(table, 0)
    cut = row * 0 + BUCKETS - 1
    if (flags & (HAS_TOP_K | HAS_MIN_P)) != 0:
        # Top-p applies to what these leave, so its bound over all ids is not valid.
        if (flags & HAS_TOP_K) != 0:
            enough = tl.cumsum(count) >= tl.load(params + TOP_K)
            cut = tl.min(tl.where(enough, bucket, BUCKETS - 1))
        if (flags & HAS_MIN_P) != 0:
            cut = tl.minimum(cut, _bucket(load_float(params + MAX_Z)))
    else:
        # At most 1 - top_p of the mass is outside the nucleus. An id weighs at most as much as the
        # edge of its bucket, except for rounding, which the factor allows for.
        edge = ((bucket + _FIRST_BITS) << 20).to(tl.float32, bitcast=True) - _SHIFT
        bound = count.to(tl.float32) * tl.exp(-edge)
        past = tl.sum(tl.where(bucket[:, None] > bucket[None, :], bound[:, None], 0.0), 0)
        total = _total(masses, row, chunks, CHUNKS).to(tl.float32) / _ONE
        is_past = past * 1.001 <= (1.0 - load_float(params + TOP_P)) * total
        cut = tl.min(tl.where(is_past, bucket, BUCKETS - 1))
    return cut, tl.sum(tl.where((bucket <= cut)[None, :], table, 0), 1)


@triton.jit
def _gather(
    logits, slots, positions, table, bias, seen, masks, parts, size, stride, part_stride,
    counts, masses, keys, list_ids, list_size,
    CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lists one chunk's ids up to the cut, after those of the preceding chunks."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    params = table + slot * WORDS
    flags = tl.load(params + FLAGS)
    if (flags & IS_FILTERED) == 0:
        return
    peak = row_peak(parts, row, tl.num_programs(1), CHUNKS)
    if not is_valid(peak):
        return
    cut, by_chunk = _cut(params, flags, counts, masses, row, tl.num_programs(1), CHUNKS)
    index = tl.arange(0, CHUNKS)
    own = tl.sum(tl.where(index == chunk, by_chunk, 0))
    if (own == 0) | (tl.sum(by_chunk) > list_size):
        return
    position = tl.load(positions + row)
    scale = load_float(params + INVERSE_TEMPERATURE)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    source = logits, row, stride, size, position, slot, params, flags, bias, seen, masks
    x = load_logits(source, token, ADJUSTED)
    z = (peak - x) * scale
    is_listed = ((token < size) & (_bucket(z) <= cut)).to(tl.int32)
    begin = row.to(tl.int64) * list_size + tl.sum(tl.where(index < chunk, by_chunk, 0))
    target = begin + tl.cumsum(is_listed) - is_listed
    tl.store(keys + target, z.to(tl.int32, bitcast=True), mask=is_listed != 0)
    tl.store(list_ids + target, token, mask=is_listed != 0)


@triton.jit
def _entry(index, listed, source, ADJUSTED: tl.constexpr):
    """Keys and ids at these indices of a row's list or of the row; infinite past its end.

    listed: the list, or how the row is to be read. source: see `load_logits`.
    """
    _end, num_listed, keys, list_ids, is_list, peak, scale = listed
    if is_list:
        mask = index < num_listed
        key = tl.load(keys + index, mask=mask, other=_INF_BITS)
        token = tl.load(list_ids + index, mask=mask, other=NO_ID)
    else:
        x = load_logits(source, index, ADJUSTED)
        key = ((peak - x) * scale).to(tl.int32, bitcast=True)
        token = index
    return key, token


@triton.jit
def _search(need, limit, by_mass, listed, source, ADJUSTED: tl.constexpr):
    """The least key such that the ids up to it, and up to limit, have `need` in mass or number.

    It is found three bits at a time, by eight sums over the list. Infinite if all ids have less.
    """
    way = tl.arange(0, 8).to(tl.int64)
    lane = tl.arange(0, _WIDE_BLOCK)
    # In 64 bits: the first step is of 2**30 keys, and eight of those exceed 32 bits.
    low = need * 0
    shift = low + 30
    for _ in range(0, 11):
        last = tl.minimum(low + ((way + 1) << shift) - 1, _INF_BITS).to(tl.int32)
        held = tl.zeros((8,), tl.int64)
        for start in range(0, listed[0], _WIDE_BLOCK):
            key, _token = _entry(start + lane, listed, source, ADJUSTED)
            weight = tl.full((_WIDE_BLOCK,), 1, tl.int64)
            if by_mass:
                weight = _weight(key.to(tl.float32, bitcast=True))
            weight = tl.where(key <= limit, weight, 0)
            held += tl.sum(tl.where(key[None, :] <= last[:, None], weight[None, :], 0), 1)
        low += tl.sum((held < need).to(tl.int64)) << shift
        shift -= 3
    return tl.minimum(low, _INF_BITS).to(tl.int32)


@triton.jit
def _listed_mass(limit, listed, source, ADJUSTED: tl.constexpr):
    """The mass of the keys up to limit."""
    lane = tl.arange(0, _WIDE_BLOCK)
    mass = tl.zeros((_WIDE_BLOCK,), tl.int64)
    for start in range(0, listed[0], _WIDE_BLOCK):
        key, _token = _entry(start + lane, listed, source, ADJUSTED)
        mass += tl.where(key <= limit, _weight(key.to(tl.float32, bitcast=True)), 0)
    return tl.sum(mass)


@triton.jit
def _limit(
    row, params, flags, masses, chunks, listed, source, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr
):
    """The largest key that survives a row's filters."""
    limit = row * 0 + (_INF_BITS - 1)
    if (flags & HAS_TOP_K) != 0:
        need = tl.load(params + TOP_K).to(tl.int64)
        limit = tl.minimum(limit, _search(need, limit, False, listed, source, ADJUSTED))
    if (flags & HAS_MIN_P) != 0:
        limit = tl.minimum(limit, tl.load(params + MAX_Z))
    if (flags & HAS_TOP_P) != 0:
        total = _total(masses, row, chunks, CHUNKS)
        if (flags & (HAS_TOP_K | HAS_MIN_P)) != 0:
            total = _listed_mass(limit, listed, source, ADJUSTED)
        top_p = load_float(params + TOP_P).to(tl.float64)
        need = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        limit = tl.minimum(limit, _search(need, limit, True, listed, source, ADJUSTED))
    return limit


@triton.jit
def _winner(noise_key, limit, listed, source, ADJUSTED: tl.constexpr):
    """The id that is drawn from all keys up to limit."""
    lane = tl.arange(0, _WIDE_BLOCK)
    score = tl.full((_WIDE_BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((_WIDE_BLOCK,), NO_ID, tl.int32)
    for start in range(0, listed[0], _WIDE_BLOCK):
        key, token = _entry(start + lane, listed, source, ADJUSTED)
        value = race_score(noise_key, token, key.to(tl.float32, bitcast=True))
        is_better = (key <= limit) & (value > score)
        score = tl.where(is_better, value, score)
        best_id = tl.where(is_better, token, best_id)
    _best, token_id = first_of_best(score, best_id)
    return token_id


@triton.jit
def _select(
    logits, slots, positions, table, bias, seen, masks, parts, size, stride, part_stride,
    counts, masses, keys, list_ids, list_size, limits, ids, logprobs,
    CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row with filters: the largest key that survives, and the draw from all keys up to it."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    params = table + slot * WORDS
    flags = tl.load(params + FLAGS)
    if (flags & IS_FILTERED) == 0:
        return
    chunks = (size + CHUNK - 1) // CHUNK
    peak = row_peak(parts, row, chunks, CHUNKS)
    position = tl.load(positions + row)
    token_id = tl.where(peak == float("inf"), INVALID, row * 0)
    limit = row * 0 + (_INF_BITS - 1)
    if is_valid(peak):
        scale = load_float(params + INVERSE_TEMPERATURE)
        _last, by_chunk = _cut(params, flags, counts, masses, row, chunks, CHUNKS)
        num_listed = tl.sum(by_chunk)
        is_list = num_listed <= list_size
        end = tl.where(is_list, num_listed, size)
        begin = row.to(tl.int64) * list_size
        listed = end, num_listed, keys + begin, list_ids + begin, is_list, peak, scale
        source = logits, row, stride, size, position, slot, params, flags, bias, seen, masks
        limit = _limit(row, params, flags, masses, chunks, listed, source, CHUNKS, ADJUSTED)
        token_id = _winner(row_key(params, position), limit, listed, source, ADJUSTED)
    tl.store(limits + row, limit)
    emit(
        token_id, row, slot, flags, logits, stride, size, seen, parts, part_stride, ids, logprobs,
        chunks, CHUNKS, ADJUSTED,
    )  # fmt: skip
