"""A device that runs ahead has a tier in the host's memory: in whatever order its streams go on, no
block is read or written at the wrong time."""

from collections import Counter
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.memory.tiers.block_files import BlockFiles
from penstock.engine.memory.tiers.disk_tier import BlockMemory, DiskTier
from penstock.engine.memory.tiers.host_pieces import HostPieces
from penstock.engine.memory.tiers.host_tier import HostTier
from penstock.scheduler.cache.tier import TierBlock
from penstock.scheduler.config import Policy, SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.types import FinishReason, Request
from tests.support.scheduling import make_request, run_alone, tokens_alone
from tests.support.simulated_device import AheadDriver, SimulatedMover
from tests.support.tier_files import DAMAGES, damage, files_in
from tests.support.tiered import BLOCK_SIZE, GIB, IDENTITY, MAX_MODEL_LEN, hits, in_memory, on_disk

BACKGROUND = (
    *("steps", "outward", "inward", "begin stores", "end stores", "begin loads", "end loads"),
    "disk",
)
# With how often each comes.
FOREGROUND = ("add", "launch", "collect", "background", "abort", "flip", "damage", "wait", "end")
FOREGROUND_WEIGHTS = (40, 150, 150, 700, 6, 15, 6, 4, 1)


def engine(
    directory: Path | None = None,
    *,
    num_blocks: int = 24,
    num_slots: int = 100,
    most_blocks: int = 3,
    windows: tuple[int | None, ...] = (None,),
    more_blocks: tuple[int, ...] = (),
    policy: Policy = Policy.FCFS,
    max_batched_tokens: int = 32,
) -> AheadDriver:
    """As a new process would begin. most_blocks: that move at once."""
    movers: list[SimulatedMover] = []

    def make_tier(memory: BlockMemory) -> HostTier:
        sizes = [memory.num_bytes(group) for group in range(len(windows))]
        pieces = HostPieces(sizes, num_slots, slice_bytes=5 * sum(sizes))
        movers.append(SimulatedMover(memory, pieces, most_blocks))
        disk = None
        if directory is not None:
            disk = DiskTier(BlockFiles(directory, IDENTITY, GIB), pieces, 1e9, num_readers=0)
        return HostTier(movers[0], pieces, 1e9, disk, has_threads=False)

    driver = AheadDriver(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        windows=windows,
        more_blocks=more_blocks,
        config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=max_batched_tokens, policy=policy
        ),
        make_tier=make_tier,
    )
    assert isinstance(driver.tier, HostTier)
    driver.host, [driver.mover] = driver.tier, movers
    return driver


def flip_a_bit(driver: AheadDriver, seed: int) -> None:
    """In the memory of some block that is ready, if there is one."""
    tier = driver.host
    ready = [(group, piece) for group, each in enumerate(tier._ready) for piece in each.values()]
    if ready:
        group, piece = ready[seed % len(ready)]
        [run] = tier._pieces.runs(group, [piece.slot])
        run[0, seed % run.shape[1]] ^= 1 << seed % 8


def test_a_prefix_comes_back_from_memory_after_its_blocks_were_used_for_others() -> None:
    driver = engine(num_blocks=17)
    hits(driver, make_request("a", [5] * 30))
    hits(driver, make_request("b", [6] * 60, max_tokens=1))
    assert hits(driver, make_request("c", [5] * 30)) == 28
    memory = in_memory(driver)
    assert 0 < memory.hit_blocks_total <= 7
    assert memory.read_bytes_total == memory.hit_blocks_total * 64
    assert driver.host.stats().disk is None


def test_the_block_that_was_used_least_recently_gives_way() -> None:
    driver = engine(num_blocks=17, num_slots=20)
    for name, token in (("a", 5), ("b", 6)):
        hits(driver, make_request(name, [token] * 30))
    hits(driver, make_request("c", [5] * 30))  # used again, from the pool or not
    hits(driver, make_request("d", [7] * 60, max_tokens=1))
    hits(driver, make_request("e", [8] * 60, max_tokens=1))
    assert in_memory(driver).removed_blocks_total > 0
    assert in_memory(driver).num_blocks == 20


