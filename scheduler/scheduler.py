"""Four verbs: `add`, `abort`, `schedule`, `update`. One step is one `schedule` and one `update`.

Scheduling is iteration-level (Yu et al. 2022, Orca): which sequences run is decided at each step.
Running decodes come first, one token each; then running prefills; then waiting requests in policy
order, until the token budget, the slots or the blocks are spent. Half of a step that one prompt
would fill alone is for shorter ones.

It may be called ahead of the device: `schedule` advances a sequence by one token whose id is not
known yet (`num_in_flight`), and `update` fills it in later. A sequence that turns out to have ended
wastes its rows in flight, and nothing else: the device runs steps in order, so its blocks are
written by their next sequence after the wasted row.

Where the device is a pipeline of stages, as many steps are in flight as there are stages, and the
sequences that decode are divided into as many cohorts: see `Scheduler._cohort`. Chunks of one
prompt may be in several steps in flight.

A decode may have drafts (`scheduler.drafts`), and be in the next step before it is known how many
of them are accepted: `Sequence.num_computed` supposes all, and `update` takes back the others.

Time is an argument; nothing here reads a clock, and a simulation runs this very code.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import repeat
from math import inf

from penstock.scheduler.batch import Batch, StepOutputs, output_of
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.cache.kv_cache import Admission, KVCache
from penstock.scheduler.cache.kv_events import KVEvents
from penstock.scheduler.cache.loads import Loads
from penstock.scheduler.cache.sequence import Sequence, Status
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.config import Batching, SchedulerConfig
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.drafts.placing import place_drafts, resolve_drafts
from penstock.scheduler.errors import (
    ContextTooLong,
    DuplicateRequest,
    InvalidConfig,
    NoEncoder,
    PromptTooLong,
    TargetOutOfReach,
)
from penstock.scheduler.groups import KVGroup, StateGroup
from penstock.scheduler.inserts import EncoderCosts, Inserts, most_at_once
from penstock.scheduler.policy.fairness import FairQueue, queue_for
from penstock.scheduler.policy.forecast import Ahead
from penstock.scheduler.policy.queue import may_start_batch
from penstock.scheduler.policy.step_size import StepSize
from penstock.scheduler.policy.targets import Targets
from penstock.scheduler.stats import SchedulerStats
from penstock.scheduler.step_model.chunk_budget import ChunkBudget
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.types import (
    Finish,
    FinishReason,
    FurtherTokens,
    Request,
    RequestId,
    RequestOutput,
    ResumedAnswer,
    SampledTokens,
    ScheduledBatch,
    SlotAssignment,
    Started,
    TokenLogprobs,
)

# Of a row whose drafts were rejected, of which its request is told.
_NONE_FURTHER = FurtherTokens([])


class Scheduler:
    """Owns every sequence and every block of one executor. One thread owns it."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        groups: Items[KVGroup | StateGroup],
        block_size: int,
        max_model_len: int,
        step_model: LiveStepModel | None = None,
        journals: Items[BlockJournal] = (),
        tier: BlockTier | None = None,
        events: KVEvents | None = None,
        num_cohorts: int = 1,
        drafter: Drafter | None = None,
        encoder: EncoderCosts | None = None,
        computes_whole: bool = False,
    ) -> None:
        """groups: of the model's layers. step_model: without it targets have no effect. journals:
        one for each group, where the blocks outlive this process. tier: for continuous batching
        with prefix caching. events: is told which blocks can be found. num_cohorts: of sequences
        that decode in different steps: as many as the executor has stages. drafter: for an executor
        that takes drafts. encoder: for one that takes prompts with inserts. computes_whole: whether
        a prompt is one chunk of one step.

        Raises InvalidConfig where one sequence of max_model_len would not fit the blocks.
        """
        _check_fits(groups, block_size, max_model_len)
        self._config = config
        self._max_model_len = max_model_len
        self._kv = KVCache(groups, block_size, config.enable_prefix_caching, journals, tier, events)
        self._num_cohorts = num_cohorts
        self._drafter, self._computes_whole = drafter, computes_whole
        self._inserts: Inserts | None = None
        if encoder is not None:
            self._inserts = Inserts(encoder, most_at_once(config, groups, block_size))
        self._targets = Targets(config, step_model, num_cohorts)
        self._step_size = StepSize(config, step_model)
        self._loads = Loads(self._kv, tier, self._targets.compute_s)
        self._waiting = queue_for(config.policy)
        self._prefilling: dict[Sequence, None] = {}  # dicts as ordered sets
        self._decoding: dict[Sequence, None] = {}
        self._requests: dict[RequestId, list[Sequence]] = {}  # those that have not ended
        self._samples: dict[RequestId, list[Sequence]] = {}  # answers 1.. until answer 0 can fork
        self._unready: dict[RequestId, list[Sequence]] = {}  # they may not run yet: see `add`
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[tuple[int, Batch]] = deque()
        self._step = self._order = 0
        self._prefix_query_tokens = self._prefix_hit_tokens = self._prefix_stateless_tokens = 0
        self._preemptions = self._recomputed_tokens = self._invalid_logits = 0
        self._started: list[Started] = []
        self._is_short_of_blocks = False  # in the step being scheduled, for a prompt's next tokens

    # The four verbs.

    def add(self, request: Request, *, is_ready: bool = True, now: float | None = None) -> None:
        """Accepts a request; each of its `n` answers will end with exactly one final output.

        is_ready: whether it may run; else it waits outside of the queue until `make_ready`. now:
        None where the request has just arrived.

        Raises PromptTooLong, ContextTooLong, DuplicateRequest, NoEncoder, ImageTooLarge,
        TargetOutOfReach; the request is then not accepted.
        """
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        assert num_prompt and max_tokens >= 0 and request.n > 0, f"not validated: {request}"
        if num_prompt + min(max_tokens, 1) > self._max_model_len:
            raise PromptTooLong(num_prompt, self._max_model_len, has_answer=max_tokens > 0)
        if num_prompt + max_tokens > self._max_model_len:
            raise ContextTooLong(num_prompt, max_tokens, self._max_model_len)
        if request.id in self._requests:
            raise DuplicateRequest(request.id)
        sequences = self._sequences_of(request)
        if request.inserts:
            if self._inserts is None:
                raise NoEncoder
            self._inserts.check(request)
        self._waiting.open(request.tenant, len(sequences))
        try:
            self._check_target(sequences[0], request.arrival_s if now is None else now)
        except TargetOutOfReach:
            self._waiting.close(request.tenant, len(sequences))
            raise
        self._requests[request.id] = list(sequences)
        if self._inserts is not None:
            self._inserts.open(request)
        if sequences[0].index == 0 and len(sequences) > 1:
            self._samples[request.id] = sequences[1:]
            del sequences[1:]
        if is_ready:
            for sequence in sequences:
                self._waiting.push(sequence)
        else:
            self._unready[request.id] = sequences

    def make_ready(self, request_id: RequestId) -> None:
        """The request may run, if it has not ended."""
        for sequence in self._unready.pop(request_id, ()):
            self._waiting.push(sequence)

    def abort(self, request_id: RequestId, index: int | None = None) -> list[RequestOutput]:
        """Ends a request, or only its answer `index`, running or waiting. Unknown ids are no error:
        the request may just have ended by itself."""
        return [
            self._finish(sequence, FinishReason.ABORT)
            for sequence in list(self._requests.get(request_id, ()))
            if index is None or sequence.index == index
        ]

    def schedule(self, now: float) -> ScheduledBatch | None:
        """The next step's work, or None where no sequence can run now."""
        batch = Batch()
        for sequence in self._loads.arrived(now):
            self._waiting.push(sequence)
        self._waiting.begin_step(now)
        self._make_places()
        if self._inserts is not None:
            self._inserts.drop_least_used(self._prefilling)
        self._plan(batch, now)
        # Prompts hold each other's next blocks: the cheapest to compute again gives way.
        while self._is_short_of_blocks and not (batch.slots or self._in_flight):
            self._preempt_one()
            self._plan(batch, now)
        if self._inserts is not None:
            self._encode(self._inserts, batch)
        if not (batch.slots or batch.encodes):
            return None
        self._start_decodes()
        if self._drafter is not None:
            batch.wants_forced = self._drafter.may_pay(batch.sampling)
            if self._may_draft and batch.num_decodes == len(batch.slots):
                # What proposes reads embeddings alone.
                batch.wanted_drafts = tuple(
                    0 if each.request.inserts else num
                    for each, num in zip(
                        batch.sampling, self._drafter.want(batch.sampling), strict=False
                    )
                )
        self._step += 1
        self._in_flight.append((self._step, batch))
        return batch.scheduled(self._step)

    def _plan(self, batch: Batch, now: float) -> None:
        self._is_short_of_blocks = False
        self._schedule_decodes(batch)
        size = self._step_size
        num_tokens = size.num_prompt_tokens(batch.num_decodes)
        share = 1.0 if self._inserts is None else self._inserts.share(self._prefilling)
        budget = self._targets.chunk_budget(batch, num_tokens, size.enough, self.num_running, share)
        passed = self._pass_long_prompt(batch, budget, now)
        # Chunks of running prompts and waiting sequences in one order, where the policy has one: a
        # prompt of a tenant that was served much waits for a newcomer's.
        for sequence in self._waiting.in_order(self._prefilling):
            if budget.is_spent:
                break
            if sequence in passed:
                continue
            self._admit_waiting(batch, budget, now, below=self._waiting.counter_of(sequence))
            self._schedule_chunk(batch, sequence, budget)
        self._admit_waiting(batch, budget, now)

    def update(self, sampled: SampledTokens) -> StepOutputs:
        """Takes the results of the oldest step in flight; steps are updated in schedule order."""
        step, batch = self._in_flight.popleft()
        assert step == sampled.step, f"expected the results of step {step}, not {sampled.step}"
        outputs, failures = StepOutputs(), batch.failures(sampled)
        if self._inserts is not None:
            self._inserts.update(sampled)
        self._append_tokens(batch, sampled, failures, outputs)
        if self._drafter is not None:
            self._drafter.hear(batch.sampling, sampled)
        self._waiting.charge_outputs(batch.sampling, sampled.further)
        for sequence in batch.prompt_only:
            reason = failures.get(sequence, FinishReason.LENGTH)
            for output in self._end_prompt_only(sequence, reason):
                outputs.add(output)
        if batch.with_prompt_output:
            outputs.add_prompts(batch.with_prompt_output, sampled.prompts)
        self._kv.record(step, self._step)
        return outputs

    # State to be read between the verbs.

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def running_ids(self) -> list[RequestId]:
        running = (*self._decoding, *self._prefilling)
        return list(dict.fromkeys(sequence.request.id for sequence in running))

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, including those that wait for their answer 0 to fork, for
        blocks, or until they are ready."""
        num_waiting = len(self._waiting)
        for outside in (self._samples, self._unready):
            if outside:
                num_waiting += sum(map(len, outside.values()))
        return num_waiting + len(self._loads)

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    @property
    def has_work(self) -> bool:
        """Whether any accepted request has not ended."""
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            prefix_query_tokens_total=self._prefix_query_tokens,
            prefix_hit_tokens_total=self._prefix_hit_tokens,
            preemptions_total=self._preemptions,
            recomputed_tokens_total=self._recomputed_tokens,
            invalid_logits_total=self._invalid_logits,
            out_of_reach_total=self._targets.num_out_of_reach,
            fairness_index=self._waiting.fairness,
            groups=tuple([each.stats() for each in self._kv.groups]),
            tier=self._loads.stats(),
            prefix_stateless_tokens_total=self._prefix_stateless_tokens,
            drafts=() if self._drafter is None else self._drafter.stats,
            **({} if self._inserts is None else self._inserts.stats),
        )

    def take_started(self) -> list[Started]:
        """The answers that had their first step since the last call."""
        started, self._started = self._started, []
        return started

    # How a sequence arrives.

    def _sequences_of(self, request: Request) -> list[Sequence]:
        answers = request.resumed
        if answers is None:
            answers = tuple(map(ResumedAnswer, range(request.n)))
        assert answers, f"{request.id}: all its answers have ended"
        max_length = len(request.prompt_token_ids) + request.sampling.max_tokens
        sequences = []
        for answer in answers:
            sequence = Sequence(request, answer.index, self._order, max_length)
            sequence.resume(answer)
            sequences.append(sequence)
            self._order += 1
        return sequences

    def _check_target(self, sequence: Sequence, now: float) -> None:
        """Raises TargetOutOfReach where its first token is expected too late."""
        request = sequence.request
        if self._targets.applies_to(request):
            ahead = self._ahead_of(sequence)
            self._targets.check(sequence, ahead, self.num_running, now - request.arrival_s)

    def _ahead_of(self, sequence: Sequence) -> Ahead:
        admission = self._kv.plan(sequence)
        num_cached = self._loads.num_within_reach(sequence, admission.num_computed)
        sequence.num_cached_at_arrival = num_cached
        waiting = list(self._waiting.are_ahead(sequence))
        prefilling = self._waiting.not_yielding(self._prefilling, sequence)
        chunks = [(each.num_computed, each.num_to_compute) for each in prefilling]
        for each in waiting:
            num_cached = each.num_cached_at_arrival
            chunks.append((num_cached, each.num_to_compute - num_cached))
        return Ahead(
            decoding=self._decoding,
            prompt_tokens=sum(num for _, num in chunks),
            prompt_positions=sum(num * (start + num // 2) for start, num in chunks),
            num_waiting=len(waiting),
            num_blocks=[
                sum(
                    each.group.most_blocks(one.num_to_compute, self._kv.block_size)
                    for one in waiting
                )
                + share.num_claimed
                + self.num_running
                for each, share in zip(self._kv.groups, admission.shares, strict=True)
            ],
            num_slots=len(self._free_slots),
            num_free_blocks=[each.num_available for each in self._kv.groups],
            has_prefills=bool(self._prefilling),
            encoding_s=0.0
            if self._inserts is None
            else self._inserts.seconds_of(
                [
                    (sequence, sequence.num_cached_at_arrival),
                    *((each, each.num_computed) for each in prefilling),
                    *((each, each.num_cached_at_arrival) for each in waiting),
                ]
            ),
        )

    # How a step is scheduled.

    def _make_places(self) -> None:
        """Preempts a few, one for each of the next tenant's sequences that is to have its place."""
        queue, config = self._waiting, self._config
        if not isinstance(queue, FairQueue) or config.batching is not Batching.CONTINUOUS:
            return  # nobody joins a batch that runs
        waiting = queue.peek()
        if waiting is None or waiting.num_in_flight:
            return
        for num_places in range(queue.num_at_once(waiting, config.max_step_tokens)):
            has_slot = len(self._free_slots) > num_places
            if has_slot and self._kv.fits(self._kv.plan(waiting), self.num_running):
                continue
            running = [*self._decoding, *self._prefilling]
            loser = queue.in_place_of(running, waiting, num_places)
            if loser is None:
                return
            self._preempt(loser)

    def _encode(self, inserts: Inserts, batch: Batch) -> None:
        """Beside what is planned, and for what chunks of the next steps will read."""
        prefilling = self._waiting.in_order(self._prefilling)
        if inserts.is_wanted(prefilling):
            left_s = self._targets.left_s(batch, self.num_running)
            is_alone = not (batch.slots or self._decoding)
            batch.encodes = inserts.encodes(self._step + 1, prefilling, left_s, is_alone=is_alone)
        if batch.slots or batch.encodes:
            batch.dropped = inserts.take_dropped()

    def _schedule_decodes(self, batch: Batch) -> None:
        """One token for each decoding sequence that may have more than the one in flight."""
        block_size = self._kv.block_size
        candidates = [s for s in self._decoding if s.num_computed < s.max_length - 1]
        if self._num_cohorts > 1:
            candidates = self._cohort(candidates)
        if self._kv.has_windows:
            if self._drafter is not None:
                candidates = [each for each in candidates if self._kv.may_go_on(each)]
            for sequence in candidates:
                if sequence.num_computed % block_size == 0:
                    self._kv.slide(sequence)
        ready = self._make_room(candidates)
        add_slot, add_start = batch.slots.append, batch.starts.append
        for sequence in ready:
            position = sequence.num_computed
            if position % block_size == 0:
                self._kv.grow(sequence, position + 1, batch.table_updates)
            sequence.num_computed = position + 1
            sequence.num_in_flight += 1
            add_slot(sequence.slot)
            add_start(position)
        batch.num_tokens = [1] * len(ready)
        batch.samples = [True] * len(ready)
        batch.sampling = ready
        batch.num_decodes = len(ready)
        if self._drafter is not None:
            self._add_drafts(self._drafter, batch)
        if self._kv.has_states:
            batch.snapshots = self._kv.snapshots_in_decodes(ready, batch.drafts)
        if batch.drafts:
            for sequence, drafts in zip(ready, batch.drafts, strict=True):
                sequence.add_drafts(len(drafts))

    def _add_drafts(self, drafter: Drafter, batch: Batch) -> None:
        """To the decodes of a step, none where prompts are waiting or running."""
        decodes = batch.sampling
        num_unresolved = tuple([each.num_unresolved for each in decodes])
        if any(num_unresolved):
            assert not self._kv.has_states, "a snapshot is of a known number of tokens"
            batch.num_unresolved = num_unresolved
        if not (decodes and self._may_draft):
            return
        most = self._config.max_step_tokens - len(decodes)
        in_flight = [(each.sampling, each.drafts) for _, each in self._in_flight]
        batch.drafts = place_drafts(
            drafter, self._kv, decodes, in_flight, self.num_running, most, batch.table_updates
        )
        if batch.drafts:
            batch.num_tokens = [1 + len(drafts) for drafts in batch.drafts]

    @property
    def _may_draft(self) -> bool:
        """No prompt waits for its turn, whose time drafts would take."""
        return not (self._prefilling or len(self._waiting))

    def _cohort(self, candidates: list[Sequence]) -> list[Sequence]:
        """Those of this step, where several stages compute different steps at the same time.

        None has two tokens in flight: a stage needs the ids of the step before. And no step has
        more than an equal share of all, so that there are others for the steps after it. Cohorts
        that have become unequal are equal again a round later, since whoever is left over is in the
        next step.
        """
        share = -(-len(candidates) // self._num_cohorts)
        return [each for each in candidates if not each.num_in_flight][:share]

    def _make_room(self, ready: list[Sequence]) -> list[Sequence]:
        """Preempts until every remaining decode has the block that it needs in this step."""
        kv, block_size = self._kv, self._kv.block_size
        if len(ready) <= kv.num_available:
            return ready  # even if each needed one
        while True:
            # One that had drafts which were not accepted may have its next blocks already.
            at_end = [each for each in ready if each.num_computed % block_size == 0]
            needing = [
                each for each in at_end if kv.num_owned(each) * block_size <= each.num_computed
            ]
            if len(needing) <= kv.num_available:
                return ready
            loser = self._preempt_one()
            ready = [sequence for sequence in ready if sequence is not loser]

    def _preempt_one(self) -> Sequence:
        loser = self._waiting.victim([*self._decoding, *self._prefilling])
        self._preempt(loser)
        return loser

    def _pass_long_prompt(self, batch: Batch, budget: ChunkBudget, now: float) -> set[Sequence]:
        """Half of a step that the next prompt would fill alone is for shorter ones, the shortest
        first. Returns those that run for it: each has had its row."""
        prompts = self._waiting.in_order(self._prefilling)
        is_continuous = self._config.batching is Batching.CONTINUOUS
        if not prompts or not is_continuous or self._computes_whole:
            return set()
        first, most = prompts[0], budget.most(prompts[0].num_computed)
        if first.num_to_compute <= most:
            return set()
        others = [*prompts[1:], *self._admissible()]
        standing = self._waiting.standing(first)
        shorter = [
            each
            for each in others
            if each.num_to_compute < first.num_to_compute
            and self._waiting.standing(each) == standing
        ]
        num_left, passed = most // 2, set[Sequence]()
        for sequence in sorted(shorter, key=lambda each: each.num_to_compute):
            if num_left <= 0 or self._is_short_of_blocks:
                break
            if not sequence.is_running:
                if len(self._free_slots) < 2:
                    continue  # the last one is for the sequence that came first
                if self._loads.begin(sequence, self.num_running, now):
                    self._waiting.remove(sequence)
                    continue
                if not self._admit(batch, sequence, now):
                    break
            before = budget.tokens_left
            self._schedule_chunk(batch, sequence, budget, num_left)
            num_left -= before - budget.tokens_left
            passed.add(sequence)
        return passed

    def _admissible(self) -> list[Sequence]:
        """The waiting sequences that may be admitted before others that came first, which have
        their places none the less."""
        first = self._waiting.peek()
        if first is None or first.num_in_flight or len(self._free_slots) < 2:
            return []
        if not self._kv.fits(self._kv.plan(first), self.num_running):
            return []
        return [each for each in self._waiting.next_few() if not each.num_in_flight]

    def _schedule_chunk(
        self, batch: Batch, sequence: Sequence, budget: ChunkBudget, most: float = inf
    ) -> None:
        """A row with as much of the prompt as the budget allows."""
        if self._computes_whole and budget.most(0) < sequence.num_to_compute:
            budget.is_spent = True
            return
        wanted = int(min(sequence.num_to_compute, self._waiting.most_of(sequence), most))
        at_once = 0
        if wanted and self._inserts is not None and sequence.request.inserts:
            at_once = self._inserts.at_once(sequence)
            wanted = max(wanted, at_once)
        if self._kv.has_windows:
            num_coverable = self._kv.num_coverable(sequence)
            if num_coverable < max(at_once, 1):
                self._is_short_of_blocks = True
                return
            wanted = min(wanted, num_coverable)
        if self._inserts is not None and sequence.request.inserts:
            fitting = min(wanted, budget.most(sequence.num_computed))
            if fitting < at_once and len(batch.slots) == batch.num_decodes:
                fitting = at_once  # else it might never be computed
            wanted = at_once = self._inserts.num_computable(sequence, fitting)
        num_tokens = budget.take(sequence.num_computed, wanted, at_once)
        if num_tokens == 0:
            return
        if self._kv.has_windows:
            self._kv.grow(sequence, sequence.num_computed + num_tokens, batch.table_updates)
        if self._kv.has_states:
            row = len(batch.slots)
            batch.snapshots += self._kv.snapshots_in_chunk(sequence, row, num_tokens)
        batch.slots.append(sequence.slot)
        batch.starts.append(sequence.num_computed)
        batch.num_tokens.append(num_tokens)
        num_again = sequence.run_chunk(num_tokens)
        self._recomputed_tokens += num_again
        self._waiting.on_chunk(sequence, num_tokens, num_again)
        is_last = sequence.num_to_compute == 0
        samples = is_last and len(sequence.token_ids) < sequence.max_length
        batch.samples.append(samples)
        if is_last:
            sequence.num_in_flight += 1
            (batch.sampling if samples else batch.prompt_only).append(sequence)
        if outputs := sequence.prompt_request:
            if is_last:
                batch.with_prompt_output.append(sequence)
            if outputs.num_logprobs is not None:
                # A token that follows the prompt's last one is no longer of the prompt.
                batch.num_scored += num_tokens - is_last

    def _admit_waiting(
        self, batch: Batch, budget: ChunkBudget, now: float, *, below: float | None = None
    ) -> None:
        """Admits in policy order until slots, blocks or budget run out; none overtakes another.

        Static and dynamic batching admit the whole batch, whatever the budget: those that it does
        not reach start in a later step. below: of the fair policy, only those of tenants whose
        counter is less.
        """
        may_start = may_start_batch(self._config, self._waiting, self.num_running, now)
        is_closed = self._config.batching is not Batching.CONTINUOUS
        while self._free_slots and (is_closed or not budget.is_spent):
            sequence = self._waiting.peek()
            if sequence is None or sequence.num_in_flight:
                return  # a preempted one waits for the results of its last step
            if self._is_short_of_blocks:
                return  # they are for the prompts that run
            # One that ran before, or is a sample of a running request, belongs to the batch.
            if not (may_start or sequence.first_scheduled_s is not None or sequence.fork_parent):
                return
            if below is not None and self._waiting.counter_of(sequence) >= below:
                return
            if not (is_closed or self._waiting.most_of(sequence)):
                return
            if self._loads.begin(sequence, self.num_running, now):
                self._waiting.remove(sequence)
                continue
            if not self._admit(batch, sequence, now):
                return
            self._schedule_chunk(batch, sequence, budget)

    def _admit(self, batch: Batch, sequence: Sequence, now: float) -> bool:
        """Gives it a slot and blocks for all its known tokens, or as many as it needs at once in a
        group with a window; false where too few are free.

        A block for each running sequence is kept in reserve, so that an admission does not cause a
        preemption in the next step.
        """
        admission = self._kv.plan(sequence)
        if not self._kv.fits(admission, self.num_running):
            return False
        if sequence is self._waiting.peek():
            self._waiting.pop()
        else:
            self._waiting.remove(sequence)
        if sequence.first_scheduled_s is None:
            self._count_first_step(sequence, admission, now)
        self._loads.on_admission(sequence, admission.num_computed)
        batch.copies.extend(self._kv.admit(sequence, admission))
        sequence.admit(self._free_slots.pop(), admission.num_computed, now)
        self._waiting.on_run(sequence)
        self._targets.on_run(sequence)
        self._prefilling[sequence] = None
        batch.assignments.append(_assignment(sequence))
        return True

    def _count_first_step(self, sequence: Sequence, admission: Admission, now: float) -> None:
        num_cached = admission.num_computed
        if sequence.fork_parent is None and not sequence.needs_whole_prompt:
            self._prefix_query_tokens += sequence.num_prompt_tokens
            self._prefix_hit_tokens += num_cached
            self._prefix_stateless_tokens += admission.num_stateless
        started = sequence.request.id, sequence.index, now, num_cached, sequence.predicted_ttft_s
        self._started.append(Started(*started))
        self._waiting.charge_cached(sequence, num_cached)
        if self._inserts is not None and sequence.index == 0:
            self._inserts.count_first_step(sequence, num_cached)

    def _start_decodes(self) -> None:
        """Prefills whose last chunk is scheduled decode from the next step on.

        Only now are their blocks findable and may their samples fork: a step never reads keys and
        values that it computes itself.
        """
        for sequence in list(self._prefilling):
            self._kv.cache_full_blocks(sequence)
            if self._kv.has_windows:
                self._kv.slide(sequence)
            if sequence.num_to_compute == 0:
                del self._prefilling[sequence]
                self._decoding[sequence] = None
                sequence.start_decoding()
                if sequence.request.sampling.max_tokens:
                    self._release_samples(sequence)

    def _release_samples(self, parent: Sequence) -> None:
        """Answer 0 can be forked, or has ended: the other answers join the waiting queue."""
        if parent.index > 0:
            return
        for sample in self._samples.pop(parent.request.id, ()):
            sample.fork_parent = parent
            if parent.request.id in self._unready:
                self._unready[parent.request.id].append(sample)
            else:
                self._waiting.push(sample)

    # How a step's tokens are given to their sequences.

    def _append_tokens(
        self,
        batch: Batch,
        sampled: SampledTokens,
        failures: Mapping[Sequence, FinishReason],
        outputs: StepOutputs,
    ) -> None:
        """Gives each sampling row's sequence its token, or ends it."""
        block_size = self._kv.block_size
        num_rows = len(sampled.token_ids)
        entries = sampled.logprobs or repeat(None, num_rows)
        following: Iterable[FurtherTokens | None] = repeat(None, num_rows)
        if batch.drafts and self._drafter is not None:
            resolve_drafts(self._drafter, batch.sampling, batch.drafts, sampled.further)
            following = [
                sampled.further.get(row) or (None if each.predicted is None else _NONE_FURTHER)
                for row, each in enumerate(batch.sampling)
            ]
        rows = zip(batch.sampling, sampled.token_ids, entries, following, strict=True)
        # Looked up once: this loop is most of what a step costs.
        finished = Status.FINISHED
        add_request, add_index = outputs.request_ids.append, outputs.indices.append
        add_token, add_num_cached = outputs.token_ids.append, outputs.num_cached_tokens.append
        for sequence, token_id, entry, further in rows:
            sequence.num_in_flight -= 1
            if sequence.status is finished:
                continue  # it ended while the step ran: a wasted row
            if failures and sequence in failures:
                outputs.add(self._finish(sequence, failures[sequence]))
                continue
            if further is not None:
                outputs.add(self._append_further(sequence, token_id, entry, further))
                continue
            known = sequence.token_ids
            known.append(token_id)
            length = len(known)
            if (length - 1) % block_size == 0 and sequence.is_running:
                self._kv.cache_full_blocks(sequence)
            finish = None
            if token_id in sequence.stop_token_ids:
                finish = self._end(sequence, FinishReason.STOP, token_id)
            elif length == sequence.max_length:
                finish = self._end(sequence, FinishReason.LENGTH, None)
            if finish is not None or entry is not None:
                logprobs = None if entry is None else [entry]
                outputs.add(output_of(sequence, [token_id], logprobs, finish))
                continue
            add_request(sequence.request.id)
            add_index(sequence.index)
            add_token(token_id)
            add_num_cached(sequence.num_cached_tokens)

    def _append_further(
        self,
        sequence: Sequence,
        token_id: int,
        entry: TokenLogprobs | None,
        further: FurtherTokens,
    ) -> RequestOutput:
        """Gives it its first token and those after accepted drafts, or as many as end it."""
        known, size = sequence.token_ids, self._kv.block_size
        num_full = (len(known) - 1) // size
        new: list[int] = []
        finish: tuple[FinishReason, int | None] | None = None
        for each in (token_id, *further.token_ids):
            known.append(each)
            new.append(each)
            if each in sequence.stop_token_ids:
                finish = FinishReason.STOP, each
            elif len(known) == sequence.max_length:
                finish = FinishReason.LENGTH, None
            if finish is not None:
                break
        if (len(known) - 1) // size > num_full and sequence.is_running:
            self._kv.cache_full_blocks(sequence)
        logprobs = None if entry is None else [entry, *(further.logprobs or ())][: len(new)]
        end = None if finish is None else self._end(sequence, *finish)
        return output_of(sequence, new, logprobs, end)

    # How a sequence leaves.

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.preempt()
        self._waiting.push(sequence)
        self._preemptions += 1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> RequestOutput:
        """Ends it without a new token."""
        if reason is FinishReason.INVALID_LOGITS:
            self._invalid_logits += 1
            self._kv.forget(sequence)
        return output_of(sequence, [], None, self._end(sequence, reason, None))

    def _end_prompt_only(self, sequence: Sequence, reason: FinishReason) -> list[RequestOutput]:
        """Its prompt has run, and max_tokens is 0: it ends, and so do the other answers."""
        sequence.num_in_flight -= 1
        if sequence.status is Status.FINISHED:
            return []
        siblings = [each for each in self._requests[sequence.request.id] if each is not sequence]
        return [self._finish(each, reason) for each in (sequence, *siblings)]

    def _end(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None) -> Finish:
        """Ends it, whatever its status, and frees its slot and blocks."""
        request_id = sequence.request.id
        parked = self._samples.get(request_id, [])
        if sequence.is_running:
            self._leave(sequence)
        elif sequence in parked:
            parked.remove(sequence)
        elif sequence in self._unready.get(request_id, ()):
            self._unready[request_id].remove(sequence)
        elif sequence in self._loads:
            self._loads.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._targets.on_end(sequence, reason)
        self._waiting.close(sequence.request.tenant)
        sequence.finish()
        if self._drafter is not None:
            self._drafter.end(sequence)
        self._release_samples(sequence)
        sequence.fork_parent = None  # no chain of dead sequences
        siblings = self._requests[request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[request_id]
            if self._inserts is not None:
                self._inserts.close(request_id)
            self._unready.pop(request_id, None)
        return Finish(
            reason,
            stop_token_id,
            sequence.first_scheduled_s,
            sequence.num_preemptions,
            sequence.num_recomputed_tokens,
        )

    def _leave(self, sequence: Sequence) -> None:
        if sequence.status is Status.DECODING:
            del self._decoding[sequence]
        else:
            del self._prefilling[sequence]
        self._waiting.on_leave(sequence)
        self._targets.on_leave(sequence)
        self._kv.release(sequence)
        self._free_slots.append(sequence.slot)


def _check_fits(groups: Items[KVGroup | StateGroup], block_size: int, max_model_len: int) -> None:
    for group in groups:
        if group.num_blocks < group.most_blocks(max_model_len, block_size):
            raise InvalidConfig(
                f"the KV cache holds {group.num_blocks * block_size} tokens, fewer than one "
                f"sequence of --max-model-len {max_model_len} needs; lower --max-model-len or "
                "raise --kv-cache-memory-bytes"
            )


def _assignment(sequence: Sequence) -> SlotAssignment:
    return SlotAssignment(
        slot=sequence.slot,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        tables=tuple([tuple(table.block_ids) for table in sequence.tables]),
        sampling=sequence.request.sampling,
        seed=sequence.seed,
        prompt_request=sequence.prompt_request,
        adapter=sequence.request.adapter,
        inserts=tuple([each._replace(content=b"") for each in sequence.request.inserts]),
        num_first=sequence.request.num_first,
    )
