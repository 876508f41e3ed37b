"""A slot's words in the table: where each setting of a request is, and how it is written."""

import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.memory.host import tensor_to_device
from penstock.engine.sampling.sampler import MIN_TEMPERATURE, mixed_seed
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
