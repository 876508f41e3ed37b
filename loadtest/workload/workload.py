"""Requests from a seed: when each arrives, what it asks, how long its answer shall be.

Each property of each request is drawn from a generator of its own, keyed by (seed, request,
property). So one seed gives the same requests whatever else is set: more prompts only append,
longer outputs leave the prompts alone, and another rate stretches the same arrivals.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from penstock.loadtest.workload.arrivals import arrival_times
from penstock.loadtest.workload.config import FIRST_TOKEN_ID, Dataset, PromptFormat, WorkloadConfig
from penstock.loadtest.workload.datasets import (
    MOONCAKE_BLOCK_TOKENS,
    BadDataset,
    TextRow,
    TraceRow,
    read_azure,
    read_burstgpt,
    read_custom,
    read_mooncake,
    read_sharegpt,
)
from penstock.loadtest.workload.lengths import Count, estimate
from penstock.scheduler.errors import InvalidConfig

T = TypeVar("T")

# Short common words: most tokenizers give each, with the space before it, a token of its own.
_WORD_LIST = """
    the of and to in is that for it as was with be by on not he this are or his from at which but
    have an had they you were their one all we can her has there been if more when will would who
    so no water time long day people way house work part place year light hand high old great men
    see think find look new sound take only little know world every name good line right move live
    real left tell same show large turn ask read need land home big air play small end put well
