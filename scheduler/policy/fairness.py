"""`FairQueue`: the tenant that was served least is next, so that a flood of one delays no other.

Each tenant has a counter of what was computed for it, and the waiting sequence of the least counter
is admitted (the virtual token counter of Sheng et al. 2024, arXiv:2401.00588). An output token
counts as two prompt tokens, since it takes a step of its own; a cached one as next to nothing. What
is computed again after a preemption is not charged. A tenant that comes, or comes back after a
pause, has at least the least counter of the others, but for a credit of what its share of a few
seconds is: so one that asks for less than its share may do so in bursts, and nobody saves up more.
One that asks for more than runs together has no credit.

Where no slot or block is free, running sequences of a tenant that was served more are preempted for
one that was served less. Their blocks stay in the prefix cache, so that to come back costs little.
"""

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.scheduler.cache.sequence import Sequence, Status
from penstock.scheduler.config import Policy
from penstock.scheduler.policy.queue import OrderedQueue, PriorityQueue, WaitingQueue
from penstock.scheduler.types import FurtherTokens

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0
CACHED_TOKEN = 0.1

# Tenants without requests whose counters are remembered. Those with the least are forgotten first:
# they would be lifted the furthest.
_MAX_IDLE = 4096
_INDEX_EVERY_S = 1.0
# Prompt tokens a step for those who hold more than an equal share while others are about. The most
# keeps a GPU's matrix units busy and is a quarter of the usual budget of a step; the least is one
# tile. Between them it is as many as let a step end within `_QUANTUM_STEP_S`, for which a newcomer
# may have to wait.
_MAX_QUANTUM, _MIN_QUANTUM = 512.0, 64.0
_QUANTUM_STEP_S = 0.1
_SHORTER, _LONGER = 0.75, 1.125
_COMPANY_S = 30.0
_HALF_LIFE_S = 60.0  # of the service that the fairness index is about
_CREDIT_S = 10.0  # of an equal share of the service that there is
_MAX_BURST = 8  # open sequences of a tenant that keeps its credit, where fewer run
_NEW_SHARE = 0.2  # of the mean of that, each second
# A tenant takes more than an equal share of what runs from one that is ahead of it by its share of
# the service of so many seconds, so that slots do not go back and forth between equals. That one
# keeps a part of its own equal share, so that it never stands still.
_LEAD_S, _MIN_LEAD = 1.0, 256.0
_KEPT_SHARE = 0.25
# After so many a sequence is no longer preempted for others, so it comes to its end.
_MAX_PREEMPTIONS = 4
_MAX_PLACES = 4  # made in a step


@dataclass(slots=True, eq=False)
class Tenant:
    """Those requests that share one counter. recent: the service of the last minute or so;
    faded: what is left in it of the time before the index was renewed."""

    name: str
    counter: float = 0.0
    recent: float = 0.0
    faded: float = 0.0
    num_open: int = 0
    num_running: int = 0
    left_s: float = -math.inf
    waiting: OrderedQueue = field(default_factory=OrderedQueue)
    was_waiting: bool = False

    def charge(self, service: float) -> None:
        self.counter += service
        self.recent += service


