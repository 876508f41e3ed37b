"""Any order of add, make ready, launch, collect, abort, fork, preempt: nothing is lost, and nothing
ends twice."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.executors.scripted import shown_id
from penstock.engine.step.model_info import EncoderInfo
from penstock.scheduler.cache.sequence import Sequence, Status
from penstock.scheduler.config import Batching, Policy, SchedulerConfig
from penstock.scheduler.errors import ImageTooLarge
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.policy.fairness import FairQueue
from penstock.scheduler.types import FinishReason, Insert, Pooling, Request, ScheduledBatch
from tests.support.drafting import Adversary, EveryDraft, Oracle, OracleProposer
from tests.support.scheduling import Driver, make_request, run_alone

MAX_MODEL_LEN, BLOCK_SIZE = 48, 4
# Of drafts.
SOURCES: list[Callable[[], Oracle] | None] = [
    None,
    None,
    Adversary,
    *(partial(kind, share) for kind in (Oracle, OracleProposer) for share in (0.0, 0.5, 1.0)),
]


def inserts_of(images: list[tuple[int, int, int, bool]], num_tokens: int) -> tuple[Insert, ...]:
    """Those that fit a prompt and do not overlap. images: start, tokens, name, whether whole."""
    inserts: list[Insert] = []
    for start, num, name, is_whole in sorted(images):
        end = inserts[-1].end if inserts else 0
        if end <= start and start + num <= num_tokens:
            # Equal digests are read alike.
            digest = bytes([name, num, is_whole]) * 5 + b"."
            inserts.append(
                Insert(*(start, num, digest, (1, 1, num)), operations=name % 4, is_whole=is_whole)
            )
    return tuple(inserts)


class SchedulerMachine(RuleBasedStateMachine):
    """A tiny pool and a vocabulary of few ids, so that pressure, hits and collisions are common."""

    @initialize(
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 30),
        caching=st.booleans(),
        policy=st.sampled_from(Policy),
        batching=st.sampled_from(Batching),
        groups=st.sampled_from([(None,), (None,), (9,), (None, 6), (None, 2, 14)]),
        num_states=st.sampled_from([0, 0, 1, 2, 5, 40]),
        num_cohorts=st.sampled_from([1, 1, 2, 3]),
        source=st.sampled_from(SOURCES),
        cache_bytes=st.sampled_from([0, 40, 1000]),
        num_in_flight=st.integers(1, 3),
        data=st.data(),
    )
    def start(
        self,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        policy: Policy,
        batching: Batching,
        groups: tuple[int | None, ...],
        num_states: int,
        num_cohorts: int,
        source: Callable[[], Oracle] | None,
        cache_bytes: int,
        num_in_flight: int,
        data: st.DataObject,
    ) -> None:
        self.encoder = EncoderInfo(
            weight_bytes=0,
            flops_per_patch=1,
            flops_per_pair=0,
            bytes_per_token=4,
            max_patches=9,
            cache_bytes=cache_bytes,
        )
        # A snapshot is of a number of tokens that is known when its step is scheduled: in a
        # pipeline, where a sequence is in one step at a time, it is.
        is_ahead = num_cohorts == 1 and num_in_flight > 1
        self.drafts = None if source is None or (num_states and is_ahead) else source()
        drafter, propose = None, None
        if isinstance(self.drafts, OracleProposer):
            propose, drafter = self.drafts, EveryDraft([], most=5, proposes="model")
        elif self.drafts is not None:
            drafter = EveryDraft([self.drafts], most=5)
        self.windows, self.num_states = groups, num_states
        # From what one sequence needs at least to more than all of them can use.
        sizes = [
            data.draw(
                st.integers(
                    KVGroup(0, window, alignment=1).most_blocks(MAX_MODEL_LEN, BLOCK_SIZE), 40
                )
            )
            for window in groups
        ]
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            policy=policy,
            batching=batching,
        )
        self.driver = Driver(
            num_blocks=sizes[0],
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            config=config,
            windows=groups,
            more_blocks=tuple(sizes[1:]),
            num_states=num_states,
            num_cohorts=num_cohorts,
            drafter=drafter,
            propose=propose,
            num_in_flight=max(num_in_flight, num_cohorts),
            encoder=self.encoder,
        )
        self.ids_of: dict[bytes, list[int]] = {}
        self.note_what_is_hashed()
        self.requests: dict[str, Request] = {}
        self.ready: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=30),
        max_tokens=st.integers(0, 18),
        num_prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        pooling=st.sampled_from([None, None, *Pooling]),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        temperature=st.sampled_from([0.0, 1.0]),
        salt=st.sampled_from(["", "x"]),
        is_ready=st.sampled_from([True, True, False]),
        images=st.lists(
            st.tuples(
                st.integers(0, 25), st.integers(1, 9), st.sampled_from(b"abc"), st.booleans()
            ),
            max_size=3,
        ),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        num_prompt_logprobs: int | None,
        pooling: Pooling | None,
        n: int,
        priority: int,
        tenant: str,
        temperature: float,
        salt: str,
        is_ready: bool,
        images: list[tuple[int, int, int, bool]],
    ) -> None:
        name = str(len(self.requests))
        request = make_request(
            name,
            prompt,
            max_tokens=max_tokens,
            n=n,
            priority=priority,
            tenant=tenant,
            temperature=temperature,
            seed=len(name),
            arrival_s=self.driver.now,
            cache_salt=salt,
            stop_token_ids=(7, 11, 13),
            num_prompt_logprobs=num_prompt_logprobs,
            pooling=pooling,
            inserts=inserts_of(images, len(prompt)),
        )
        refused = ImageTooLarge if self.is_too_large(request) else ()
        try:
            self.driver.add(request, is_ready=is_ready)
        except refused:
            return
        assert not refused
        self.requests[name] = request
        if self.drafts and not (request.inserts and isinstance(self.drafts, OracleProposer)):
            alone = self.alone(request)
            self.drafts.learn(request, [alone.tokens[name, index] for index in range(n)])
        if is_ready:
            self.ready.add(name)

    def is_too_large(self, request: Request) -> bool:
        config, whole = self.driver.config, [each for each in request.inserts if each.is_whole]
        rooms = [config.max_step_tokens - config.max_num_seqs + 1]
        for window, kv in zip(self.windows, self.driver.scheduler._kv.blocks, strict=True):
            if window is not None:
                rooms.append((kv.num_blocks - 2) * BLOCK_SIZE - window)
        return any(each.num_tokens > min(rooms) for each in whole)

    def alone(self, request: Request) -> Driver:
        return run_alone(
            request,
            max_model_len=MAX_MODEL_LEN,
            windows=self.windows,
            num_states=8 * bool(self.num_states),
            encoder=replace(self.encoder, cache_bytes=1 << 20),
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def make_ready(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.driver.scheduler.make_ready(self.requests[name].id)
        self.ready.add(name)

    @rule()
    def launch(self) -> None:
        """As many steps as may be in flight."""
        if len(self.driver.launched) < self.driver.num_in_flight:
            batch = self.driver.launch()
            if batch is not None:
                self.rows_write_to_blocks_of_their_own(batch)
        self.driver.now += 0.02

    def note_what_is_hashed(self) -> None:
        kv = self.driver.scheduler._kv
        cache_full_blocks = kv.cache_full_blocks

        def note(sequence: Sequence) -> None:
            cache_full_blocks(sequence)
            for at, digest in enumerate(sequence.block_digests):
                ids = sequence.token_ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
                for each in sequence.request.inserts:
                    for position in range(each.start, each.end):
                        if position // BLOCK_SIZE == at:
                            ids[position % BLOCK_SIZE] = shown_id(each, position)
                assert self.ids_of.setdefault(digest, ids) == ids

        kv.cache_full_blocks = note  # type: ignore[method-assign]

    def rows_write_to_blocks_of_their_own(self, batch: ScheduledBatch) -> None:
        scheduler = self.driver.scheduler
        sequences = {each.slot: each for each in (*scheduler._decoding, *scheduler._prefilling)}
        # Of a chunk, what its last token does not read has been given back.
        decodes = batch.slots[: batch.num_decodes]
        nums_unresolved = batch.num_unresolved or (0,) * batch.num_decodes
        rows = zip(decodes, batch.starts, batch.num_tokens, nums_unresolved, strict=False)
        for slot, start, num_tokens, num_unresolved in rows:
            first = (start - num_unresolved) // BLOCK_SIZE
            places = range(first, -(-(start + num_tokens) // BLOCK_SIZE))
            for index, kv in scheduler._kv._with_blocks:
                table = sequences[slot].tables[index]
                own = table.block_ids[places.start : places.stop]
                assert table.num_released <= places.start and len(own) == len(places)
                assert all(kv.ref_count(block) == 1 for block in own)
                known = self.driver.executor._slots[slot].tables[index]
                assert known[places.start : places.stop] == own

    @precondition(lambda self: self.driver.launched)
    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), index=st.one_of(st.none(), st.integers(0, 2)))
    def abort(self, data: st.DataObject, index: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.driver.record(self.driver.scheduler.abort(self.requests[name].id, index))

    @invariant()
    def no_block_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        for index, kv in enumerate(scheduler._kv.groups):
            held = Counter(
                block
                for sequences in scheduler._requests.values()
                for sequence in sequences
                for table in sequence.tables[index : index + 1]
                for block in (
                    *table.block_ids[table.num_released :],
                    *(each.state for each in getattr(table, "pending", ())),
                )
            )
            assert all(kv.ref_count(block) == held[block] for block in range(kv.num_blocks))
            assert len(held) + kv.num_free + kv.num_evictable == kv.num_blocks

    @invariant()
    def blocks_that_can_be_found_hold_the_ids_of_their_sequences(self) -> None:
        if not hasattr(self, "driver"):
            return
        for index, kv in self.driver.scheduler._kv._with_blocks:
            pool = self.driver.executor._pools[index].ids
            for block, digest in kv._digest_of.items():
                ids = pool[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
                assert ids == self.ids_of[digest]

    @invariant()
    def a_window_holds_what_its_next_token_reads_and_little_more(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        for index, kv in scheduler._kv._with_blocks:
            for sequence in [*scheduler._decoding, *scheduler._prefilling]:
                table = sequence.tables[index]
                first_read = kv.group.first_read(sequence.num_computed - sequence.num_unresolved)
                assert table.num_released * BLOCK_SIZE <= first_read
                most = kv.group.most_blocks(MAX_MODEL_LEN, BLOCK_SIZE)
                assert table.num_held <= most

    @invariant()
    def no_sequence_writes_to_a_shared_block(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        for index, kv in scheduler._kv._with_blocks:
            for sequence in [*scheduler._decoding, *scheduler._prefilling]:
                first = (sequence.num_computed - sequence.num_unresolved) // BLOCK_SIZE
                for block in sequence.tables[index].block_ids[first:]:
                    assert kv.ref_count(block) == 1

    @invariant()
    def only_running_sequences_have_slots(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        running = [*scheduler._decoding, *scheduler._prefilling]
        slots = [sequence.slot for sequence in running] + scheduler._free_slots
        assert sorted(slots) == list(range(self.driver.config.max_num_seqs))
        assert all(sequence.status is Status.DECODING for sequence in scheduler._decoding)

    @invariant()
    def only_running_sequences_have_computed_tokens(self) -> None:
        if not hasattr(self, "driver"):
            return
        for sequences in self.driver.scheduler._requests.values():
            for each in sequences:
                assert each.status is not Status.WAITING or not each.num_computed

    @invariant()
    def tenants_hold_what_is_theirs(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler, fair = self.driver.scheduler, self.driver.scheduler._waiting
        if not isinstance(fair, FairQueue):
            return
        is_open, is_running = Counter[str](), Counter[str]()
        for sequences in scheduler._requests.values():
            for sequence in sequences:
                is_open[sequence.request.tenant] += 1
                is_running[sequence.request.tenant] += sequence.is_running
        held = {name: tenant.num_open for name, tenant in fair._active.items()}
        assert held == dict(is_open)
        assert all(fair._active[name].num_running == is_running[name] for name in held)

    @invariant()
    def only_requests_that_are_ready_run(self) -> None:
        if hasattr(self, "driver"):
            assert self.ready.issuperset(self.driver.scheduler.running_ids)

    @invariant()
    def the_executor_has_what_is_kept_and_nothing_else(self) -> None:
        if not hasattr(self, "driver") or self.driver.launched:
            return
        inserts, table = self.driver.scheduler._inserts, self.driver.executor._inserts
        assert inserts is not None
        rows, begun = {*table._rows}, {*table._encodings}
        assert rows >= {*inserts._kept}
        assert rows | begun <= {*inserts._kept, *inserts._begun, *inserts._dropped}

    @invariant()
    def no_answer_ends_twice(self) -> None:
        if hasattr(self, "driver"):
            assert all(len(finishes) == 1 for finishes in self.driver.finishes.values())

    def teardown(self) -> None:
        """Every accepted answer ends, with the tokens that it has when it runs alone, and every
        prompt has its outputs once, those that it has when it runs alone."""
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        for request in self.requests.values():
            driver.scheduler.make_ready(request.id)
        while driver.launched:
            driver.collect()
        driver.run()
        assert driver.scheduler.num_waiting == 0
        inserts = driver.scheduler._inserts
        assert inserts is not None and not (inserts._begun or inserts._open or inserts._needed)
        assert not any(kv.num_used for kv in driver.scheduler._kv.groups)
        for name, request in self.requests.items():
            alone = self.alone(request)
            if driver.finishes[name, 0][0].reason is not FinishReason.ABORT or driver.prompts[name]:
                assert driver.prompts[name] == alone.prompts[name]
            for index in range(request.n):
                finish = driver.finishes[name, index][0]
                tokens = driver.tokens[name, index]
                expected = alone.tokens[name, index]
                if finish.reason is FinishReason.ABORT:
                    expected = expected[: len(tokens)]
                assert tokens == expected


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, derandomize=True
)
