"""What is known of a request to the engine when it has ended: for its trace, and for the log."""

from dataclasses import dataclass

from penstock.scheduler.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """What is known of an HTTP request when it has ended.

    operation: a `gen_ai.operation.name` of the conventions. sampling: None if nothing is sampled.
    tpot_s: the mean of all answers. Times are in time.monotonic(), None for what did not happen; of
    several answers, started_s and first_token_s are the earliest and last_token_s is the latest.
    """

    id: str
    operation: str
    sampling: SamplingParams | None
    num_choices: int
    arrival_s: float
    started_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    tpot_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[str, ...]
    outcome: str

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s
