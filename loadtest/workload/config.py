"""The settings of a workload: which prompts, how long, and when they are sent."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from penstock.loadtest.workload.arrivals import Ramp
from penstock.scheduler.errors import InvalidConfig

# Ids below 3 are <unk>, <s> and </s> in many vocabularies, and every model we know has 500 more.
FIRST_TOKEN_ID = 3
DEFAULT_VOCAB_SIZE = 500


class Dataset(StrEnum):
    """Prompts that share nothing, or that begin with one of a few prefixes; or what a file says."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    SHAREGPT = "sharegpt"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    CUSTOM = "custom"

    @property
    def is_file(self) -> bool:
        return self not in (Dataset.RANDOM, Dataset.SHARED_PREFIX)

    @property
    def is_trace(self) -> bool:
        """Lengths and times without words: prompts are made up, and arrivals may be the trace's."""
        return self in (Dataset.AZURE, Dataset.BURSTGPT, Dataset.MOONCAKE)


class PromptFormat(StrEnum):
    """Token ids give exact lengths; text is what /v1/chat/completions takes."""

    IDS = "ids"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Which requests are made. Lengths are in tokens, request_rate in requests per second.

    range_ratio r draws lengths uniformly from [(1 - r) * length, (1 + r) * length], ends included.
    A shared prefix comes on top of input_len, which is then the length of the part that is unique.
    A trace's requests come when it says, trace_speedup times as fast, unless a rate or a ramp says
    otherwise. sharegpt_output_len replaces the lengths that the file has; custom_output_len is for
    lines without one. random_prefix_len tokens, the same ones, begin every random prompt.
    What needs more than max_model_len tokens, prompt and answer, is left out.
    """

    seed: int = 0
    num_prompts: int = 1000
    dataset: Dataset = Dataset.RANDOM
    prompt_format: PromptFormat = PromptFormat.IDS
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    random_prefix_len: int = 0
    shared_prefix_len: int = 256
    num_prefixes: int = 8
    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None
    vocab_size: int = DEFAULT_VOCAB_SIZE
    dataset_path: Path | None = None
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    trace_speedup: float = 1.0
    is_chat: bool = False
    max_model_len: int | None = None

    @property
    def follows_trace(self) -> bool:
        """Whether the times of arrival are those of the file."""
        return self.dataset.is_trace and math.isinf(self.request_rate) and self.ramp is None

    @property
    def needs_answers_counted(self) -> bool:
        """Whether the lengths of answers are those of texts in the file."""
        return self.dataset is Dataset.SHAREGPT and self.sharegpt_output_len is None

    def __post_init__(self) -> None:
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--random-input-len", self.input_len),
            ("--random-output-len", self.output_len),
            ("--shared-prefix-len", self.shared_prefix_len),
            ("--num-prefixes", self.num_prefixes),
            ("--sharegpt-output-len", self.sharegpt_output_len),
            ("--custom-output-len", self.custom_output_len),
        ):
            if value is not None and value < 1:
                raise InvalidConfig(f"{flag} is {value}; it must be at least 1")
        if self.random_prefix_len < 0:
            raise InvalidConfig(
                f"--random-prefix-len is {self.random_prefix_len}; it must be at least 0"
            )
        if self.random_prefix_len and self.dataset is not Dataset.RANDOM:
            raise InvalidConfig(
                f"--random-prefix-len is for --dataset-name random, and this is {self.dataset}; "
                "leave it out, or use --dataset-name shared-prefix for several prefixes"
            )
        if not 0 <= self.range_ratio < 1:
            raise InvalidConfig(f"--random-range-ratio is {self.range_ratio}; it must be in [0, 1)")
        if not self.request_rate > 0:
            raise InvalidConfig(
                f"--request-rate is {self.request_rate}; it must be more than 0, or inf"
            )
        if not 0 < self.burstiness < math.inf:
            raise InvalidConfig(
                f"--burstiness is {self.burstiness}; it must be more than 0 and finite"
            )
        if not self.trace_speedup > 0:
            raise InvalidConfig(
                f"--trace-speedup is {self.trace_speedup}; it must be more than 0, or inf"
            )
        if self.ramp and not math.isinf(self.request_rate):
            raise InvalidConfig("--request-rate and a ramp exclude each other; give one of the two")
        if self.dataset.is_file != (self.dataset_path is not None):
            needs = "needs the file" if self.dataset.is_file else "reads no file; leave out"
            raise InvalidConfig(f"--dataset-name {self.dataset} {needs} --dataset-path")
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise InvalidConfig(
                f"--vocab-size is {self.vocab_size}; random ids start at {FIRST_TOKEN_ID}, "
                f"so it must be at least {FIRST_TOKEN_ID + 1}"
            )
