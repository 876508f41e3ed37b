"""A row: its settings, which are words in the table of its slot, its logits and its noise; and the
passes that every row needs, of each chunk's best and the row's."""

import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import wait_for_kernels_before
from penstock.engine.memory.host import tensor_to_device
from penstock.engine.sampling.sampler import INVALID_ID, MIN_TEMPERATURE, mixed_seed
from penstock.scheduler.types import SamplingParams

# A slot's words in the table. Floats are stored as their bits. Stop ids come last.
FLAGS = tl.constexpr(0)
INVERSE_TEMPERATURE = tl.constexpr(1)  # 0: greedy
TOP_K = tl.constexpr(2)
TOP_P = tl.constexpr(3)
MAX_Z = tl.constexpr(4)  # -log(min_p)
REPETITION = tl.constexpr(5)
PRESENCE = tl.constexpr(6)
FREQUENCY = tl.constexpr(7)
SEED = tl.constexpr(8)  # two words of the mixed seed, the lower first
MAY_STOP_AT = tl.constexpr(10)  # the first position where a stop id is allowed
NUM_STOPS = tl.constexpr(11)
STOPS = tl.constexpr(12)
WORDS = tl.constexpr(32)
MAX_STOPS = WORDS.value - STOPS.value

HAS_TOP_K = tl.constexpr(1)
HAS_TOP_P = tl.constexpr(2)
HAS_MIN_P = tl.constexpr(4)
IS_FILTERED = tl.constexpr(7)
IS_BIASED = tl.constexpr(8)
IS_PENALISED = tl.constexpr(16)
IS_CONSTRAINED = tl.constexpr(32)
HAS_MIN_TOKENS = tl.constexpr(64)
WANTS_LOGPROB = tl.constexpr(128)
IS_ADJUSTED = tl.constexpr(8 + 16 + 32 + 64)


def encode(
    sampling: SamplingParams, seed: int, num_prompt: int, size: int
) -> tuple[list[int], bool]:
    """A slot's words, and whether it has a row of biases."""
    # As in penstock.engine.sampling.sampler: top_k 1 is an argmax even where two logits tie.
    draws = sampling.temperature >= MIN_TEMPERATURE and sampling.top_k != 1
    penalties = (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    has_bias = any(0 <= i < size for i, _ in sampling.logit_bias)
    has_allowed = any(i < size for i in sampling.allowed_token_ids)
    is_biased = has_bias or has_allowed or any(word[0] < size for word in sampling.bad_words)
    stops = [i for i in sampling.stop_token_ids if i < size] if sampling.min_tokens else []
    conditions = (
        (draws and 0 < sampling.top_k < size, HAS_TOP_K),
        (draws and sampling.top_p < 1.0, HAS_TOP_P),
        (draws and sampling.min_p > 0.0, HAS_MIN_P),
        (is_biased, IS_BIASED),
        (penalties != (1.0, 0.0, 0.0), IS_PENALISED),
        (sampling.grammar is not None, IS_CONSTRAINED),
        (bool(stops), HAS_MIN_TOKENS),
        (sampling.num_logprobs is not None, WANTS_LOGPROB),
    )
    key = mixed_seed(seed)
    words = [0] * WORDS.value
    words[FLAGS.value] = sum(flag.value for condition, flag in conditions if condition)
    words[INVERSE_TEMPERATURE.value] = _bits(1.0 / sampling.temperature if draws else 0.0)
    words[TOP_K.value] = sampling.top_k if sampling.top_k < size else 0
    words[TOP_P.value] = _bits(sampling.top_p)
    words[MAX_Z.value] = _bits(-math.log(sampling.min_p) if sampling.min_p > 0 else math.inf)
    words[REPETITION.value : FREQUENCY.value + 1] = map(_bits, penalties)
    words[SEED.value : SEED.value + 2] = _signed(key), _signed(key >> 32)
    words[MAY_STOP_AT.value] = num_prompt + sampling.min_tokens
    words[NUM_STOPS.value] = len(stops)
    words[STOPS.value : STOPS.value + len(stops)] = stops
    return words, is_biased


def dense_bias(sampling: SamplingParams, size: int, device: torch.device) -> Tensor:
    """A term to add to a row's logits: (V,), -inf for ids that are never allowed."""
    allowed = [i for i in sampling.allowed_token_ids if i < size]
    row = torch.full((size,), -math.inf if allowed else 0.0)
    row.index_fill_(0, torch.tensor(allowed, dtype=torch.int64), 0.0)
    pairs = [(i, value) for i, value in sampling.logit_bias if 0 <= i < size]
    pairs += [(word[0], -math.inf) for word in sampling.bad_words if word[0] < size]
    for token_id, value in pairs:
        row[token_id] += value
    return tensor_to_device(row, device)


def _bits(value: float) -> int:
    # + 0.0 makes a zero positive: negative bits would be ordered wrongly.
    bits: int = struct.unpack("<i", struct.pack("<f", value + 0.0))[0]
    return bits


def _signed(word: int) -> int:
    """The int32 of a word's lower 32 bits."""
    word %= 2**32
    return word - 2**32 if word >= 2**31 else word


@triton.jit
def _scatter(updates, table, WORDS: tl.constexpr):
    update = updates + tl.program_id(0) * (WORDS + 1)
    word = tl.arange(0, WORDS)
    slot = tl.load(update).to(tl.int64)
    tl.store(table + slot * WORDS + word, tl.load(update + 1 + word))


# Logits per program of a pass over the row: 32 programs for 128,256, to occupy the device even with
# one row, and 16 per thread of 8 warps, all read before the first is needed.
CHUNK = tl.constexpr(4096)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
NO_ID = tl.constexpr(2**31 - 1)

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def load_float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _mixed(z):
    """SplitMix64's output function."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def row_key(params, position):
    """The start of a row's noise, from its seed and position."""
    low = tl.load(params + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(params + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    golden = tl.full((1,), _GOLDEN, tl.uint64)
    return _mixed((low | (high << 32)) + position.to(tl.uint64) * golden)


@triton.jit
def _noise(key, token):
    """Exponential noise of these ids, from 1e-10 to 16.6. key: (1,) uint64."""
    golden = tl.full((1,), _GOLDEN, tl.uint64)
    bits = (_mixed(key + (token + 1).to(tl.uint64) * golden) >> 32).to(tl.uint32)
    # v in (0, 1), with the finest steps near 0, where the noise is least and decides.
    v = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * 0.25)))
    return tl.where(v < 0.015625, series, -tl.log(1.0 - v))


