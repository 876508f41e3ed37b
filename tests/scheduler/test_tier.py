"""Blocks go to a tier below the pool and come back: fewer steps, and never another token."""

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.memory.tiers.block_files import BlockFiles
from penstock.engine.memory.tiers.disk_tier import BlockMemory, DiskTier
from penstock.scheduler.cache.blocks import BlockTable
from penstock.scheduler.cache.state_cache import StateTable
from penstock.scheduler.config import Policy, SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.types import FinishReason, Request
from tests.support.scheduling import Driver, make_request, run_alone, tokens_alone
from tests.support.tier_files import DAMAGES, damage, files_in
from tests.support.tiered import BLOCK_SIZE, GIB, IDENTITY, MAX_MODEL_LEN, hits, on_disk, stats


class Slow(DiskTier):
    """A tier that takes a second a byte, as it says itself."""

    def __init__(self, files: BlockFiles, memory: BlockMemory) -> None:
        super().__init__(files, memory, 1.0, num_readers=0)


def engine(
    directory: Path,
    *,
    num_blocks: int = 24,
    identity: bytes = IDENTITY,
    limit: int = GIB,
    windows: tuple[int | None, ...] = (None,),
    more_blocks: tuple[int, ...] = (),
    num_states: int = 0,
    policy: Policy = Policy.FCFS,
) -> Driver:
    """As a new process would begin."""
    files = BlockFiles(directory, identity, limit)
    return Driver(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        windows=windows,
        more_blocks=more_blocks,
        num_states=num_states,
        config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, policy=policy),
        make_tier=lambda memory: DiskTier(files, memory, 1e9, num_readers=0),
    )


def test_another_process_reads_what_one_before_computed(tmp_path: Path) -> None:
    assert hits(engine(tmp_path), make_request("a", 30)) == 0
    again = engine(tmp_path)
    assert hits(again, make_request("b", 30)) == 28
    assert stats(again).hit_tokens_total == 28
    assert hits(again, make_request("c", 30)) == 28  # in the pool now
    assert stats(again).query_tokens_total == 28


def test_a_prefix_comes_back_after_its_memory_was_used_for_others(tmp_path: Path) -> None:
    driver = engine(tmp_path, num_blocks=17)
    hits(driver, make_request("a", [5] * 30))
    hits(driver, make_request("b", [6] * 60, max_tokens=1))
    assert hits(driver, make_request("c", [5] * 30)) == 28


def test_what_a_window_has_no_room_for_is_computed(tmp_path: Path) -> None:
    """A prompt that shares the window of one that runs needs few blocks; its end needs others."""
    windows = (None, 16)
    first = engine(tmp_path, num_blocks=40, windows=windows, more_blocks=(40,))
    first.scheduler.add(make_request("a", 50))
    first.run()
    assert isinstance(first.tier, DiskTier)
    first.tier.work()
    driver = engine(tmp_path, num_blocks=40, windows=windows, more_blocks=(7,))
    shared, whole = make_request("b", 18, max_tokens=20), make_request("c", 50)
    driver.scheduler.add(shared)
    for _ in range(3):
        driver.step()
    driver.scheduler.add(whole)
    driver.run()
    alone = run_alone(whole, max_model_len=MAX_MODEL_LEN, windows=windows)
    assert driver.tokens[whole.id, 0] == alone.tokens[whole.id, 0]


def test_what_the_pool_still_has_is_not_read_again(tmp_path: Path) -> None:
    driver = engine(tmp_path, num_blocks=16)
    hits(driver, make_request("a", [5] * 41, max_tokens=1))
    hits(driver, make_request("b", [6] * 33, max_tokens=1))  # evicts the last blocks of the first
    before = on_disk(driver).read_bytes_total
    assert hits(driver, make_request("c", [5] * 41, max_tokens=1)) == 40
    num_read = (on_disk(driver).read_bytes_total - before) // 64
    assert 0 < num_read < 10


