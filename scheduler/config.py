"""The scheduler's settings, under vLLM's names where the thing is the same."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.scheduler.errors import InvalidConfig


class Policy(StrEnum):
    """The order of admission: first come first served, or the lowest `priority` first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class Batching(StrEnum):
    """When a waiting request may join: at every step, or only when the batch before has ended."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step, inclusive, and the order of admission.

    max_num_seqs: sequences that run together. max_num_batched_tokens: tokens of one step, prefill
    chunks and decodes together.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    policy: Policy = Policy.FCFS
    batching: Batching = Batching.CONTINUOUS

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InvalidConfig("--max-num-seqs must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, but each of "
                f"--max-num-seqs={self.max_num_seqs} sequences may need a token in every step; "
                "raise the first or lower the second"
            )