@pytest.mark.parametrize("seed", [0, 13, 100, 999])
def test_a_block_whose_memory_changed_is_computed_again(seed: int) -> None:
    driver = engine(num_blocks=17)
    hits(driver, make_request("a", [5] * 30, max_tokens=1))
    hits(driver, make_request("b", [6] * 60, max_tokens=1))
    tier = driver.host
    assert tier._ready[0]
    for piece in tier._ready[0].values():  # of all
        [run] = tier._pieces.runs(0, [piece.slot])
        run[0, seed % run.shape[1]] ^= 1 << seed % 8
    evicted = in_memory(driver).num_blocks
    assert hits(driver, make_request("c", [5] * 30)) < 28
    assert 0 < in_memory(driver).damaged_blocks_total < evicted
    hits(driver, make_request("d", [6] * 60, max_tokens=1))
    assert hits(driver, make_request("e", [5] * 30)) == 28  # stored again


def test_memory_that_changed_before_its_file_was_written_is_found_too(tmp_path: Path) -> None:
    driver = engine(tmp_path)
    driver.scheduler.add(make_request("a", 30))
    while driver.scheduler.has_work:
        driver.step()
    tier = driver.host
    while tier._begin_stores():
        tier._end_stores()
    for piece in tier._ready[0].values():
        [run] = tier._pieces.runs(0, [piece.slot])
        run[0, 3] ^= 1
    tier.work()
    assert len(files_in(tmp_path)) == 9  # each with the checksum of what was computed
    again = engine(tmp_path)
    assert hits(again, make_request("b", 30)) == 0
    assert in_memory(again).damaged_blocks_total == 7
    assert hits(engine(tmp_path), make_request("c", 30)) == 28  # they were written again


def test_what_memory_has_no_room_for_comes_from_the_disk_and_so_after_a_restart(
    tmp_path: Path,
) -> None:
    driver = engine(tmp_path, num_blocks=17, num_slots=15)
    hits(driver, make_request("a", [5] * 30))
    hits(driver, make_request("b", [6] * 60, max_tokens=1))
    assert hits(driver, make_request("c", [5] * 30)) == 28
    assert on_disk(driver).hit_blocks_total > 0
    again = engine(tmp_path, num_slots=15)
    assert hits(again, make_request("d", [5] * 30)) == 28
    assert on_disk(again).hit_blocks_total == 7 and in_memory(again).hit_blocks_total == 0


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_computed_again(tmp_path: Path, kind: str) -> None:
    first = engine(tmp_path)
    hits(first, make_request("a", 30))
    digests = [*first.kv._block_of]
    damage(next(tmp_path.glob(f"*/*/{digests[2].hex()}.0")), kind, seed=1)
    assert hits(engine(tmp_path), make_request("b", 30)) == 8
    assert hits(engine(tmp_path), make_request("c", 30)) == 28


def test_a_load_that_was_cancelled_writes_nothing() -> None:
    driver = engine(num_blocks=17)
    hits(driver, make_request("a", [5] * 30))
    hits(driver, make_request("b", [6] * 60, max_tokens=1))
    driver.scheduler.add(make_request("c", [5] * 30))
    driver.step()
    loading = dict(driver.host._loads)
    assert loading and not any(load.is_taken for load in loading.values())
    driver.now += 2.0  # it is late
    driver.step()
    assert not driver.host._loads
    read = in_memory(driver).read_bytes_total
    driver.run()
    assert in_memory(driver).read_bytes_total == read
    assert driver.tokens["c", 0] == tokens_alone(make_request("c", [5] * 30))["c", 0]


def test_a_step_waits_for_the_gather_of_a_block_that_it_writes_to() -> None:
    driver = engine()
    driver.scheduler.add(make_request("a", 30, max_tokens=1))
    while driver.scheduler.has_work:
        driver.step()
    assert driver.host._begin_stores() and driver.host._gathering
    block_id, block = next(iter(driver.host._gathering.blocks.items()))
    before = bytes(driver.mover._memory.read(0, block_id))
    driver.host.withdraw(0, block_id)
    zeros = memoryview(bytes(len(before)))
    driver.mover.steps.put(lambda: driver.mover._memory.write(0, block_id, zeros))
    driver.mover.steps.record().finish()
    driver.host._end_stores()
    slot = driver.host._ready[0][block].slot
    assert bytes(driver.mover._slot(0, slot)) == before


