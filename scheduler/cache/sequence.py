"""One generation in progress. Every status change it can make is in this file and nowhere else.

    WAITING --admit--> PREFILLING --start_decoding--> DECODING --finish--> FINISHED
       ^                   |                             |
       +------preempt------+-----------preempt-----------+

An abort finishes it from any status, and so does an end that is known only after a preemption.
One that an earlier engine began is WAITING with its outputs, as after a preemption.
"""

from dataclasses import dataclass, field
from enum import Enum

from penstock.scheduler.cache.blocks import BlockTable
from penstock.scheduler.types import (
    Pooling,
    PromptOutputRequest,
    Request,
    ResumedAnswer,
)

# Samples of one request get seeds that are far apart: the golden ratio of 2^64, as splitmix64 does.
_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 63) - 1


class Status(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"  # known tokens are left to compute
    DECODING = "decoding"  # the steps launched compute all known tokens; one new token a step
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Answer `index` of a request.

    token_ids: the prompt, then every output id that the host knows. num_computed: tokens whose keys
    and values are written, or will be by the steps already launched if all their drafts are
    accepted. num_unresolved: those drafts. num_in_flight: launched steps that sample for it, or end
    its prompt, and whose results the host does not have yet.
    order: of arrival. prompt_request: what is still to be returned for its prompt.
    """

    request: Request
    index: int
    order: int
    max_length: int
    token_ids: list[int] = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    prompt_request: PromptOutputRequest | None = field(init=False)
    status: Status = Status.WAITING
    slot: int = -1  # meaningful while it runs
    # One for each group of layers, once it has been admitted.
    tables: list[BlockTable] = field(default_factory=lambda: [BlockTable()])
    # Those of its full blocks survive a preemption.
    block_digests: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_unresolved: int = 0
    num_ever_computed: int = 0  # the most that num_computed was before it lost its blocks
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    predicted: tuple[int, int] | None = None  # see `RequestOutput`
    first_scheduled_s: float | None = None
    is_overdue: bool = False  # it was admitted because it had waited longest, whatever its priority
    num_cached_at_arrival: int = 0  # where a forecast has looked
    may_load: bool = True  # blocks from a tier: once, and again after a preemption
    num_cached_before_load: int | None = None  # of one that is to be admitted after a load
    predicted_ttft_s: float | None = None
    fork_parent: "Sequence | None" = None  # the answer 0 whose computed prompt it may share

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.stop_token_ids = frozenset(self.request.sampling.stop_token_ids)
        wanted = PromptOutputRequest(
            self.request.sampling.num_prompt_logprobs, self.request.pooling
        )
        self.prompt_request = None if self.index or wanted == (None, None) else wanted

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def seed(self) -> int:
        return (self.request.sampling.seed + self.index * _SEED_STRIDE) & _SEED_MASK

    @property
    def is_running(self) -> bool:
        return self.status is Status.PREFILLING or self.status is Status.DECODING

    @property
    def needs_whole_prompt(self) -> bool:
        """Every token of its prompt must run: what is to be returned for it is not cached."""
        wanted = self.prompt_request
        return wanted is not None and (
            wanted.num_logprobs is not None or wanted.pooling in (Pooling.MEAN, Pooling.FIRST)
        )

    @property
    def num_to_compute(self) -> int:
        """Known tokens that no step has run yet."""
        return len(self.token_ids) - self.num_computed

    def resume(self, answer: ResumedAnswer) -> None:
        """Takes over what an earlier engine returned of it. Call it before anything else."""
        assert self.status is Status.WAITING and answer.index == self.index
        self.first_scheduled_s = answer.first_scheduled_s
        self.num_cached_tokens = answer.num_cached_tokens
        if answer.token_ids:
            self.token_ids += answer.token_ids
            self.num_ever_computed = len(self.token_ids) - 1
            self.prompt_request = None  # returned with the first of them

    def admit(self, slot: int, num_computed: int, now: float) -> None:
        """Starts, or restarts, with the first num_computed tokens cached."""
        assert self.status is Status.WAITING and not self.num_in_flight
        self.status = Status.PREFILLING
        self.slot = slot
        self.num_computed = num_computed
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now
            self.num_cached_tokens = num_computed

    def run_chunk(self, num_tokens: int) -> int:
        """Its next num_tokens known tokens run in this step; returns how many it recomputes."""
        start = self.num_computed
        self.num_computed += num_tokens
        num_again = max(0, min(self.num_computed, self.num_ever_computed) - start)
        self.num_recomputed_tokens += num_again
        return num_again

    def start_decoding(self) -> None:
        """The step that computes its last known token is launched."""
        assert self.status is Status.PREFILLING and not self.num_to_compute
        self.status = Status.DECODING

    def add_drafts(self, num_drafts: int) -> None:
        """Its row in this step has so many."""
        self.num_computed += num_drafts
        self.num_unresolved += num_drafts

    def resolve_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """So many of a row's drafts were accepted; the others count as never computed."""
        if self.is_running:
            self.num_computed -= num_drafts - num_accepted
            self.num_unresolved -= num_drafts
        else:
            self.num_ever_computed += num_accepted

    def preempt(self) -> None:
        """Keeps its tokens; their keys and values are recomputed later."""
        assert self.is_running
        self.status = Status.WAITING
        num_certain = self.num_computed - self.num_unresolved
        self.num_ever_computed = max(self.num_ever_computed, num_certain)
        self.num_computed = self.num_unresolved = 0
        self.num_preemptions += 1
        self.may_load = True

    def finish(self) -> None:
        assert self.status is not Status.FINISHED
        self.status = Status.FINISHED
