"""Samples ids from logits in a captured graph: the semantics of `penstock.engine.sampling.sampler`
(with a different random draw), in few passes.

`DeviceSampler` owns the sampling parameters of each slot's request, in tables on the device whose
memory is fixed. A step reads them by the row's slot, without the host.

**The draw** is a race of exponential variables: each id has an exponential time, divided by its
weight, and the first wins, or the lowest id of a tie. (Gumbel-max is its logarithm, and takes one
more.) The times are a hash of (seed, position, id) alone: the SplitMix64 stream that starts at
output `position` of the seed's. So a row's id does not depend on its row, its slot or the other
rows of the batch. It differs from the CPU's draw, which has the same distribution.

**The filters** are thresholds on z = (largest - x) / temperature, whose bits have the same order as
its values; it is rounded twice, as in the CPU sampler. Sums are of integers, so they are the same
in any order.

1. `_scan`: each chunk's largest logit; its winner, for a row that draws without filters; its part
   of the log-sum-exp, for a row that needs logprobs. For all rows; most need only this pass.
   A chunk with NaN or +inf has the peak +inf, which makes its row invalid.
2. `_coarse`: how many of a chunk's ids fall in each of 16 buckets of z, and their mass.
3. `_gather`: lists the ids up to a bucket that certainly includes all survivors, mostly a few
   hundred of 128,256.
4. `_select`: the exact thresholds, by a search over the bits of the list, and the draw from the
   survivors. If more than `_MAX_LISTED` ids qualify, it reads the row instead of the list, some 25
   times.

Passes 2 to 4 return at once for rows without filters. Each of 1 to 3 reads all logits and writes
almost nothing: with V = 128,256 in float32 at 4.3 TB/s that takes 0.12 us for one row, where a
launch takes 2, and 31 us for 256 rows; in bfloat16, half. Noise takes another 80 instructions per
id: by their count 0.1 ms for 256 rows that draw, so that pass is bound by arithmetic. `_select` has
up to 24 short rounds over its list, some 10 us. None of this has been timed on a device yet.

Sources: Gumbel-max, Maddison et al. 2014 (arXiv:1411.0030); sampling without sorting, FlashInfer
(Ye et al. 2025, arXiv:2501.01005), which rejects where this selects; SplitMix64, Steele, Lea and
Flood 2014.
"""

import math
import struct
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import next_power_of_2
from penstock.engine.memory.host import tensor_to_device, to_device
from penstock.engine.sampling.sampler import INVALID_ID, MIN_TEMPERATURE, mixed_seed
from penstock.engine.sampling.token_bans import has_token_bans
from penstock.scheduler.types import SamplingParams

# Logits per program of a pass over the row: 32 programs for 128,256, to occupy the device even with
# one row, and 16 per thread of 8 warps, all read before the first is needed.
_CHUNK = tl.constexpr(4096)
# For `_select`, which has one program per row.
_WIDE_BLOCK = tl.constexpr(1024)
# The most ids that are listed for a row; with 512 rows, 67 MB.
_MAX_LISTED = 16384

# Buckets of z: [0, 1) to [7, 8), then by 2 to 22, then the rest. They are the bits of z + 8 down to
# the third of its mantissa; 8.0 >> 20 is 1040.
_BUCKETS = tl.constexpr(16)
_SHIFT = tl.constexpr(8.0)
_FIRST_BITS = tl.constexpr(1040)
# Weight of the most likely id. 2**22 of them sum to less than 2**63.
_ONE = tl.constexpr(2.0**40)
_INF_BITS = tl.constexpr(0x7F800000)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_NO_ID = tl.constexpr(2**31 - 1)
_INVALID_ID = tl.constexpr(INVALID_ID)

