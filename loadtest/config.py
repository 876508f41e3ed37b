"""What is asked of the server, and how: the settings of a workload and of its replay."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scheduler.errors import InvalidConfig

# Ids below 3 are <unk>, <s> and </s> in many vocabularies, and every model we know has 500 more.
FIRST_TOKEN_ID = 3
DEFAULT_VOCAB_SIZE = 500


class Dataset(StrEnum):
    """Prompts that share nothing, or that begin with one of a few prefixes."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"


class PromptFormat(StrEnum):
    """Token ids give exact lengths; text is what /v1/chat/completions takes."""

    IDS = "ids"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Which requests are made. Lengths are in tokens, request_rate in requests per second.

    range_ratio r draws lengths uniformly from [(1 - r) * length, (1 + r) * length], ends included.
    A shared prefix comes on top of input_len, which is then the length of the part that is unique.
    """

    seed: int = 0
    num_prompts: int = 1000
    dataset: Dataset = Dataset.RANDOM
    prompt_format: PromptFormat = PromptFormat.IDS
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    shared_prefix_len: int = 256
    num_prefixes: int = 8
    request_rate: float = math.inf
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def __post_init__(self) -> None:
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--random-input-len", self.input_len),
            ("--random-output-len", self.output_len),
            ("--shared-prefix-len", self.shared_prefix_len),
            ("--num-prefixes", self.num_prefixes),
        ):
            if value < 1:
                raise InvalidConfig(f"{flag} is {value}; it must be at least 1")
        if not 0 <= self.range_ratio < 1:
            raise InvalidConfig(f"--random-range-ratio is {self.range_ratio}; it must be in [0, 1)")
        if not self.request_rate > 0:
            raise InvalidConfig(
                f"--request-rate is {self.request_rate}; it must be more than 0, or inf"
            )
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise InvalidConfig(
                f"--vocab-size is {self.vocab_size}; random ids start at {FIRST_TOKEN_ID}, "
                f"so it must be at least {FIRST_TOKEN_ID + 1}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Where requests go and what each of them says besides its prompt.

    extra_body: fields that each of them has besides; they win over ours.
    """

    base_url: str
    model: str
    endpoint: str = "/v1/completions"
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    request_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """What the report shows, under vLLM's names. goodput_ms: the limit for each metric."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (90.0, 99.0)
    goodput_ms: dict[str, float] | None = None