def test_a_block_that_was_evicted_before_it_was_stored_is_not_stored() -> None:
    """Two aborts, after which a block that the second prompt wrote to is to be computed for the
    third, which begins as the first."""
    driver = engine(num_blocks=17, max_batched_tokens=80)
    prompt = [5] * 63
    for name, tokens in (("a", prompt), ("b", [6] * 63)):
        request = make_request(name, tokens, max_tokens=1)
        driver.scheduler.add(request)
        driver.launch()
        if name == "b":
            driver.collect()  # the first step; the second runs
        driver.record(driver.scheduler.abort(request.id))
    driver.scheduler.add(make_request("c", prompt, max_tokens=1))
    driver.launch()
    driver.collect()  # the second step
    if driver.host._begin_stores():
        driver.host._end_stores()  # what the second wrote, as the third has not run
    driver.run()
    hits(driver, make_request("d", [7] * 63, max_tokens=1))  # takes all blocks
    assert hits(driver, make_request("e", prompt, max_tokens=1)) == 60


def test_groups_of_layers_take_turns_when_blocks_are_gathered() -> None:
    driver = engine(windows=(None, 9), more_blocks=(24,), most_blocks=1)
    tier, groups = driver.host, []
    for number in range(4):
        for group in (0, 1):  # always more of both
            tier.store(TierBlock(group, bytes([number])), number)
        assert tier._begin_stores() and tier._gathering
        groups.append(tier._gathering.group)
        tier._end_stores()
    assert groups == [0, 1, 0, 1]


def test_a_load_waits_for_the_steps_that_were_launched_before_it() -> None:
    driver = engine()
    hits(driver, make_request("a", 30))
    block, piece = next(iter(driver.host._ready[0].items()))
    expected = bytes(driver.mover._slot(0, piece.slot))
    zeros = memoryview(bytes(len(expected)))
    driver.mover.steps.put(lambda: driver.mover._memory.write(0, 20, zeros))
    driver.host.load({block: 20})
    driver.host.work()
    driver.mover.steps.record().finish()
    assert [loaded.is_intact for loaded in driver.host.loaded()] == [True]
    assert bytes(driver.mover._memory.read(0, 20)) == expected


def test_what_a_failed_sequence_computed_is_not_found_again() -> None:
    driver = engine()
    hits(driver, make_request("a", 30))
    request = make_request("b", 30)
    driver.scheduler.add(request)
    driver.step()
    [sequence] = driver.scheduler._requests[request.id]
    driver.scheduler._finish(sequence, FinishReason.INVALID_LOGITS)
    driver.run()
    assert not any(TierBlock(0, digest) in driver.host for digest in sequence.block_digests)