# A slot's words in the table. Floats are stored as their bits. Stop ids come last.
_FLAGS = tl.constexpr(0)
_INVERSE_TEMPERATURE = tl.constexpr(1)  # 0: greedy
_TOP_K = tl.constexpr(2)
_TOP_P = tl.constexpr(3)
_MAX_Z = tl.constexpr(4)  # -log(min_p)
_REPETITION = tl.constexpr(5)
_PRESENCE = tl.constexpr(6)
_FREQUENCY = tl.constexpr(7)
_SEED = tl.constexpr(8)  # two words of the mixed seed, the lower first
_MAY_STOP_AT = tl.constexpr(10)  # the first position where a stop id is allowed
_NUM_STOPS = tl.constexpr(11)
_STOPS = tl.constexpr(12)
_WORDS = tl.constexpr(32)
_MAX_STOPS = _WORDS.value - _STOPS.value

_HAS_TOP_K = tl.constexpr(1)
_HAS_TOP_P = tl.constexpr(2)
_HAS_MIN_P = tl.constexpr(4)
_IS_FILTERED = tl.constexpr(7)
_IS_BIASED = tl.constexpr(8)
_IS_PENALISED = tl.constexpr(16)
_IS_CONSTRAINED = tl.constexpr(32)
_HAS_MIN_TOKENS = tl.constexpr(64)
_WANTS_LOGPROB = tl.constexpr(128)
_IS_ADJUSTED = tl.constexpr(8 + 16 + 32 + 64)

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


class Mode(IntEnum):
    """What a step's rows need; each mode includes the ones before it."""

    PLAIN = 0
    FILTERED = 1
    ADJUSTED = 2


def can_fuse(sampling: SamplingParams) -> bool:
    """Whether `DeviceSampler` supports it; otherwise `penstock.engine.sampling.sampler` does.

    Unsupported: bad words of several tokens, more than 20 stop ids with min_tokens, and token bans
    together with a grammar (whose end overrides them). Of logprobs, only the sampled id's.
    """
    if sampling.min_tokens > 0 and len(sampling.stop_token_ids) > _MAX_STOPS:
        return False
    if any(len(word) != 1 for word in sampling.bad_words):
        return False
    return sampling.grammar is None or not has_token_bans(sampling)