def test_prefixes_are_found_under_their_own_salt_and_adapter_alone(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", 30, cache_salt="mine"))
    assert hits(engine(tmp_path), make_request("b", 30)) == 0
    assert hits(engine(tmp_path), make_request("c", 30, cache_salt="mine")) == 28


def test_another_model_finds_nothing_in_the_same_directory(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", 30))
    other = engine(tmp_path, identity=bytes(31) + b"1")
    assert hits(other, make_request("b", 30)) == 0
    assert stats(other).absent_total == 1
    assert hits(engine(tmp_path), make_request("c", 30)) == 28


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_block_is_computed_again(tmp_path: Path, kind: str) -> None:
    first = engine(tmp_path)
    hits(first, make_request("a", 30))
    digests = [*first.kv._block_of]
    third = next(tmp_path.glob(f"*/*/{digests[2].hex()}.0"))
    damage(third, kind, seed=1)
    again = engine(tmp_path)
    assert hits(again, make_request("b", 30)) == 8
    assert (on_disk(again).damaged_blocks_total, stats(again).unreadable_total) == (
        (0, 0) if kind == "missing" else (1, 1)
    )
    assert hits(engine(tmp_path), make_request("c", 30)) == 28  # written again
    assert again.kv.num_used == 0


def test_a_file_that_vanishes_after_it_was_found_costs_its_block_alone(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", 30))
    again = engine(tmp_path)
    for path in files_in(tmp_path):
        path.unlink()
    assert hits(again, make_request("b", 30)) == 0
    assert stats(again).unreadable_total == 1


def test_others_go_on_while_a_sequence_waits_for_its_blocks(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", 30))
    driver = engine(tmp_path)
    driver.scheduler.add(make_request("waits", 30))
    driver.scheduler.add(make_request("goes on", [9] * 10, max_tokens=3))
    for _ in range(4):
        driver.step()
    assert driver.finishes["goes on", 0] and not driver.tokens["waits", 0]
    assert driver.scheduler.num_waiting == 1
    driver.run()
    assert driver.num_cached["waits", 0] == 28


def test_two_prompts_with_one_prefix_read_it_once(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", 30))
    driver = engine(tmp_path)
    for name in ("b", "c"):
        driver.scheduler.add(make_request(name, 30))
    driver.run()
    assert (driver.num_cached["b", 0], driver.num_cached["c", 0]) == (28, 28)
    assert on_disk(driver).read_bytes_total == 7 * 64


def test_a_sequence_that_ends_while_it_waits_leaves_nothing_behind(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", 30))
    driver = engine(tmp_path)
    request = make_request("b", 30)
    driver.scheduler.add(request)
    driver.step()
    [output] = driver.scheduler.abort(request.id)
    assert output.finish and output.finish.reason is FinishReason.ABORT
    assert not driver.scheduler.has_work
    assert driver.tier
    driver.tier.work()
    driver.step()
    assert driver.kv.num_used == 0
    assert hits(driver, make_request("c", 30)) == 28
    assert on_disk(driver).read_bytes_total == 7 * 64


def test_a_read_that_hangs_is_given_up_and_the_prompt_computed(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", 30))
    driver = engine(tmp_path)
    driver.scheduler.add(make_request("b", 30))
    driver.step()
    assert driver.kv.num_used == 7
    driver.now += 2.0
    while driver.scheduler.has_work:
        driver.step()
    assert driver.num_cached["b", 0] == 0
    assert driver.tokens["b", 0] == tokens_alone(make_request("b", 30))["b", 0]
    assert stats(driver).late_total == 1 and driver.kv.num_used == 0
    # The disk may still hang: the next one does not wait for it. Half a minute later one tries.
    assert hits(driver, make_request("c", [*range(40, 70)])) == 0
    assert driver.tier
    driver.tier.work()


def test_what_is_quicker_to_compute_is_not_read(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", 30))
    driver = engine(tmp_path)
    loads = driver.scheduler._loads
    assert loads is not None
    loads._compute_s = lambda start, end: 1e-6 * (end - start)
    assert hits(driver, make_request("b", 30)) == 0
    assert stats(driver).slower_total == 1


def test_a_copy_of_a_block_that_was_written_to_meanwhile_is_thrown_away(tmp_path: Path) -> None:
    driver = engine(tmp_path)
    tier = driver.tier
    assert tier
    memory = tier._memory
    read = memory.read

    def read_while_it_is_used_again(group: int, block_id: int) -> memoryview:
        content = read(group, block_id)
        tier.withdraw(group, block_id)
        return content

    memory.read = read_while_it_is_used_again  # type: ignore[method-assign]
    hits(driver, make_request("a", 30))
    assert not files_in(tmp_path)
    assert on_disk(driver).unwritten_blocks_total == 9


def test_what_a_failed_sequence_computed_is_not_read_by_another_process(tmp_path: Path) -> None:
    driver = engine(tmp_path)
    hits(driver, make_request("a", 30))
    assert files_in(tmp_path)
    request = make_request("b", 30)
    driver.scheduler.add(request)
    driver.step()
    [sequence] = driver.scheduler._requests[request.id]
    driver.scheduler._finish(sequence, FinishReason.INVALID_LOGITS)
    assert driver.tier
    driver.tier.work()
    assert hits(engine(tmp_path), make_request("c", 30)) == 0


def test_layers_with_a_window_need_the_blocks_of_the_window_alone(tmp_path: Path) -> None:
    windows, more = (None, 6), (24,)
    request = make_request("a", 41)
    first = engine(tmp_path, windows=windows, more_blocks=more)
    first.scheduler.add(request)
    first.run()
    assert first.tier
    first.tier.work()
    again = engine(tmp_path, windows=windows, more_blocks=more)
    again.scheduler.add(make_request("b", 41))
    again.run()
    assert again.num_cached["b", 0] == 40
    assert again.tokens["b", 0] == first.tokens["a", 0]
    assert on_disk(again).read_bytes_total == (10 + 2) * 64


class Tiers(RuleBasedStateMachine):
    """Processes on one directory that end at any moment, while its files are damaged."""

    @initialize(
        windows=st.sampled_from([(None,), (None,), (9,), (None, 6)]),
        num_states=st.sampled_from([0, 0, 2, 5, 20]),
        policy=st.sampled_from(Policy),
        limit=st.sampled_from([GIB, 2000]),
        data=st.data(),
    )
    def start(
        self,
        windows: tuple[int | None, ...],
        num_states: int,
        policy: Policy,
        limit: int,
        data: st.DataObject,
    ) -> None:
        self.scratch = TemporaryDirectory()
        self.directory, self.windows = Path(self.scratch.name), windows
        self.policy, self.limit, self.num_states = policy, limit, num_states
        self.sizes = [
            data.draw(
                st.integers(
                    KVGroup(0, window, alignment=1).most_blocks(MAX_MODEL_LEN, BLOCK_SIZE), 30
                )
            )
            for window in windows
        ]
        self.requests: dict[str, Request] = {}
        self.drivers = [self._engine(), self._engine()]

    def _engine(self) -> Driver:
        return engine(
            self.directory,
            num_blocks=self.sizes[0],
            more_blocks=tuple(self.sizes[1:]),
            windows=self.windows,
            num_states=self.num_states,
            policy=self.policy,
            limit=self.limit,
        )

    @rule(
        which=st.integers(0, 1),
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=40),
        repeated=st.integers(0, 9),
        n=st.integers(1, 2),
        tenant=st.sampled_from("ab"),
    )
    def add(self, which: int, prompt: list[int], repeated: int, n: int, tenant: str) -> None:
        name = str(len(self.requests))
        prompt = ([3] * 4 * repeated + prompt)[:50]
        request = make_request(
            name, prompt, n=n, tenant=tenant, temperature=1.0, stop_token_ids=(7, 11)
        )
        self.requests[name] = request
        self.drivers[which].scheduler.add(request)

    @rule(which=st.integers(0, 1))
    def step(self, which: int) -> None:
        self.drivers[which].step()
        self.drivers[which].now += 0.02

    @rule(which=st.integers(0, 1), num=st.integers(1, 8))
    def read_and_write(self, which: int, num: int) -> None:
        tier = self.drivers[which].tier
        assert tier
        for queue in (tier._reads, tier._writes):
            for _ in range(num):
                if not queue.empty():
                    queue.get()()

    @rule(which=st.integers(0, 1), seconds=st.sampled_from([2.0, 60.0]))
    def let_time_pass(self, which: int, seconds: float) -> None:
        """Reads that have not ended are late."""
        self.drivers[which].now += seconds

    @rule(which=st.integers(0, 1))
    def look_around(self, which: int) -> None:
        tier = self.drivers[which].tier
        assert tier
        tier._scan()

    @rule(which=st.integers(0, 1))
    def end(self, which: int) -> None:
        """Without a word, and another begins."""
        self._check(self.drivers[which])
        self.drivers[which] = self._engine()

    @precondition(lambda self: bool(files_in(self.directory)))
    @rule(kind=st.sampled_from(DAMAGES), seed=st.integers(0, 1000))
    def damage(self, kind: str, seed: int) -> None:
        files = files_in(self.directory)
        damage(files[seed % len(files)], kind, seed)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1), data=st.data())
    def abort(self, which: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        driver = self.drivers[which]
        driver.record(driver.scheduler.abort(self.requests[name].id))

    @invariant()
    def no_block_is_lost_or_doubled(self) -> None:
        for driver in getattr(self, "drivers", ()):
            scheduler = driver.scheduler
            assert scheduler._loads is not None
            for index, kv in enumerate(scheduler._kv.groups):
                held = Counter(
                    block
                    for sequences in scheduler._requests.values()
                    for sequence in sequences
                    for table in sequence.tables[index : index + 1]
                    for block in blocks_of(table)
                )
                for load in scheduler._loads._open:
                    held.update(i for block, i in load.block_ids.items() if block.group == index)
                assert all(kv.ref_count(block) == held[block] for block in range(kv.num_blocks))
                assert len(held) + kv.num_free + kv.num_evictable == kv.num_blocks

    def teardown(self) -> None:
        for driver in getattr(self, "drivers", ()):
            driver.run()
            assert driver.tier
            driver.tier.work()
            driver.scheduler.schedule(driver.now)  # takes what nobody waits for any more
            assert not any(kv.num_used for kv in driver.scheduler._kv.groups)
            assert not driver.tier.rate.open_bytes
            self._check(driver)
        if hasattr(self, "scratch"):
            self.scratch.cleanup()

    def _check(self, driver: Driver) -> None:
        """What was answered is what there is alone."""
        for (name, index), tokens in driver.tokens.items():
            request = self.requests[name]
            alone = run_alone(
                request,
                max_model_len=MAX_MODEL_LEN,
                windows=self.windows,
                num_states=min(self.num_states, 8),
            )
            assert tokens == alone.tokens[name, index][: len(tokens)]


def blocks_of(table: BlockTable) -> list[int]:
    """Those that it holds, and the snapshots of a state that are not findable yet."""
    pending = [each.state for each in table.pending] if isinstance(table, StateTable) else []
    return [*table.block_ids[table.num_released :], *pending]


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def test_the_oldest_files_go_where_the_limit_is_reached(tmp_path: Path) -> None:
    size = 64 + 56
    driver = engine(tmp_path, limit=20 * size)
    for i in range(12):
        hits(driver, make_request(str(i), [20 + i] * 13, max_tokens=1))  # three blocks each
        for path in files_in(tmp_path):  # a second older
            used_s = path.stat().st_mtime - 1
            os.utime(path, (used_s, used_s))
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 20 * size
    assert on_disk(driver).removed_blocks_total > 10
    again = engine(tmp_path, limit=20 * size)
    assert hits(again, make_request("last", [31] * 13, max_tokens=1)) == 12
    assert hits(again, make_request("first", [20] * 13, max_tokens=1)) == 0