class FairQueue(WaitingQueue):
    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._active: dict[str, Tenant] = {}  # those with open requests
        # The counter when the entry was made, which is at most what it is now.
        self._by_counter: list[tuple[float, int, Tenant]] = []
        self._num_entries = 0
        self._num_waiting = 0
        self._last_counter = 0.0  # of the tenant that left last
        self._looked_s: float | None = None
        self._now = 0.0
        self._num_recent = 1
        self._service_rate = 0.0  # of all tenants, a second
        self._num_looks = 0
        self._quantum_left = math.inf
        self._quantum = _MAX_QUANTUM
        self._has_used_quantum = False
        self._num_running = 0
        self._most_counter = 0.0
        self.fairness: float = 1.0

    def __len__(self) -> int:
        return self._num_waiting

    def tenant_of(self, sequence: Sequence) -> Tenant:
        return self._active[sequence.request.tenant]

    def counter_of(self, sequence: Sequence) -> float:
        return self._active[sequence.request.tenant].counter

    @property
    def _lead(self) -> float:
        """By how much less a tenant must have been served to take more than an equal share."""
        return max(_MIN_LEAD, _LEAD_S * self._service_rate / self._num_recent)

    # How requests come and go.

    def open(self, name: str, num_sequences: int) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        if not tenant.num_open:
            tenant.counter = max(tenant.counter, self._least_but(tenant) - self._credit)
            self._active[name] = tenant
        tenant.num_open += num_sequences
        if tenant.num_open > max(_MAX_BURST, self._num_running):
            tenant.counter = max(tenant.counter, self._least_but(tenant))

    @property
    def _credit(self) -> float:
        """By how much less one that comes, or comes back, may have been served than the others."""
        if not self._num_looks:
            return math.inf
        num_sharing = max(self._num_recent, len(self._active) + 1)
        return _CREDIT_S * self._service_rate / num_sharing

    def _least_but(self, tenant: Tenant) -> float:
        others = (each.counter for each in self._active.values() if each is not tenant)
        return min(others, default=self._last_counter)

    def close(self, name: str, num_sequences: int = 1) -> None:
        tenant = self._active[name]
        tenant.num_open -= num_sequences
        if not tenant.num_open:
            del self._active[name]
            self._last_counter = tenant.counter
            tenant.left_s = self._now
            if len(self._tenants) - len(self._active) > _MAX_IDLE:
                idle = [each for each in self._tenants.values() if not each.num_open]
                idle.sort(key=lambda each: each.counter)
                for each in idle[: len(idle) // 2]:
                    del self._tenants[each.name]

    # The queue.

    def push(self, sequence: Sequence) -> None:
        tenant = self.tenant_of(sequence)
        tenant.waiting.push(sequence)
        self._num_waiting += 1
        self._enter(tenant)

    def peek(self) -> Sequence | None:
        while heap := self._by_counter:  # which `_enter` may renew
            counter, _, tenant = heap[0]
            first = tenant.waiting.peek()
            if first is not None and counter == tenant.counter:
                return first
            heapq.heappop(heap)
            if first is not None:
                self._enter(tenant)
        return None

    def remove(self, sequence: Sequence) -> None:
        self.tenant_of(sequence).waiting.remove(sequence)
        self._num_waiting -= 1

    def are_ahead(self, sequence: Sequence) -> Iterable[Sequence]:
        """Those of the same tenant that are older, and of every other as many as will be served
        meanwhile: as many as those, if all ask for alike."""
        own = self.tenant_of(sequence)
        ahead = list(own.waiting.are_ahead(sequence))
        yield from ahead
        for tenant in self._active.values():
            if tenant is not own:
                oldest = sorted(tenant.waiting, key=lambda each: each.order)
                lead = tenant.counter < own.counter
                yield from oldest[: len(ahead) + lead]

    def _enter(self, tenant: Tenant) -> None:
        entered: Iterable[Tenant] = (tenant,)
        if len(self._by_counter) >= 2 * self._num_waiting + 64:
            self._by_counter = []
            entered = [each for each in self._active.values() if len(each.waiting)]
        for each in entered:
            self._num_entries += 1
            heapq.heappush(self._by_counter, (each.counter, self._num_entries, each))

    def next_few(self) -> list[Sequence]:
        """None: who goes first is a matter of tenants."""
        return []

    # Running sequences.

    def charge_cached(self, sequence: Sequence, num_tokens: int) -> None:
        self.tenant_of(sequence).charge(CACHED_TOKEN * num_tokens)

    def charge_outputs(
        self, sampling: Iterable[Sequence], further: Mapping[int, FurtherTokens]
    ) -> None:
        for row, sequence in enumerate(sampling):
            if sequence.status is not Status.FINISHED:
                num = 1 + len(further[row].token_ids) if row in further else 1
                self.tenant_of(sequence).charge(num * OUTPUT_TOKEN)

    def not_yielding(self, running: Iterable[Sequence], sequence: Sequence) -> list[Sequence]:
        """Chunks of other tenants make room for it."""
        own = sequence.request.tenant
        return [each for each in running if each.request.tenant == own]

    def on_run(self, sequence: Sequence) -> None:
        self.tenant_of(sequence).num_running += 1
        self._num_running += 1

    def on_leave(self, sequence: Sequence) -> None:
        self.tenant_of(sequence).num_running -= 1
        self._num_running -= 1

    def num_at_once(self, sequence: Sequence, max_tokens: int) -> int:
        """How many of its tenant, which waits and is the first, may be given places in a step that
        runs so many tokens."""
        num_waiting = len(self.tenant_of(sequence).waiting)
        num_fitting = max(1, max_tokens // max(1, sequence.num_to_compute))
        return min(num_waiting, num_fitting, _MAX_PLACES)

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those of the tenant that was served least first."""
        return sorted(running, key=self.counter_of)

    def standing(self, sequence: Sequence) -> float:
        """The more its tenant was served, the less."""
        return -self.counter_of(sequence)

    def in_place_of(
        self, running: Iterable[Sequence], sequence: Sequence, num_places: int
    ) -> Sequence | None:
        """One that must leave for this one to be admitted after num_places others of its tenant;
        None where there is none.

        Either its tenant would hold no more than an equal share of what runs then, and the one that
        leaves is of a tenant that holds more. Or it is of a tenant that is so far ahead that this
        one has a lead.
        """
        every = list(running)
        own, share = self.tenant_of(sequence), (len(every) + num_places) / len(self._active)
        # As if the others were charged already, so that none leaves and comes back in one step.
        kept, counter = share, own.counter + num_places * PROMPT_TOKEN * sequence.num_to_compute
        if own.num_running + num_places + 1 > share:
            kept, counter = max(1.0, _KEPT_SHARE * share), counter + self._lead
        greedy = {
            each
            for each in self._active.values()
            if each.num_running > kept and each.counter > counter
        }
        losers = [
            each
            for each in every
            if self.tenant_of(each) in greedy and each.num_preemptions < _MAX_PREEMPTIONS
        ]
        return self.victim(losers) if losers else None

    # The prompts of a step.

    def begin_step(self, now: float) -> None:
        self._look(now)
        if self._has_used_quantum:
            is_long = now - self._now > _QUANTUM_STEP_S
            quantum = self._quantum * (_SHORTER if is_long else _LONGER)
            self._quantum = min(max(quantum, _MIN_QUANTUM), _MAX_QUANTUM)
            self._has_used_quantum = False
        self._now = now
        self._quantum_left = int(self._quantum) if self._num_recent > 1 else math.inf
        self._most_counter = max((each.counter for each in self._active.values()), default=0.0)

    def most_of(self, sequence: Sequence) -> float:
        """The most of its prompt's tokens that the step may run yet.

        While others are about, a tenant that holds more than an equal share of what runs, unless it
        has a lead, has a quantum of each step, so that none waits for a long one, and nothing of a
        step that runs prompts of others.
        """
        return self._quantum_left if self._is_greedy(sequence) else math.inf

    def on_chunk(self, sequence: Sequence, num_tokens: int, num_again: int) -> None:
        self.tenant_of(sequence).charge(PROMPT_TOKEN * (num_tokens - num_again))
        if self._num_recent == 1:
            return
        if self._is_greedy(sequence):
            self._quantum_left -= num_tokens
            self._has_used_quantum = self._quantum_left <= 0
        else:
            self._quantum_left = 0

    def _is_greedy(self, sequence: Sequence) -> bool:
        own = self.tenant_of(sequence)
        if own.num_running * self._num_recent <= self._num_running:
            return False
        return own.counter + self._lead >= self._most_counter

    # The fairness index.

    def _look(self, now: float) -> None:
        """Renews the index, once a second: Jain's (1984), of the recent service of the tenants that
        had to wait. 1 is equal service, 1 / n is all for one of n."""
        if self._looked_s is not None and now - self._looked_s < _INDEX_EVERY_S:
            return
        elapsed_s = 0.0 if self._looked_s is None else now - self._looked_s
        self._looked_s = now
        idle = (each for each in self._tenants.values() if not each.num_open)
        num_left = sum(each.left_s > now - _COMPANY_S for each in idle)
        self._num_recent = max(1, len(self._active) + num_left)
        fade = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        waited = []
        if elapsed_s:
            service = sum(each.recent - each.faded for each in self._tenants.values())
            self._num_looks += 1
            new_share = max(_NEW_SHARE, 1 / self._num_looks)
            self._service_rate += new_share * (service / elapsed_s - self._service_rate)
        for tenant in self._active.values():
            tenant.recent *= fade
            is_waiting = len(tenant.waiting) > 0
            if is_waiting and tenant.was_waiting:
                waited.append(tenant.recent)
            tenant.was_waiting = is_waiting
        for tenant in self._tenants.values():
            tenant.faded = tenant.recent
        squares = len(waited) * sum(each**2 for each in waited)
        self.fairness = sum(waited) ** 2 / squares if squares else 1.0


def queue_for(policy: Policy) -> WaitingQueue:
    queues: dict[Policy, type[WaitingQueue]]
    queues = {Policy.FCFS: WaitingQueue, Policy.PRIORITY: PriorityQueue, Policy.FAIR: FairQueue}
    return queues[policy]()
