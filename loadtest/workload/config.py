"""The settings of a workload: which prompts, how long, and when they are sent.

Gaps between arrivals are gamma-distributed, at a constant rate or a ramp. All draws have mean 1 and
come from one generator: another rate stretches the same arrivals, and more requests only append to
them.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from penstock.loadtest.command_line import require
from penstock.scheduler.errors import InvalidConfig


class RampStrategy(StrEnum):
    """How the rate changes from start to end: by equal steps, or by equal factors."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Rates in requests per second. As in vLLM, the rate follows the share of requests sent."""

    strategy: RampStrategy
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        for flag, rate in (
            ("--ramp-up-start-rps", self.start_rps),
            ("--ramp-up-end-rps", self.end_rps),
        ):
            require(0 < rate < math.inf, flag, rate, "more than 0 and finite")

    def rate_at(self, share: float) -> float:
        """The rate when this share of the requests, from 0 to 1, has been sent."""
        if self.strategy is RampStrategy.LINEAR:
            return self.start_rps + (self.end_rps - self.start_rps) * share
        return self.start_rps * math.pow(self.end_rps / self.start_rps, share)


def arrival_times(
    seed: int, count: int, rate: float, *, burstiness: float = 1.0, ramp: Ramp | None = None
) -> list[float]:
    """Seconds from the start. An infinite rate is all at once; a ramp replaces the rate.

    burstiness: the shape of the gamma distribution: 1 is a Poisson process, less is bursty, more
    is even.
    """
    if math.isinf(rate) and ramp is None:
        return [0.0] * count
    random = Random(f"{seed}/arrivals")
    times, now = [], 0.0
    for index in range(count):
        current = ramp.rate_at(index / max(1, count - 1)) if ramp else rate
        now += random.gammavariate(burstiness, 1 / burstiness) / current
        times.append(now)
    return times


# Ids below 3 are <unk>, <s> and </s> in many vocabularies; every model that we know has 500 ids.
FIRST_TOKEN_ID = 3
DEFAULT_VOCAB_SIZE = 500
DEFAULT_CUSTOM_OUTPUT_LEN = 256  # vLLM's


class Dataset(StrEnum):
    """Synthetic prompts that share nothing, or one of a few prefixes; or the requests of a file."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    PREFIX_REPETITION = "prefix_repetition"  # vLLM's name of a shared prefix, with its own flags
    SHAREGPT = "sharegpt"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    RECORDING = "recording"  # a result of `penstock bench --save-detailed`
    TRAFFIC = "traffic"  # a file of `penstock serve --record-traffic`
    CUSTOM = "custom"

    @property
    def is_file(self) -> bool:
        return self is not Dataset.RANDOM and not self.has_shared_prefixes

    @property
    def has_shared_prefixes(self) -> bool:
        return self in (Dataset.SHARED_PREFIX, Dataset.PREFIX_REPETITION)

    @property
    def is_trace(self) -> bool:
        """Lengths and times without text: prompts are synthetic; arrivals may be the trace's."""
        return self.is_file and not self.has_texts

    @property
    def has_texts(self) -> bool:
        """Conversations or prompts as text, whose tokens have to be counted."""
        return self in (Dataset.SHAREGPT, Dataset.CUSTOM)


class PromptFormat(StrEnum):
    """Token ids give exact lengths; /v1/chat/completions accepts text only."""

    IDS = "ids"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Which requests are made. Lengths are in tokens, request_rate in requests per second.

    range_ratio r draws lengths uniformly from [(1 - r) * length, (1 + r) * length], ends included;
    output_range_ratio is that of outputs if it is another.
    A shared prefix adds to input_len, which is then the length of the unique part.
    A trace's arrival times are divided by trace_speedup; a rate or a ramp replaces them.
    sharegpt_output_len and custom_output_len replace the file's lengths.
    is_shuffled: conversations are drawn from the whole ShareGPT file, not taken from its start.
    Every random prompt starts with the same random_prefix_len tokens.
    Requests whose prompt and output need more than max_model_len tokens are left out.
    """

    seed: int = 0
    num_prompts: int = 1000
    dataset: Dataset = Dataset.RANDOM
    prompt_format: PromptFormat = PromptFormat.IDS
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    output_range_ratio: float | None = None
    random_prefix_len: int = 0
    shared_prefix_len: int = 256
    num_prefixes: int = 8
    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None
    vocab_size: int = DEFAULT_VOCAB_SIZE
    dataset_path: Path | None = None
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    is_shuffled: bool = True
    trace_speedup: float = 1.0
    is_chat: bool = False
    max_model_len: int | None = None

    @property
    def follows_trace(self) -> bool:
        """Whether the file gives the arrival times."""
        return self.dataset.is_trace and math.isinf(self.request_rate) and self.ramp is None

    @property
    def needs_answers_counted(self) -> bool:
        """Whether output lengths are the token counts of texts in the file."""
        return self.dataset is Dataset.SHAREGPT and self.sharegpt_output_len is None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_rates()
        if self.random_prefix_len and self.dataset is not Dataset.RANDOM:
            raise InvalidConfig(
                f"--random-prefix-len requires --dataset-name random, and it is {self.dataset}; "
                "remove it, or use --dataset-name shared-prefix for several prefixes"
            )
        if self.dataset.is_file != (self.dataset_path is not None):
            needs = "requires" if self.dataset.is_file else "reads no file; remove"
            raise InvalidConfig(f"--dataset-name {self.dataset} {needs} --dataset-path")
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise InvalidConfig(
                f"--vocab-size is {self.vocab_size}; random ids start at {FIRST_TOKEN_ID}, "
                f"so it must be at least {FIRST_TOKEN_ID + 1}"
            )

    def _check_lengths(self) -> None:
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--random-input-len", self.input_len),
            ("--random-output-len", self.output_len),
            ("--shared-prefix-len", self.shared_prefix_len),
            ("--num-prefixes", self.num_prefixes),
            ("--sharegpt-output-len", self.sharegpt_output_len),
            ("--custom-output-len", self.custom_output_len),
        ):
            if value is not None:
                require(value >= 1, flag, value, "at least 1")
        prefix_len = self.random_prefix_len
        require(prefix_len >= 0, "--random-prefix-len", prefix_len, "at least 0")
        for ratio in (self.range_ratio, self.output_range_ratio):
            if ratio is not None:
                require(0 <= ratio < 1, "--random-range-ratio", ratio, "in [0, 1)")

    def _check_rates(self) -> None:
        rate, burstiness, speedup = self.request_rate, self.burstiness, self.trace_speedup
        require(rate > 0, "--request-rate", rate, "more than 0, or inf")
        require(0 < burstiness < math.inf, "--burstiness", burstiness, "more than 0 and finite")
        require(speedup > 0, "--trace-speedup", speedup, "more than 0, or inf")
        if self.ramp and not math.isinf(rate):
            raise InvalidConfig(
                "--request-rate cannot be combined with a ramp; give one of the two"
            )


def cache_advice(config: WorkloadConfig) -> str:
    """Says what it means that the server had prompts of this workload in its prefix cache."""
    if config.dataset.has_shared_prefixes or config.random_prefix_len:
        return "the requests share prefixes, as asked"
    if config.dataset is Dataset.MOONCAKE:
        return "the trace's requests share blocks"
    if config.dataset.has_texts:
        return (
            "a file's prompts cost less when they are sent again; restart the server, or compare "
            "with its prefix cache off"
        )
    return "prompts that it has seen cost less; without --seed each run sends new ones"