class DeviceSampler:
    """Per-slot tables, and the launches that read them."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        *,
        max_rows: int | None = None,
        max_listed: int = _MAX_LISTED,
    ) -> None:
        """max_rows: the most in a step, by default max_num_seqs. max_listed: see the module.

        Slot max_num_seqs belongs to the rows that pad a graph, and is greedy.

        Memory: 132 kB per row, nearly all for the lists; see also `allow_adjustments`.
        """
        rows = max_rows or max_num_seqs
        chunks = -(-vocab_size // _CHUNK.value)

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        self._vocab_size, self._chunks, self._max_rows = vocab_size, chunks, rows
        self._device = device
        self._table = torch.zeros(max_num_seqs + 1, _WORDS.value, dtype=torch.int32, device=device)
        self._parts = empty(4, rows, chunks, dtype=torch.float32)
        self._part_ids = empty(rows, chunks)
        self._counts = empty(rows, chunks, _BUCKETS.value)
        self._masses = empty(rows, chunks, dtype=torch.int64)
        self._keys, self._ids = empty(2, rows, min(max_listed, vocab_size)).unbind()
        # For each row with filters in the last step: the bits of the largest z that survived.
        self.limits = empty(rows)
        self._flags = [0] * (max_num_seqs + 1)
        self._updates: dict[int, list[int]] = {}
        self._dense: list[tuple[int, SamplingParams, list[int], int]] = []
        self._bias: Tensor | None = None
        self._seen: Tensor | None = None
        self._masks: Tensor | None = None

    @property
    def masks(self) -> Tensor:
        """(slots, words) int32, `GrammarTable.memory` on the device; the caller writes it."""
        assert self._masks is not None, "allow_adjustments must be called first"
        return self._masks

    def allow_adjustments(self) -> None:
        """Allocates what Mode.ADJUSTED reads, 8 bytes per id and slot. Call it before capture."""
        if self._bias is not None:
            return
        slots, size = len(self._flags), self._vocab_size
        self._bias = torch.zeros(slots, size, device=self._device)
        # Per id: twice its count in the output, plus 1 if it is in the prompt.
        self._seen = torch.zeros(slots, size, dtype=torch.int32, device=self._device)
        words = -(-size // 32)
        self._masks = torch.full((slots, words), -1, dtype=torch.int32, device=self._device)

    def assign(
        self, slot: int, sampling: SamplingParams, seed: int, token_ids: list[int], num_prompt: int
    ) -> None:
        """A sequence enters `slot` with these tokens; takes effect at the next `flush`."""
        assert can_fuse(sampling), sampling
        words, biased = _encode(sampling, seed, num_prompt, self._vocab_size)
        self._flags[slot] = words[_FLAGS.value]
        self._updates[slot] = words
        self._dense = [update for update in self._dense if update[0] != slot]
        if biased or words[_FLAGS.value] & _IS_PENALISED.value:
            self._dense.append((slot, sampling, token_ids, num_prompt))

    def flush(self) -> None:
        """Writes the updates to the tables, mostly with one copy to the device and one launch."""
        if any(words[_FLAGS.value] & _IS_ADJUSTED.value for words in self._updates.values()):
            self.allow_adjustments()
        for slot, sampling, token_ids, num_prompt in self._dense:
            self._fill(slot, sampling, token_ids, num_prompt)
        self._dense = []
        if self._updates:
            rows = [[slot, *words] for slot, words in self._updates.items()]
            updates = to_device(rows, torch.int32, self._device)
            _scatter[(len(rows),)](updates, self._table, WORDS=_WORDS, num_warps=1)
            self._updates = {}

    def mode(self, slots: list[int]) -> Mode:
        """The lowest mode that rows of these slots need."""
        flags = 0
        for slot in slots:
            flags |= self._flags[slot]
        if flags & _IS_ADJUSTED.value:
            return Mode.ADJUSTED
        return Mode.FILTERED if flags & _IS_FILTERED.value else Mode.PLAIN

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        ids: Tensor,
        logprobs: Tensor,
        mode: Mode,
    ) -> None:
        """Writes ids, (S,) int32; and logprobs, (S,) float32, of rows that request them.

        logits: (S, V) of the model's type or float32, never written. slots, positions: (S,) int32;
        positions are those being sampled. In a graph, all of them must keep their addresses. In
        Mode.ADJUSTED a sampled id counts as output at once: the next call must be for the next
        position, unless `assign` comes first.
        """
        num_rows, size = logits.shape
        assert num_rows <= self._max_rows and size == self._vocab_size, (num_rows, size)
        assert logits.stride(1) == 1, logits.stride()
        assert self._bias is not None or mode is not Mode.ADJUSTED, (
            "allow_adjustments must be called first"
        )
        source: dict[str, Any] = {
            "logits": logits,
            "slots": slots,
            "positions": positions,
            "table": self._table,
            # A placeholder of the same type, which avoids another compilation.
            "bias": self._parts if self._bias is None else self._bias,
            "seen": self._table if self._seen is None else self._seen,
            "masks": self._table if self._masks is None else self._masks,
            "parts": self._parts,
            "size": size,
            "stride": logits.stride(0),
            "part_stride": self._parts.stride(0),
            "ADJUSTED": mode is Mode.ADJUSTED,
            **overlapped(),
        }
        chunks, padded = self._chunks, next_power_of_2(self._chunks)
        listing = {"counts": self._counts, "masses": self._masses, "CHUNKS": padded}
        lists = {"keys": self._keys, "list_ids": self._ids, "list_size": self._keys.shape[1]}
        results = {"part_ids": self._part_ids, "ids": ids, "logprobs": logprobs, "CHUNKS": padded}
        grid = (num_rows, chunks)
        _scan[grid](**source, part_ids=self._part_ids, num_warps=8)
        _finish[(num_rows,)](**source, **results, num_warps=1)
        if mode is not Mode.PLAIN:
            _coarse[grid](**source, **listing, num_warps=8)
            _gather[grid](**source, **listing, **lists, num_warps=8)
            results.pop("part_ids")
            results["limits"] = self.limits
            # Otherwise ptxas would spill a register or two to raise occupancy.
            _select[(num_rows,)](**source, **(listing | lists | results), num_warps=8, maxnreg=128)

    def _fill(
        self, slot: int, sampling: SamplingParams, token_ids: list[int], num_prompt: int
    ) -> None:
        """Writes one slot's rows of the tables that have a column for each id."""
        assert self._bias is not None and self._seen is not None
        self._bias[slot] = _dense_bias(sampling, self._vocab_size, self._device)
        ids = to_device(token_ids, torch.int64, self._device)
        seen = self._seen[slot].zero_()
        seen.index_fill_(0, ids[:num_prompt], 1)  # `seen[...] = 1` would wait for the device
        output = ids[num_prompt:]
        seen.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))