@triton.jit
def race_score(key, token, z):
    """The largest wins; each id does with a probability proportional to exp(-z)."""
    # Beyond 80 no id can win; the bound keeps scores finite.
    return -_noise(key, token) * tl.exp(tl.minimum(z, 80.0))


@triton.jit
def repaired(x):
    x = tl.where(x != x, float("-inf"), x)
    return tl.minimum(x, _LARGEST_FLOAT)


@triton.jit
def _marked(x):
    """NaN as +inf: a row with a peak of +inf is invalid, and every pass but the first skips it."""
    return tl.where(x != x, float("inf"), x)


@triton.jit
def is_valid(peak):
    """Whether a row of adjusted logits is, and has an id that is allowed."""
    return (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def raw_logits(logits, row, stride, token, size):
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < size, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def load_logits(source, token, ADJUSTED: tl.constexpr):
    """The adjusted logits of these ids, `_marked`; -inf past the vocabulary. source: the row."""
    logits, row, stride, size, position, slot, params, flags, bias, seen, masks = source
    x = raw_logits(logits, row, stride, token, size)
    if ADJUSTED:
        mask = token < size
        if (flags & IS_BIASED) != 0:
            x += tl.load(bias + slot * size + token, mask=mask, other=0.0)
        if (flags & IS_PENALISED) != 0:
            word = tl.load(seen + slot * size + token, mask=mask, other=0)
            count = (word >> 1).to(tl.float32)
            repetition = tl.full(x.shape, 0.0, tl.float32) + load_float(params + REPETITION)
            less = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            presence = tl.where(count > 0, load_float(params + PRESENCE), 0.0)
            less -= load_float(params + FREQUENCY) * count + presence
            x = tl.where(word != 0, less, x)
        if (flags & IS_CONSTRAINED) != 0:
            word = tl.load(masks + slot * ((size + 31) // 32) + token // 32, mask=mask, other=0)
            x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
        if ((flags & HAS_MIN_TOKENS) != 0) & (position < tl.load(params + MAY_STOP_AT)):
            for stop in range(0, tl.load(params + NUM_STOPS)):
                x = tl.where(token == tl.load(params + STOPS + stop), float("-inf"), x)
    return _marked(x)


@triton.jit
def first_of_best(best, token):
    """The best, and the lowest id that has it."""
    peak = tl.max(best)
    return peak, tl.min(tl.where(best == peak, token, NO_ID))


@triton.jit
def row_peak(parts, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(parts + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")))


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
    source = logits, row, stride, size, position, slot, params, flags, bias, seen, masks
    x = load_logits(source, token, ADJUSTED)
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
