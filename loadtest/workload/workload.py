"""Requests from a seed: arrival time, prompt and output length of each.

Each property of each request comes from its own random generator, keyed by (seed, request,
property). So one seed gives the same requests whatever else is set: more prompts only append,
longer outputs do not change the prompts, and another rate stretches the same arrivals.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any, TypeAlias, TypeVar

from penstock.loadtest.workload.config import (
    DEFAULT_CUSTOM_OUTPUT_LEN,
    FIRST_TOKEN_ID,
    Dataset,
    PromptFormat,
    WorkloadConfig,
    arrival_times,
)
from penstock.loadtest.workload.datasets import (
    READERS,
    BadDataset,
    TextRow,
    TraceRow,
    read_custom,
    read_sharegpt,
)
from penstock.loadtest.workload.token_counter import TokenCounter, estimate_tokens
from penstock.scheduler.errors import InvalidConfig

T = TypeVar("T")
_Counted: TypeAlias = tuple[TextRow, int, int]  # and the tokens of its prompt and of its output

# Short common words: in most tokenizers each, with the space before it, is one token.
_WORD_LIST = """
    the of and to in is that for it as was with be by on not he this are or his from at which but
    have an had they you were their one all we can her has there been if more when will would who
    so no water time long day people way house work part place year light hand high old great men
    see think find look new sound take only little know world every name good line right move live
    real left tell same show large turn ask read need land home big air play small end put well
"""
WORDS = _WORD_LIST.split()

# The limits of `vllm bench serve` for ShareGPT, to use the same conversations.
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048
# Texts per call of the counter: a tokenizer encodes them in parallel; few are counted in vain.
TEXTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request of a workload. arrival_s counts from the start of the replay.

    num_prompt_tokens is exact for token ids; for text it is the number of synthetic words, or the
    counter's result for a file's text. messages, for chat, replace the prompt. tenant, priority: of
    a recording, which the simulation follows; see `penstock.scheduler.types.Request`.
    """

    index: int
    arrival_s: float
    prompt: list[int] | str
    num_prompt_tokens: int
    max_tokens: int
    messages: list[dict[str, Any]] | None = None
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in order of arrival, and how many were left out as too long for the model."""

    requests: list[TimedRequest]
    num_too_long: int


def make_requests(
    config: WorkloadConfig, count: TokenCounter = estimate_tokens
) -> list[TimedRequest]:
    return make_workload(config, count).requests


def make_workload(config: WorkloadConfig, count: TokenCounter = estimate_tokens) -> Workload:
    """A file may have fewer than num_prompts requests; if none, raises BadDataset.

    Conversations are drawn from the whole file; a trace or a custom file is read from its start.
    count: counts the tokens of a file's texts.
    """
    limit = _ContextLimit(config.max_model_len)
    if config.dataset.is_trace:
        requests = _trace_requests(config, limit)
    elif config.dataset.has_texts:
        requests = _text_requests(config, count, limit)
    else:
        requests = _synthetic_requests(config, limit)
    if requests:
        return Workload(requests=requests, num_too_long=limit.num_too_long)
    if limit.num_too_long:
        raise InvalidConfig(
            f"the model accepts {config.max_model_len} tokens, prompt and output together, and "
            f"none of the {limit.num_too_long} requests is that short; make prompts or outputs "
            "shorter, or serve with a larger --max-model-len"
        )
    raise BadDataset(f"{config.dataset_path} has no request that {config.dataset} can use")


class _ContextLimit:
    """Which requests fit into the model's context; counts the others. limit: None for none."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.num_too_long = 0

    def fits(self, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        if self._limit is None or num_prompt_tokens + num_output_tokens <= self._limit:
            return True
        self.num_too_long += 1
        return False


def _synthetic_requests(config: WorkloadConfig, limit: _ContextLimit) -> list[TimedRequest]:
    if config.dataset.has_shared_prefixes:
        lengths = [config.shared_prefix_len] * config.num_prefixes
    else:
        lengths = [config.random_prefix_len] if config.random_prefix_len else []
    prefixes = [
        make_prompt(f"{config.seed}/prefix/{number}", length, config.vocab_size)
        for number, length in enumerate(lengths)
    ]
    arrivals = _arrivals(config, config.num_prompts)
    requests = (_request(config, index, at, prefixes) for index, at in enumerate(arrivals))
    return [each for each in requests if limit.fits(each.num_prompt_tokens, each.max_tokens)]


def make_warmup_requests(config: WorkloadConfig, number: int) -> list[TimedRequest]:
    """Requests of the workload's lengths, all at once, that share no prompt prefix with it."""

    def prompt(request: TimedRequest) -> list[int] | str:
        key = f"{-1 - config.seed}/{request.index}/warmup"
        ids = make_prompt(key, request.num_prompt_tokens, config.vocab_size)
        return ids if isinstance(request.prompt, list) else _text(ids)

    return [
        replace(request, arrival_s=0.0, messages=None, prompt=prompt(request))
        for request in make_requests(replace(config, num_prompts=number))
    ]


def _arrivals(config: WorkloadConfig, count: int) -> list[float]:
    return arrival_times(
        config.seed, count, config.request_rate, burstiness=config.burstiness, ramp=config.ramp
    )


def _trace_requests(config: WorkloadConfig, limit: _ContextLimit) -> list[TimedRequest]:
    assert config.dataset_path is not None
    fitting = (
        row
        for row in READERS[config.dataset](config.dataset_path)
        if limit.fits(row.num_prompt_tokens, row.num_output_tokens)
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
                tenant=row.tenant,
                priority=row.priority,
            )
        )
    return requests