def _encode(
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
        (draws and 0 < sampling.top_k < size, _HAS_TOP_K),
        (draws and sampling.top_p < 1.0, _HAS_TOP_P),
        (draws and sampling.min_p > 0.0, _HAS_MIN_P),
        (is_biased, _IS_BIASED),
        (penalties != (1.0, 0.0, 0.0), _IS_PENALISED),
        (sampling.grammar is not None, _IS_CONSTRAINED),
        (bool(stops), _HAS_MIN_TOKENS),
        (sampling.num_logprobs is not None, _WANTS_LOGPROB),
    )
    key = mixed_seed(seed)
    words = [0] * _WORDS.value
    words[_FLAGS.value] = sum(flag.value for condition, flag in conditions if condition)
    words[_INVERSE_TEMPERATURE.value] = _bits(1.0 / sampling.temperature if draws else 0.0)
    words[_TOP_K.value] = sampling.top_k if sampling.top_k < size else 0
    words[_TOP_P.value] = _bits(sampling.top_p)
    words[_MAX_Z.value] = _bits(-math.log(sampling.min_p) if sampling.min_p > 0 else math.inf)
    words[_REPETITION.value : _FREQUENCY.value + 1] = map(_bits, penalties)
    words[_SEED.value : _SEED.value + 2] = _signed(key), _signed(key >> 32)
    words[_MAY_STOP_AT.value] = num_prompt + sampling.min_tokens
    words[_NUM_STOPS.value] = len(stops)
    words[_STOPS.value : _STOPS.value + len(stops)] = stops
    return words, is_biased


