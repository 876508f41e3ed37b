"""Requests from a seed: when each arrives, what it asks, how long its answer shall be.

Each property of each request is drawn from a generator of its own, keyed by (seed, request,
property). So one seed gives the same requests whatever else is set: more prompts only append,
longer outputs leave the prompts alone, and another rate stretches the same arrivals.
"""

import math
from dataclasses import dataclass
from random import Random

from loadtest.config import FIRST_TOKEN_ID, Dataset, PromptFormat, WorkloadConfig

# Short common words: most tokenizers give each, with the space before it, a token of its own.
_WORD_LIST = """
    the of and to in is that for it as was with be by on not he this are or his from at which but
    have an had they you were their one all we can her has there been if more when will would who
    so no water time long day people way house work part place year light hand high old great men
    see think find look new sound take only little know world every name good line right move live
    real left tell same show large turn ask read need land home big air play small end put well
"""
WORDS = _WORD_LIST.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request of a workload. arrival_s counts from the start of the replay.

    num_prompt_tokens is exact where the prompt is ids, and one token a word where it is text.
    """

    index: int
    arrival_s: float
    prompt: list[int] | str
    num_prompt_tokens: int
    max_tokens: int


def make_requests(config: WorkloadConfig) -> list[TimedRequest]:
    """The workload, in order of arrival."""
    prefixes: list[list[int]] = []
    if config.dataset is Dataset.SHARED_PREFIX:
        prefixes = [_prefix(config, number) for number in range(config.num_prefixes)]
    arrivals = arrival_times(config.seed, config.num_prompts, config.request_rate)
    return [_request(config, index, at, prefixes) for index, at in enumerate(arrivals)]


def arrival_times(seed: int, count: int, rate: float) -> list[float]:
    """A Poisson process of `rate` requests per second; an infinite rate is all at once."""
    if math.isinf(rate):
        return [0.0] * count
    random = Random(f"{seed}/arrivals")
    times, now = [], 0.0
    for _ in range(count):
        now += random.expovariate(1.0)
        times.append(now / rate)
    return times


def _request(
    config: WorkloadConfig, index: int, arrival_s: float, prefixes: list[list[int]]
) -> TimedRequest:
    key = f"{config.seed}/{index}"

    def draw(what: str) -> Random:
        return Random(f"{key}/{what}")

    input_len = _length(draw("input length"), config.input_len, config.range_ratio)
    ids = make_prompt(f"{key}/prompt", input_len, config.vocab_size)
    if prefixes:
        ids = prefixes[draw("prefix").randrange(len(prefixes))] + ids
    return TimedRequest(
        index=index,
        arrival_s=arrival_s,
        prompt=ids if config.prompt_format is PromptFormat.IDS else _text(ids),
        num_prompt_tokens=len(ids),
        max_tokens=_length(draw("output length"), config.output_len, config.range_ratio),
    )


def _length(random: Random, mean: int, range_ratio: float) -> int:
    low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
    return random.randint(max(1, low), high)


def make_prompt(key: str, num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids that depend on nothing but the key; a longer prompt of one key goes on from it."""
    return Random(key).choices(range(FIRST_TOKEN_ID, vocab_size), k=num_tokens)


def _prefix(config: WorkloadConfig, number: int) -> list[int]:
    key = f"{config.seed}/prefix/{number}"
    return make_prompt(key, config.shared_prefix_len, config.vocab_size)


def _text(ids: list[int]) -> str:
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in ids)
