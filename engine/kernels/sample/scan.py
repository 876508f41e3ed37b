"""The passes that every row needs: each chunk's best, and the row's."""

import triton
import triton.language as tl

from penstock.engine.kernels.launch import wait_for_kernels_before
from penstock.engine.kernels.sample.rows import (
    CHUNK,
    NO_ID,
    first_of_best,
    is_valid,
    load_float,
    load_logits,
    race_score,
    raw_logits,
    repaired,
    row_key,
    row_peak,
)
from penstock.engine.kernels.sample.words import (
    FLAGS,
    INVERSE_TEMPERATURE,
    IS_FILTERED,
    IS_PENALISED,
    WANTS_LOGPROB,
    WORDS,
)
from penstock.engine.sampling.sampler import INVALID_ID

INVALID = tl.constexpr(INVALID_ID)


@triton.jit
def _scan(
    logits, slots, positions, table, bias, seen, masks, parts, size, stride, part_stride,
    part_ids, ADJUSTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk. parts: (4, rows, chunks): peak, the winner's logit, and two of the raw logits."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    params = table + slot * WORDS
    position = tl.load(positions + row)
    flags = tl.load(params + FLAGS)
    scale = load_float(params + INVERSE_TEMPERATURE)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(
        logits, row, stride, token, size, position, slot, params, flags, bias, seen, masks,
        ADJUSTED,
    )  # fmt: skip
    peak, winner = first_of_best(x, token)
    won = peak
    if (scale > 0) & ((flags & IS_FILTERED) == 0) & is_valid(peak):
        score = race_score(row_key(params, position), token, (peak - x) * scale)
        _best, winner = first_of_best(score, token)
        won = tl.max(tl.where(token == winner, x, float("-inf")))
    part = row * tl.num_programs(1) + chunk
    tl.store(parts + part, peak)
    tl.store(parts + part_stride + part, won)
    tl.store(part_ids + part, winner)
    if (flags & WANTS_LOGPROB) != 0:
        if ADJUSTED:
            x = repaired(raw_logits(logits, row, stride, token, size))
            peak = tl.max(x)
        total = 0.0
        if is_valid(peak):
            total = tl.sum(tl.exp(x - peak))
        tl.store(parts + 2 * part_stride + part, peak)
        tl.store(parts + 3 * part_stride + part, total)


@triton.jit
def emit(
    token, row, slot, flags, logits, stride, size, seen, parts, part_stride, ids, logprobs,
    chunks, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr,
):  # fmt: skip
    """Writes a row's id and logprob, and counts the id as output."""
    tl.store(ids + row, token)
    token = tl.maximum(token, 0)  # those of an invalid row are void
    if (flags & WANTS_LOGPROB) != 0:
        chunk = tl.arange(0, CHUNKS)
        part = parts + 2 * part_stride + row * chunks + chunk
        peaks = tl.load(part, mask=chunk < chunks, other=float("-inf"))
        sums = tl.load(part + part_stride, mask=chunk < chunks, other=0.0)
        peak = tl.max(peaks)
        x = repaired(tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32))
        if is_valid(peak):
            value = x - peak - tl.log(tl.sum(sums * tl.exp(peaks - peak)))
        else:
            value = tl.where(token == 0, 0.0, float("-inf"))
        tl.store(logprobs + row, value)
    if ADJUSTED:  # noqa: SIM102  (known at compile time, the other is not)
        if (flags & IS_PENALISED) != 0:
            tl.atomic_add(seen + slot * size + token, 2)


@triton.jit
def _finish(
    logits, slots, positions, table, bias, seen, masks, parts, size, stride, part_stride,
    part_ids, ids, logprobs, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row without filters: the best of its chunks' winners, relative to the row's peak."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    params = table + slot * WORDS
    flags = tl.load(params + FLAGS)
    if (flags & IS_FILTERED) != 0:
        return
    chunks = (size + CHUNK - 1) // CHUNK
    peak = row_peak(parts, row, chunks, CHUNKS)
    token = tl.where(peak == float("inf"), INVALID, row * 0)
    if is_valid(peak):
        scale = load_float(params + INVERSE_TEMPERATURE)
        chunk = tl.arange(0, CHUNKS)
        part = row * chunks + chunk
        x = tl.load(parts + part_stride + part, mask=chunk < chunks, other=float("-inf"))
        winner = tl.load(part_ids + part, mask=chunk < chunks, other=NO_ID)
        score = x
        if scale > 0:
            key = row_key(params, tl.load(positions + row))
            score = race_score(key, winner, (peak - x) * scale)
        _best, token = first_of_best(score, winner)
    emit(
        token, row, slot, flags, logits, stride, size, seen, parts, part_stride, ids, logprobs,
        chunks, CHUNKS, ADJUSTED,
    )  # fmt: skip
