"""The scheduler's settings, under vLLM's names where the thing is the same."""

import math
from dataclasses import dataclass
from enum import StrEnum

from penstock.scheduler.errors import InvalidConfig


class Policy(StrEnum):
    """The order of admission: first come first served, the lowest `priority` first, or the tenant
    that was served least first."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


class Batching(StrEnum):
    """When a waiting request may join: at every step, or only when the batch before has ended."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    DYNAMIC = "dynamic"


_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step, inclusive, and the order of admission.

    max_num_seqs: sequences that run together. max_num_batched_tokens: tokens of one step, prefill
    chunks and decodes together; None: 2048, or fewer where `StepSize` says so. itl_target_s: a step
    with decodes runs no more of prompts than lets it end within this time. ttft_target_s: a request
    whose first token is expected later than this after its arrival is refused. A request may have
    its own of both.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    policy: Policy = Policy.FCFS
    batching: Batching = Batching.CONTINUOUS
    itl_target_s: float | None = None
    ttft_target_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InvalidConfig("--max-num-seqs must be at least 1")
        for flag, target_s in (("itl", self.itl_target_s), ("ttft", self.ttft_target_s)):
            if target_s is not None and not 0 < target_s < math.inf:
                raise InvalidConfig(
                    f"--{flag}-target-ms is {target_s * 1e3:g}; it must be more than 0, and finite"
                )
        if self.max_step_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"--max-num-batched-tokens is {self.max_step_tokens}, but each of "
                f"--max-num-seqs={self.max_num_seqs} sequences may need a token in every step; "
                "raise the first or lower the second"
            )

    @property
    def max_step_tokens(self) -> int:
        """That no step has more of."""
        return _STEP_TOKENS if self.max_num_batched_tokens is None else self.max_num_batched_tokens