class Walk:
    """Processes that end at any moment, while streams, threads and the disk go on in any order, and
    memory and files are damaged; all by chance."""

    def __init__(self, chance: Random, directory: Path | None) -> None:
        self.chance, self.directory = chance, directory
        self.windows = chance.choice([(None,), (None,), (9,), (None, 6)])
        self.options: dict[str, Any] = {
            "windows": self.windows,
            "num_slots": chance.choice([6, 30, 100]),
            "most_blocks": chance.randint(1, 8),
            "policy": chance.choice([*Policy]),
            "max_batched_tokens": chance.choice([32, 80]),
        }
        self.sizes = [
            KVGroup(0, window, alignment=1).most_blocks(MAX_MODEL_LEN, BLOCK_SIZE)
            + chance.randint(0, 8)
            for window in self.windows
        ]
        # Streams and threads are quick and slow in different walks.
        self.weights = [chance.choice([1, 3, 9]) for _ in BACKGROUND]
        self.names = count()
        self.start()

    def start(self) -> None:
        first, *more = self.sizes
        self.requests: dict[str, Request] = {}
        self.driver = engine(
            self.directory, num_blocks=first, more_blocks=tuple(more), **self.options
        )

    def go(self, num_actions: int) -> None:
        chance = self.chance
        for number in range(num_actions):
            driver = self.driver
            match chance.choices(FOREGROUND, FOREGROUND_WEIGHTS)[0]:
                case "add":
                    self.add()
                case "abort" if self.requests:
                    request = self.requests[chance.choice([*self.requests])]
                    driver.record(driver.scheduler.abort(request.id))
                case "launch" if len(driver.launched) < 2:
                    driver.launch()
                    driver.now += 0.02
                case "collect" if driver.launched:
                    driver.collect()
                case "flip":
                    flip_a_bit(driver, chance.randrange(10_000))
                case "damage" if self.directory and (files := files_in(self.directory)):
                    damage(chance.choice(files), chance.choice(DAMAGES), chance.randrange(1000))
                case "wait":  # loads that have not ended are late; and nobody waits for others
                    driver.now += chance.choice([2.0, 60.0, 60.0])
                case "end":
                    self.check()
                    self.start()
                case "background":
                    self.background(chance.choices(BACKGROUND, self.weights)[0])
            if number % 8 == 0:
                self.check_blocks()

    def add(self) -> None:
        chance, name = self.chance, str(next(self.names))
        prompt = [3 + chance.randrange(3)] * 4 * chance.randint(1, 12)
        prompt += chance.choices([3, 4], k=chance.randint(1, 4))
        request = make_request(
            name,
            prompt,
            n=chance.choice([1, 1, 2]),
            max_tokens=chance.randint(1, 10),
            tenant=chance.choice("ab"),
            temperature=1.0,
        )
        self.requests[name] = request
        self.driver.scheduler.add(request)

    def background(self, what: str) -> None:
        mover, host = self.driver.mover, self.driver.host
        match what:
            case "steps" | "outward" | "inward":
                getattr(mover, what).go_on()
            case "begin stores" if host._gathering is None:
                host._begin_stores()
            case "begin loads" if host._scattering is None:
                host._begin_loads()
            case "end stores":
                host._end_stores()
            case "end loads":
                host._end_loads()
            case "disk":
                disk = host._disk
                for queue in (disk._reads, disk._writes) if disk else ():
                    if not queue.empty():
                        queue.get()()

    def end(self) -> None:
        driver = self.driver
        while driver.launched:
            driver.collect()
        driver.now += 60.0
        driver.run()
        driver.host.work()
        driver.scheduler.schedule(driver.now)  # takes what nobody waits for any more
        assert not any(kv.num_used for kv in driver.scheduler._kv.blocks)
        assert not driver.host.rate.open_bytes
        self.check()

    def check(self) -> None:
        """What was answered is what there is alone."""
        for (name, index), tokens in self.driver.tokens.items():
            alone = run_alone(
                self.requests[name], max_model_len=MAX_MODEL_LEN, windows=self.windows
            )
            assert tokens == alone.tokens[name, index][: len(tokens)]

    def check_blocks(self) -> None:
        """No block is lost or doubled, and no slot."""
        scheduler, tier = self.driver.scheduler, self.driver.host
        assert scheduler._loads is not None
        for group, kv in enumerate(scheduler._kv.blocks):
            held = Counter(
                block
                for sequences in scheduler._requests.values()
                for sequence in sequences
                for table in sequence.tables[group : group + 1]
                for block in table.block_ids[table.num_released :]
            )
            held.update(scheduler._loads.block_ids(group))
            assert all(kv.ref_count(block) == held[block] for block in range(kv.num_blocks))
            assert len(held) + kv.num_free + kv.num_evictable == kv.num_blocks
            slots = [piece.slot for piece in tier._ready[group].values()]
            slots += [slot for block, slot in tier._reading.items() if block.group == group]
            if tier._gathering and tier._gathering.group == group:
                slots += tier._gathering.slots
            loads = [*tier._loads.values(), *(tier._scattering.loads if tier._scattering else ())]
            dropped = {
                load.piece.slot
                for load in loads
                if load.block.group == group and load.piece and load.piece.is_dropped
                if load.piece.num_pins
            }
            slots += [*dropped, *tier._free[group]]
            assert sorted(slots) == list(range(self.options["num_slots"]))


@pytest.mark.parametrize("has_disk", [False, True])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_in_any_order_of_streams_and_threads_answers_are_what_they_are_alone(
    has_disk: bool, seed: int
) -> None:
    with TemporaryDirectory() as scratch:
        walk = Walk(Random(seed), Path(scratch) if has_disk else None)
        walk.go(800)
        walk.end()