def _dense_bias(sampling: SamplingParams, size: int, device: torch.device) -> Tensor:
    """What is added to a row's logits: (V,), -inf for ids that are never allowed."""
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


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _mixed(z):
    """SplitMix64's output function."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _row_key(params, position):
    """The start of a row's noise, from its seed and position."""
    low = tl.load(params + _SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(params + _SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
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
def _score(key, token, z):
    """The largest wins; each id does with a probability proportional to exp(-z)."""
    # Beyond 80 no id can win; the bound keeps scores finite.
    return -_noise(key, token) * tl.exp(tl.minimum(z, 80.0))


@triton.jit
def _repaired(x):
    x = tl.where(x != x, float("-inf"), x)
    return tl.minimum(x, _LARGEST_FLOAT)


@triton.jit
def _marked(x):
    """NaN as +inf: a row with a peak of +inf is invalid, and every pass but the first skips it."""
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _is_valid(peak):
    """Whether a row of adjusted logits is, and has an id that is allowed."""
    return (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def _raw(logits, row, stride, token, size):
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < size, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def _load(
    logits, row, stride, token, size, position, slot, params, flags, bias, seen, masks,
    ADJUSTED: tl.constexpr,
):  # fmt: skip
    """The adjusted logits of these ids, `_marked`; -inf past the vocabulary."""
    x = _raw(logits, row, stride, token, size)
    if ADJUSTED:
        mask = token < size
        if (flags & _IS_BIASED) != 0:
            x += tl.load(bias + slot * size + token, mask=mask, other=0.0)
        if (flags & _IS_PENALISED) != 0:
            word = tl.load(seen + slot * size + token, mask=mask, other=0)
            count = (word >> 1).to(tl.float32)
            repetition = tl.full(x.shape, 0.0, tl.float32) + _float(params + _REPETITION)
            less = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            presence = tl.where(count > 0, _float(params + _PRESENCE), 0.0)
            less -= _float(params + _FREQUENCY) * count + presence
            x = tl.where(word != 0, less, x)
        if (flags & _IS_CONSTRAINED) != 0:
            word = tl.load(masks + slot * ((size + 31) // 32) + token // 32, mask=mask, other=0)
            x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
        if ((flags & _HAS_MIN_TOKENS) != 0) & (position < tl.load(params + _MAY_STOP_AT)):
            for stop in range(0, tl.load(params + _NUM_STOPS)):
                x = tl.where(token == tl.load(params + _STOPS + stop), float("-inf"), x)
    return _marked(x)


@triton.jit
def _first_of_best(best, token):
    """The best, and the lowest id that has it."""
    peak = tl.max(best)
    return peak, tl.min(tl.where(best == peak, token, _NO_ID))


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
    params = table + slot * _WORDS
    position = tl.load(positions + row)
    flags = tl.load(params + _FLAGS)
    scale = _float(params + _INVERSE_TEMPERATURE)
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    x = _load(
        logits, row, stride, token, size, position, slot, params, flags, bias, seen, masks,
        ADJUSTED,
    )  # fmt: skip
    peak, winner = _first_of_best(x, token)
    won = peak
    if (scale > 0) & ((flags & _IS_FILTERED) == 0) & _is_valid(peak):
        score = _score(_row_key(params, position), token, (peak - x) * scale)
        _best, winner = _first_of_best(score, token)
        won = tl.max(tl.where(token == winner, x, float("-inf")))
    part = row * tl.num_programs(1) + chunk
    tl.store(parts + part, peak)
    tl.store(parts + part_stride + part, won)
    tl.store(part_ids + part, winner)
    if (flags & _WANTS_LOGPROB) != 0:
        if ADJUSTED:
            x = _repaired(_raw(logits, row, stride, token, size))
            peak = tl.max(x)
        total = 0.0
        if _is_valid(peak):
            total = tl.sum(tl.exp(x - peak))
        tl.store(parts + 2 * part_stride + part, peak)
        tl.store(parts + 3 * part_stride + part, total)


@triton.jit
def _emit(
    token, row, slot, flags, logits, stride, size, seen, parts, part_stride, ids, logprobs,
    chunks, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr,
):  # fmt: skip
    """Writes a row's id and logprob, and counts the id as output."""
    tl.store(ids + row, token)
    token = tl.maximum(token, 0)  # those of an invalid row are void
    if (flags & _WANTS_LOGPROB) != 0:
        chunk = tl.arange(0, CHUNKS)
        part = parts + 2 * part_stride + row * chunks + chunk
        peaks = tl.load(part, mask=chunk < chunks, other=float("-inf"))
        sums = tl.load(part + part_stride, mask=chunk < chunks, other=0.0)
        peak = tl.max(peaks)
        x = _repaired(tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32))
        if _is_valid(peak):
            value = x - peak - tl.log(tl.sum(sums * tl.exp(peaks - peak)))
        else:
            value = tl.where(token == 0, 0.0, float("-inf"))
        tl.store(logprobs + row, value)
    if ADJUSTED:  # noqa: SIM102  (known at compile time, the other is not)
        if (flags & _IS_PENALISED) != 0:
            tl.atomic_add(seen + slot * size + token, 2)


@triton.jit
def _row_peak(parts, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(parts + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")))


@triton.jit
def _finish(
    logits, slots, positions, table, bias, seen, masks, parts, size, stride, part_stride,
    part_ids, ids, logprobs, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row without filters: the best of its chunks' winners, relative to the row's peak."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    params = table + slot * _WORDS
    flags = tl.load(params + _FLAGS)
    if (flags & _IS_FILTERED) != 0:
        return
    chunks = (size + _CHUNK - 1) // _CHUNK
    peak = _row_peak(parts, row, chunks, CHUNKS)
    token = tl.where(peak == float("inf"), _INVALID_ID, row * 0)
    if _is_valid(peak):
        scale = _float(params + _INVERSE_TEMPERATURE)
        chunk = tl.arange(0, CHUNKS)
        part = row * chunks + chunk
        x = tl.load(parts + part_stride + part, mask=chunk < chunks, other=float("-inf"))
        winner = tl.load(part_ids + part, mask=chunk < chunks, other=_NO_ID)
        score = x
        if scale > 0:
            key = _row_key(params, tl.load(positions + row))
            score = _score(key, winner, (peak - x) * scale)
        _best, token = _first_of_best(score, winner)
    _emit(
        token, row, slot, flags, logits, stride, size, seen, parts, part_stride, ids, logprobs,
        chunks, CHUNKS, ADJUSTED,
    )  # fmt: skip


@triton.jit
def _bucket(z):
    bits = (z + _SHIFT).to(tl.int32, bitcast=True)
    return tl.minimum((bits >> 20) - _FIRST_BITS, _BUCKETS - 1)


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
    params = table + slot * _WORDS
    flags = tl.load(params + _FLAGS)
    if (flags & _IS_FILTERED) == 0:
        return
    peak = _row_peak(parts, row, tl.num_programs(1), CHUNKS)
    if not _is_valid(peak):
        return
    position = tl.load(positions + row)
    scale = _float(params + _INVERSE_TEMPERATURE)
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    x = _load(
        logits, row, stride, token, size, position, slot, params, flags, bias, seen, masks,
        ADJUSTED,
    )  # fmt: skip
    z = (peak - x) * scale
    # A bucket is a field of 4 bits, 16 of them in a word; 8 ids cannot overflow it.
    one = tl.full((_CHUNK,), 1, tl.int64)
    ones = tl.where(token < size, one << (4 * _bucket(z)).to(tl.int64), 0)
    packed = tl.sum(tl.reshape(ones, (_CHUNK // 8, 8)), 1)
    bucket = tl.arange(0, _BUCKETS)
    fields = (packed[None, :] >> (4 * bucket)[:, None].to(tl.int64)).to(tl.int32) & 15
    part = row * tl.num_programs(1) + chunk
    tl.store(counts + part * _BUCKETS + bucket, tl.sum(fields, 1))
    tl.store(masses + part, tl.sum(_weight(z)))


@triton.jit
def _total(masses, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(masses + row * chunks + chunk, mask=chunk < chunks, other=0))


@triton.jit
def _cut(params, flags, counts, masses, row, chunks, CHUNKS: tl.constexpr):
    """The last bucket that can have a survivor, and the number of ids up to it, per chunk."""
    chunk = tl.arange(0, CHUNKS)
    bucket = tl.arange(0, _BUCKETS)
    cell = (row * chunks + chunk)[:, None] * _BUCKETS + bucket[None, :]
    table = tl.load(counts + cell, mask=(chunk < chunks)[:, None], other=0)
    count = tl.sum(table, 0)
    cut = row * 0 + _BUCKETS - 1
    if (flags & (_HAS_TOP_K | _HAS_MIN_P)) != 0:
        # Top-p applies to what these leave, so its bound over all ids is not valid.
        if (flags & _HAS_TOP_K) != 0:
            enough = tl.cumsum(count) >= tl.load(params + _TOP_K)
            cut = tl.min(tl.where(enough, bucket, _BUCKETS - 1))
        if (flags & _HAS_MIN_P) != 0:
            cut = tl.minimum(cut, _bucket(_float(params + _MAX_Z)))
    else:
        # At most 1 - top_p of the mass is outside the nucleus. An id weighs at most as much as the
        # edge of its bucket, except for rounding, which the factor allows for.
        edge = ((bucket + _FIRST_BITS) << 20).to(tl.float32, bitcast=True) - _SHIFT
        bound = count.to(tl.float32) * tl.exp(-edge)
        past = tl.sum(tl.where(bucket[:, None] > bucket[None, :], bound[:, None], 0.0), 0)
        total = _total(masses, row, chunks, CHUNKS).to(tl.float32) / _ONE
        is_past = past * 1.001 <= (1.0 - _float(params + _TOP_P)) * total
        cut = tl.min(tl.where(is_past, bucket, _BUCKETS - 1))
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
    params = table + slot * _WORDS
    flags = tl.load(params + _FLAGS)
    if (flags & _IS_FILTERED) == 0:
        return
    peak = _row_peak(parts, row, tl.num_programs(1), CHUNKS)
    if not _is_valid(peak):
        return
    cut, by_chunk = _cut(params, flags, counts, masses, row, tl.num_programs(1), CHUNKS)
    index = tl.arange(0, CHUNKS)
    own = tl.sum(tl.where(index == chunk, by_chunk, 0))
    if (own == 0) | (tl.sum(by_chunk) > list_size):
        return
    position = tl.load(positions + row)
    scale = _float(params + _INVERSE_TEMPERATURE)
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    x = _load(
        logits, row, stride, token, size, position, slot, params, flags, bias, seen, masks,
        ADJUSTED,
    )  # fmt: skip
    z = (peak - x) * scale
    is_listed = ((token < size) & (_bucket(z) <= cut)).to(tl.int32)
    begin = row.to(tl.int64) * list_size + tl.sum(tl.where(index < chunk, by_chunk, 0))
    target = begin + tl.cumsum(is_listed) - is_listed
    tl.store(keys + target, z.to(tl.int32, bitcast=True), mask=is_listed != 0)
    tl.store(list_ids + target, token, mask=is_listed != 0)


@triton.jit
def _entry(
    index, num_listed, is_list, keys, list_ids, list_size, peak, scale,
    logits, row, stride, size, position, slot, params, flags, bias, seen, masks,
    ADJUSTED: tl.constexpr,
):  # fmt: skip
    """Keys and ids at these indices of a row's list or of the row; infinite past its end."""
    if is_list:
        mask = index < num_listed
        source = row.to(tl.int64) * list_size + index
        key = tl.load(keys + source, mask=mask, other=_INF_BITS)
        token = tl.load(list_ids + source, mask=mask, other=_NO_ID)
    else:
        x = _load(
            logits, row, stride, index, size, position, slot, params, flags, bias, seen, masks,
            ADJUSTED,
        )  # fmt: skip
        key = ((peak - x) * scale).to(tl.int32, bitcast=True)
        token = index
    return key, token


@triton.jit
def _search(
    need, limit, by_mass, end, num_listed, is_list, keys, list_ids, list_size, peak, scale,
    logits, row, stride, size, position, slot, params, flags, bias, seen, masks,
    ADJUSTED: tl.constexpr,
):  # fmt: skip
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
        for start in range(0, end, _WIDE_BLOCK):
            key, _token = _entry(
                start + lane, num_listed, is_list, keys, list_ids, list_size, peak, scale,
                logits, row, stride, size, position, slot, params, flags, bias, seen, masks,
                ADJUSTED,
            )  # fmt: skip
            weight = tl.full((_WIDE_BLOCK,), 1, tl.int64)
            if by_mass:
                weight = _weight(key.to(tl.float32, bitcast=True))
            weight = tl.where(key <= limit, weight, 0)
            held += tl.sum(tl.where(key[None, :] <= last[:, None], weight[None, :], 0), 1)
        low += tl.sum((held < need).to(tl.int64)) << shift
        shift -= 3
    return tl.minimum(low, _INF_BITS).to(tl.int32)


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
    params = table + slot * _WORDS
    flags = tl.load(params + _FLAGS)
    if (flags & _IS_FILTERED) == 0:
        return
    chunks = (size + _CHUNK - 1) // _CHUNK
    peak = _row_peak(parts, row, chunks, CHUNKS)
    position = tl.load(positions + row)
    token_id = tl.where(peak == float("inf"), _INVALID_ID, row * 0)
    limit = row * 0 + (_INF_BITS - 1)
    if _is_valid(peak):
        scale = _float(params + _INVERSE_TEMPERATURE)
        lane = tl.arange(0, _WIDE_BLOCK)
        _last, by_chunk = _cut(params, flags, counts, masses, row, chunks, CHUNKS)
        num_listed = tl.sum(by_chunk)
        is_list = num_listed <= list_size
        end = tl.where(is_list, num_listed, size)
        if (flags & _HAS_TOP_K) != 0:
            need = tl.load(params + _TOP_K).to(tl.int64)
            limit = tl.minimum(limit, _search(
                need, limit, False, end, num_listed, is_list, keys, list_ids, list_size, peak,
                scale, logits, row, stride, size, position, slot, params, flags, bias, seen, masks,
                ADJUSTED,
            ))  # fmt: skip
        if (flags & _HAS_MIN_P) != 0:
            limit = tl.minimum(limit, tl.load(params + _MAX_Z))
        if (flags & _HAS_TOP_P) != 0:
            total = _total(masses, row, chunks, CHUNKS)
            if (flags & (_HAS_TOP_K | _HAS_MIN_P)) != 0:
                mass = tl.zeros((_WIDE_BLOCK,), tl.int64)
                for start in range(0, end, _WIDE_BLOCK):
                    key, _token = _entry(
                        start + lane, num_listed, is_list, keys, list_ids, list_size, peak, scale,
                        logits, row, stride, size, position, slot, params, flags, bias, seen, masks,
                        ADJUSTED,
                    )  # fmt: skip
                    weight = _weight(key.to(tl.float32, bitcast=True))
                    mass += tl.where(key <= limit, weight, 0)
                total = tl.sum(mass)
            top_p = _float(params + _TOP_P).to(tl.float64)
            need = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            limit = tl.minimum(limit, _search(
                need, limit, True, end, num_listed, is_list, keys, list_ids, list_size, peak,
                scale, logits, row, stride, size, position, slot, params, flags, bias, seen, masks,
                ADJUSTED,
            ))  # fmt: skip
        noise_key = _row_key(params, position)
        score = tl.full((_WIDE_BLOCK,), float("-inf"), tl.float32)
        best_id = tl.full((_WIDE_BLOCK,), _NO_ID, tl.int32)
        for start in range(0, end, _WIDE_BLOCK):
            key, token = _entry(
                start + lane, num_listed, is_list, keys, list_ids, list_size, peak, scale,
                logits, row, stride, size, position, slot, params, flags, bias, seen, masks,
                ADJUSTED,
            )  # fmt: skip
            value = _score(noise_key, token, key.to(tl.float32, bitcast=True))
            is_better = (key <= limit) & (value > score)
            score = tl.where(is_better, value, score)
            best_id = tl.where(is_better, token, best_id)
        _best, token_id = _first_of_best(score, best_id)
    tl.store(limits + row, limit)
    _emit(
        token_id, row, slot, flags, logits, stride, size, seen, parts, part_stride, ids, logprobs,
        chunks, CHUNKS, ADJUSTED,
    )  # fmt: skip