"""
WORDS = _WORD_LIST.split()

# The limits of `vllm bench serve` for ShareGPT, so that the same conversations are asked.
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048
# Texts that are counted together: a tokenizer takes them in parallel, and few are too many.
TEXTS_AT_ONCE = 64

_TRACES: dict[Dataset, Callable[[Path], Iterator[TraceRow]]] = {
    Dataset.AZURE: read_azure,
    Dataset.BURSTGPT: read_burstgpt,
    Dataset.MOONCAKE: read_mooncake,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request of a workload. arrival_s counts from the start of the replay.

    num_prompt_tokens is exact where the prompt is ids; where it is text it counts made-up words,
    or what `count` says of a file's. messages stand in the place of the prompt, for chat.
    """

    index: int
    arrival_s: float
    prompt: list[int] | str
    num_prompt_tokens: int
    max_tokens: int
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in order of arrival, and how many were left out for want of room in the model."""

    requests: list[TimedRequest]
    num_too_long: int


def make_requests(config: WorkloadConfig, count: Count = estimate) -> list[TimedRequest]:
    """The requests of `make_workload`."""
    return make_workload(config, count).requests


def make_workload(config: WorkloadConfig, count: Count = estimate) -> Workload:
    """A file may have fewer than num_prompts requests; BadDataset: none.

    Conversations are drawn from the whole file; a trace or a custom file is taken from its start.
    count: of the tokens of the texts of a file.
    """
    room = _Room(config.max_model_len)
    if config.dataset.is_trace:
        requests = _from_trace(config, room)
    elif config.dataset.is_file:
        requests = _from_texts(config, count, room)
    else:
        requests = _made_up(config, room)
    if requests:
        return Workload(requests=requests, num_too_long=room.num_too_long)
    if room.num_too_long:
        raise InvalidConfig(
            f"the model takes {config.max_model_len} tokens, prompt and answer together, and none "
            f"of the {room.num_too_long} requests is that short; ask for shorter prompts or "
            "answers, or serve with a longer --max-model-len"
        )
    raise BadDataset(f"{config.dataset_path} has no request that {config.dataset} can ask")


class _Room:
    """What fits into the model's context, and how many did not. limit: None for no limit."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.num_too_long = 0

    def has(self, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        if self._limit is None or num_prompt_tokens + num_output_tokens <= self._limit:
            return True
        self.num_too_long += 1
        return False


def _made_up(config: WorkloadConfig, room: _Room) -> list[TimedRequest]:
    if config.dataset is Dataset.SHARED_PREFIX:
        lengths = [config.shared_prefix_len] * config.num_prefixes
    else:
        lengths = [config.random_prefix_len] if config.random_prefix_len else []
    prefixes = [
        make_prompt(f"{config.seed}/prefix/{number}", length, config.vocab_size)
        for number, length in enumerate(lengths)
    ]
    arrivals = _arrivals(config, config.num_prompts)
    requests = (_request(config, index, at, prefixes) for index, at in enumerate(arrivals))
    return [each for each in requests if room.has(each.num_prompt_tokens, each.max_tokens)]


def make_strangers(config: WorkloadConfig, number: int) -> list[TimedRequest]:
    """Requests as long as the workload's first ones, all at once, that share no prompt with it."""
    other = replace(config, seed=-1 - config.seed)
    requests = make_requests(replace(config, num_prompts=number))
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


def _from_trace(config: WorkloadConfig, room: _Room) -> list[TimedRequest]:
    assert config.dataset_path is not None
    fitting = (
        row
        for row in _TRACES[config.dataset](config.dataset_path)
        if room.has(row.num_prompt_tokens, row.num_output_tokens)
    )
    rows = list(islice(fitting, config.num_prompts))
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


def _from_texts(config: WorkloadConfig, count: Count, room: _Room) -> list[TimedRequest]:
    is_conversations = config.dataset is Dataset.SHAREGPT
    rows = _conversations(config, count) if is_conversations else _lines(config, count)
    fitting = (row for row in rows if room.has(row.num_prompt_tokens, row.max_tokens))
    requests = list(islice(fitting, config.num_prompts))
    arrivals = _arrivals(config, len(requests))
    return [
        replace(request, index=index, arrival_s=at)
        for index, (request, at) in enumerate(zip(requests, arrivals, strict=True))
    ]


def _conversations(config: WorkloadConfig, count: Count) -> Iterator[TimedRequest]:
    """First turns, as long answered as the second ones are, unless a length is given.

    What is very short or long is left out, as in `vllm bench serve`.
    """
    assert config.dataset_path is not None
    turns = read_sharegpt(config.dataset_path)
    Random(f"{config.seed}/conversations").shuffle(turns)
    length = config.sharegpt_output_len
    for some in _batches(turns):
        prompts = count([prompt for prompt, _ in some])
        answers = count([answer for _, answer in some]) if length is None else [length] * len(some)
        for (prompt, _), num_prompt, num_answer in zip(some, prompts, answers, strict=True):
            if _is_in_sharegpts_limits(num_prompt, num_answer, is_answer_given=length is not None):
                yield _text_request(TextRow(prompt=prompt), num_prompt, num_answer)


def _is_in_sharegpts_limits(num_prompt: int, num_answer: int, *, is_answer_given: bool) -> bool:
    is_long_enough = num_prompt >= SHAREGPT_MIN_TOKENS and (
        is_answer_given or num_answer >= SHAREGPT_MIN_TOKENS
    )
    total = num_prompt + num_answer
    return is_long_enough and num_prompt <= SHAREGPT_MAX_PROMPT and total <= SHAREGPT_MAX_TOTAL


def _lines(config: WorkloadConfig, count: Count) -> Iterator[TimedRequest]:
    assert config.dataset_path is not None
    for rows in _batches(read_custom(config.dataset_path, is_chat=config.is_chat)):
        counts = count([_words(row) for row in rows])
        for row, num_words in zip(rows, counts, strict=True):
            num_tokens = len(row.prompt) if isinstance(row.prompt, list) else num_words
            yield _text_request(row, num_tokens, row.max_tokens or config.custom_output_len)


def _words(row: TextRow) -> str:
    """All text of a row, to count its tokens; ids are as many as they are."""
    contents = [str(message.get("content")) for message in row.messages or []]
    return " ".join([row.prompt if isinstance(row.prompt, str) else "", *contents])


def _batches(rows: Iterable[T]) -> Iterator[list[T]]:
    rows = iter(rows)
    while some := list(islice(rows, TEXTS_AT_ONCE)):
        yield some


def _text_request(row: TextRow, num_prompt_tokens: int, max_tokens: int) -> TimedRequest:
    return TimedRequest(
        index=0,
        arrival_s=0.0,
        prompt=row.prompt,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        messages=row.messages,
    )


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


def _text(ids: list[int]) -> str:
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in ids)
