"""For all passes over a row: its logits, its noise, and the best of some ids."""

import triton
import triton.language as tl

from penstock.engine.kernels.sample.words import (
    FREQUENCY,
    HAS_MIN_TOKENS,
    IS_BIASED,
    IS_CONSTRAINED,
    IS_PENALISED,
    MAY_STOP_AT,
    NUM_STOPS,
    PRESENCE,
    REPETITION,
    SEED,
    STOPS,
)

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
def load_logits(
    logits, row, stride, token, size, position, slot, params, flags, bias, seen, masks,
    ADJUSTED: tl.constexpr,
):  # fmt: skip
    """The adjusted logits of these ids, `_marked`; -inf past the vocabulary."""
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