def _trace_prompt(
    config: WorkloadConfig, index: int, row: TraceRow, blocks: dict[int, list[int]]
) -> list[int]:
    """Equal hash ids become equal blocks; tokens without a hash id are unique to this request."""
    ids: list[int] = []
    for hash_id in row.hash_ids:
        if hash_id not in blocks:
            key = f"{config.seed}/block/{hash_id}"
            blocks[hash_id] = make_prompt(key, row.block_tokens, config.vocab_size)
        ids += blocks[hash_id]
    num_more = row.num_prompt_tokens - len(ids)
    if num_more > 0:
        ids += make_prompt(f"{config.seed}/{index}/prompt", num_more, config.vocab_size)
    return ids[: row.num_prompt_tokens]


def _text_requests(
    config: WorkloadConfig, count: TokenCounter, limit: _ContextLimit
) -> list[TimedRequest]:
    rows = (_sharegpt_rows if config.dataset is Dataset.SHAREGPT else _custom_rows)(config, count)
    fitting = (each for each in rows if limit.fits(*each[1:]))
    chosen = list(islice(fitting, config.num_prompts))
    arrivals = _arrivals(config, len(chosen))
    return [
        TimedRequest(
            index=index,
            arrival_s=arrivals[index],
            prompt=row.prompt,
            num_prompt_tokens=num_prompt,
            max_tokens=num_output,
            messages=row.messages,
        )
        for index, (row, num_prompt, num_output) in enumerate(chosen)
    ]


def _sharegpt_rows(config: WorkloadConfig, count: TokenCounter) -> Iterator[_Counted]:
    """First turns, with the second turn's length as output length unless one is given. Very short
    and very long ones are left out, as in `vllm bench serve`."""
    assert config.dataset_path is not None
    turns = read_sharegpt(config.dataset_path)
    if config.is_shuffled:
        Random(f"{config.seed}/conversations").shuffle(turns)
    length = config.sharegpt_output_len
    for some in _batches(turns):
        prompts = count([prompt for prompt, _ in some])
        outputs = count([output for _, output in some]) if length is None else [length] * len(some)
        for (prompt, _), num_prompt, num_output in zip(some, prompts, outputs, strict=True):
            is_long_enough = num_prompt >= SHAREGPT_MIN_TOKENS and (
                length or num_output >= SHAREGPT_MIN_TOKENS
            )
            is_total_allowed = num_prompt + num_output <= SHAREGPT_MAX_TOTAL
            if is_long_enough and num_prompt <= SHAREGPT_MAX_PROMPT and is_total_allowed:
                yield TextRow(prompt=prompt), num_prompt, num_output


def _custom_rows(config: WorkloadConfig, count: TokenCounter) -> Iterator[_Counted]:
    assert config.dataset_path is not None
    for rows in _batches(read_custom(config.dataset_path, is_chat=config.is_chat)):
        counts = count([_text_of(row) for row in rows])
        for row, num_words in zip(rows, counts, strict=True):
            num_tokens = len(row.prompt) if isinstance(row.prompt, list) else num_words
            max_tokens = config.custom_output_len or row.max_tokens or DEFAULT_CUSTOM_OUTPUT_LEN
            yield row, num_tokens, max_tokens


def _text_of(row: TextRow) -> str:
    """All text of a row, to count its tokens; empty for token ids."""
    contents = [str(message.get("content")) for message in row.messages or []]
    return " ".join([row.prompt if isinstance(row.prompt, str) else "", *contents])


def _batches(rows: Iterable[T]) -> Iterator[list[T]]:
    rows = iter(rows)
    while some := list(islice(rows, TEXTS_AT_ONCE)):
        yield some


def _request(
    config: WorkloadConfig, index: int, arrival_s: float, prefixes: list[list[int]]
) -> TimedRequest:
    key = f"{config.seed}/{index}"

    def draw(what: str) -> Random:
        return Random(f"{key}/{what}")

    ratio = config.output_range_ratio
    output_ratio = config.range_ratio if ratio is None else ratio
    input_len = _length(draw("input length"), config.input_len, config.range_ratio)
    ids = make_prompt(f"{key}/prompt", input_len, config.vocab_size)
    if prefixes:
        ids = prefixes[draw("prefix").randrange(len(prefixes))] + ids
    return TimedRequest(
        index=index,
        arrival_s=arrival_s,
        prompt=ids if config.prompt_format is PromptFormat.IDS else _text(ids),
        num_prompt_tokens=len(ids),
        max_tokens=_length(draw("output length"), config.output_len, output_ratio),
    )


def _length(random: Random, mean: int, range_ratio: float) -> int:
    low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
    return random.randint(max(1, low), high)


def make_prompt(key: str, num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids that depend on the key alone; a longer prompt of a key extends a shorter one."""
    return Random(key).choices(range(FIRST_TOKEN_ID, vocab_size), k=num_tokens)


def _text(ids: list[int]) -> str:
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in ids)
