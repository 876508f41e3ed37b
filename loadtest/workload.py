"""Requests from a seed: when each arrives, what it asks, how long its answer shall be.

Each property of each request is drawn from a generator of its own, keyed by (seed, request,
property). So one seed gives the same requests whatever else is set: more prompts only append,
longer outputs leave the prompts alone, and another rate stretches the same arrivals.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from loadtest.arrivals import arrival_times
from loadtest.config import FIRST_TOKEN_ID, Dataset, PromptFormat, WorkloadConfig
from loadtest.datasets import (
    MOONCAKE_BLOCK_TOKENS,
    BadDataset,
    TextRow,
    TraceRow,
    count_tokens,
    read_azure,
    read_burstgpt,
    read_custom,
    read_mooncake,
    read_sharegpt,
)

# Short common words: most tokenizers give each, with the space before it, a token of its own.
_WORD_LIST = """
    the of and to in is that for it as was with be by on not he this are or his from at which but
    have an had they you were their one all we can her has there been if more when will would who
    so no water time long day people way house work part place year light hand high old great men
    see think find look new sound take only little know world every name good line right move live
    real left tell same show large turn ask read need land home big air play small end put well
"""
WORDS = _WORD_LIST.split()

_TRACES: dict[Dataset, Callable[[Path], Iterator[TraceRow]]] = {
    Dataset.AZURE: read_azure,
    Dataset.BURSTGPT: read_burstgpt,
    Dataset.MOONCAKE: read_mooncake,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request of a workload. arrival_s counts from the start of the replay.

    num_prompt_tokens is exact where the prompt is ids; where it is text it counts made-up words,
    or guesses from the length of a file's. messages stand in the place of the prompt, for chat.
    """

    index: int
    arrival_s: float
    prompt: list[int] | str
    num_prompt_tokens: int
    max_tokens: int
    messages: list[dict[str, Any]] | None = None


def make_requests(config: WorkloadConfig) -> list[TimedRequest]:
    """The workload, in order of arrival. A file may have fewer than num_prompts; BadDataset: none.

    Conversations are drawn from the whole file; a trace or a custom file is taken from its start.
    """
    if config.dataset.is_trace:
        return _from_trace(config)
    if config.dataset.is_file:
        return _from_texts(config)
    prefixes: list[list[int]] = []
    if config.dataset is Dataset.SHARED_PREFIX:
        prefixes = [_prefix(config, number) for number in range(config.num_prefixes)]
    arrivals = _arrivals(config, config.num_prompts)
    return [_request(config, index, at, prefixes) for index, at in enumerate(arrivals)]


def make_strangers(config: WorkloadConfig, count: int) -> list[TimedRequest]:
    """Requests as long as the workload's first ones, all at once, that share no prompt with it."""
    other = replace(config, seed=-1 - config.seed)
    requests = make_requests(replace(config, num_prompts=count))
    return [
        replace(request, arrival_s=0.0, messages=None, prompt=_stranger(other, request))
        for request in requests
    ]


def _stranger(config: WorkloadConfig, request: TimedRequest) -> list[int] | str:
    key = f"{config.seed}/{request.index}/stranger"
    ids = make_prompt(key, request.num_prompt_tokens, config.vocab_size)
    return ids if isinstance(request.prompt, list) else _text(ids)


def _arrivals(config: WorkloadConfig, count: int) -> list[float]:
    return arrival_times(
        config.seed, count, config.request_rate, burstiness=config.burstiness, ramp=config.ramp
    )


def _from_trace(config: WorkloadConfig) -> list[TimedRequest]:
    assert config.dataset_path is not None
    rows = list(islice(_TRACES[config.dataset](config.dataset_path), config.num_prompts))
    _check_any(config, len(rows))
    rows.sort(key=lambda row: row.at_s)
    if config.follows_trace:
        arrivals = [(row.at_s - rows[0].at_s) / config.trace_speedup for row in rows]
    else:
        arrivals = _arrivals(config, len(rows))
    blocks: dict[int, list[int]] = {}
    requests = []
    for index, (row, at) in enumerate(zip(rows, arrivals, strict=True)):
        ids = _trace_prompt(config, index, row, blocks)
        requests.append(
            TimedRequest(
                index=index,
                arrival_s=at,
                prompt=ids if config.prompt_format is PromptFormat.IDS else _text(ids),
                num_prompt_tokens=len(ids),
                max_tokens=row.num_output_tokens,
            )
        )
    return requests


def _trace_prompt(
    config: WorkloadConfig, index: int, row: TraceRow, blocks: dict[int, list[int]]
) -> list[int]:
    """Equal hash ids become equal blocks; tokens that no hash id covers are this request's own."""
    ids: list[int] = []
    for hash_id in row.hash_ids:
        if hash_id not in blocks:
            key = f"{config.seed}/block/{hash_id}"
            blocks[hash_id] = make_prompt(key, MOONCAKE_BLOCK_TOKENS, config.vocab_size)
        ids += blocks[hash_id]
    num_more = row.num_prompt_tokens - len(ids)
    if num_more > 0:
        ids += make_prompt(f"{config.seed}/{index}/prompt", num_more, config.vocab_size)
    return ids[: row.num_prompt_tokens]


def _from_texts(config: WorkloadConfig) -> list[TimedRequest]:
    assert config.dataset_path is not None
    if config.dataset is Dataset.SHAREGPT:
        rows = list(read_sharegpt(config.dataset_path, config.sharegpt_output_len))
        Random(f"{config.seed}/conversations").shuffle(rows)
        rows = rows[: config.num_prompts]
    else:
        custom = read_custom(config.dataset_path, is_chat=config.is_chat)
        rows = list(islice(custom, config.num_prompts))
    _check_any(config, len(rows))
    arrivals = _arrivals(config, len(rows))
    return [
        _text_request(config, index, at, row)
        for index, (row, at) in enumerate(zip(rows, arrivals, strict=True))
    ]


def _text_request(
    config: WorkloadConfig, index: int, arrival_s: float, row: TextRow
) -> TimedRequest:
    if isinstance(row.prompt, list):
        num_tokens = len(row.prompt)
    else:
        contents = [str(message.get("content")) for message in row.messages or []]
        num_tokens = count_tokens(" ".join([row.prompt, *contents]))
    return TimedRequest(
        index=index,
        arrival_s=arrival_s,
        prompt=row.prompt,
        num_prompt_tokens=num_tokens,
        max_tokens=row.max_tokens or config.custom_output_len,
        messages=row.messages,
    )


def _check_any(config: WorkloadConfig, num_rows: int) -> None:
    if not num_rows:
        raise BadDataset(f"{config.dataset_path} has no request that {config.dataset} can ask")


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
