"""A device that runs ahead has a tier in the host's memory: in whatever order its streams go on, no
block is read or written at the wrong time."""

from collections.abc import Iterable
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
from penstock.scheduler.cache.prefix import block_digests, root_digest
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
    num_states: int = 0,
    policy: Policy = Policy.FCFS,
    max_batched_tokens: int = 32,
) -> AheadDriver:
    """As a new process would begin. most_blocks: that move at once."""
    parts: list[tuple[SimulatedMover, HostPieces, DiskTier | None]] = []

    def make_tier(memory: BlockMemory) -> HostTier:
        sizes = [memory.num_bytes(group) for group in range(len(windows) + bool(num_states))]
        # Of states fewer, where there are any.
        each = [num_slots] * len(windows) + [max(1, num_slots // 4)] * bool(num_states)
        pieces = HostPieces(sizes, each, slice_bytes=5 * sum(sizes))
        mover = SimulatedMover(memory, pieces, most_blocks)
        disk = None
        if directory is not None:
            disk = DiskTier(BlockFiles(directory, IDENTITY, GIB), pieces, 1e9, num_readers=0)
        parts.append((mover, pieces, disk))
        return HostTier(mover, pieces, 1e9, disk, has_threads=False)

    driver = AheadDriver(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        windows=windows,
        more_blocks=more_blocks,
        num_states=num_states,
        config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=max_batched_tokens, policy=policy
        ),
        make_tier=make_tier,
    )
    assert isinstance(driver.tier, HostTier)
    driver.host, [(driver.mover, driver.pieces, driver.disk)] = driver.tier, parts
    return driver


def flip_bits(driver: AheadDriver, slots: Iterable[int], seed: int = 0, group: int = 0) -> None:
    """Flips a bit of each of these slots, in whatever state it is."""
    for slot in slots:
        [run] = driver.pieces.runs(group, [slot])
        run[0, seed % run.shape[1]] ^= 1 << seed % 8


def digests_of(driver: AheadDriver, request: Request) -> list[bytes]:
    key = driver.host.key
    root = root_digest(request.cache_salt, None, key)
    return block_digests(root, request.prompt_token_ids, BLOCK_SIZE, key)


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
    flip_bits(driver, range(100), seed)
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
    while tier.begin_stores():
        tier.end_stores()
    flip_bits(driver, range(100))
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
    request = make_request("a", 30)
    hits(first, request)
    damage(next(tmp_path.glob(f"*/*/{digests_of(first, request)[2].hex()}.0")), kind, seed=1)
    assert hits(engine(tmp_path), make_request("b", 30)) == 8
    assert hits(engine(tmp_path), make_request("c", 30)) == 28


def test_a_load_that_was_cancelled_writes_nothing() -> None:
    driver = engine(num_blocks=17)
    hits(driver, make_request("a", [5] * 30))
    hits(driver, make_request("b", [6] * 60, max_tokens=1))
    driver.scheduler.add(make_request("c", [5] * 30))
    assert not driver.step()  # it waits for its load, which nobody has begun
    driver.now += 2.0  # it is late
    assert driver.step()
    read = in_memory(driver).read_bytes_total
    driver.run()
    assert in_memory(driver).read_bytes_total == read
    assert driver.tokens["c", 0] == tokens_alone(make_request("c", [5] * 30))["c", 0]


def test_a_step_waits_for_the_gather_of_a_block_that_it_writes_to() -> None:
    driver = engine()
    driver.scheduler.add(make_request("a", 30, max_tokens=1))
    while driver.scheduler.has_work:
        driver.step()
    assert driver.host.begin_stores()
    [(group, moves)] = driver.mover.gathers
    before = bytes(driver.mover.memory.read(group, moves[0].block_id))
    driver.host.withdraw(group, moves[0].block_id)
    zeros = memoryview(bytes(len(before)))
    driver.mover.steps.put(lambda: driver.mover.memory.write(group, moves[0].block_id, zeros))
    driver.mover.steps.record().finish()
    driver.host.end_stores()
    assert bytes(driver.mover.slot(group, moves[0].slot)) == before


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
    if driver.host.begin_stores():
        driver.host.end_stores()  # what the second wrote, as the third has not run
    driver.run()
    hits(driver, make_request("d", [7] * 63, max_tokens=1))  # takes all blocks
    assert hits(driver, make_request("e", prompt, max_tokens=1)) == 60


def test_groups_of_layers_take_turns_when_blocks_are_gathered() -> None:
    driver = engine(windows=(None, 9), more_blocks=(24,), most_blocks=1)
    tier = driver.host
    for number in range(4):
        for group in (0, 1):  # always more of both
            tier.store(TierBlock(group, bytes([number])), number)
        assert tier.begin_stores() and not tier.begin_stores()
        tier.end_stores()
    assert [group for group, _ in driver.mover.gathers] == [0, 1, 0, 1]


def test_a_load_waits_for_the_steps_that_were_launched_before_it() -> None:
    driver = engine()
    request = make_request("a", 30)
    hits(driver, request)
    digest = digests_of(driver, request)[0]
    block_id = driver.kv.find(digest)
    assert block_id is not None
    expected = bytes(driver.mover.memory.read(0, block_id))
    zeros = memoryview(bytes(len(expected)))
    driver.mover.steps.put(lambda: driver.mover.memory.write(0, 20, zeros))
    driver.host.load({TierBlock(0, digest): 20})
    driver.host.work()
    driver.mover.steps.record().finish()
    assert [loaded.is_intact for loaded in driver.host.loaded()] == [True]
    assert bytes(driver.mover.memory.read(0, 20)) == expected


def test_what_a_failed_sequence_computed_is_not_found_again() -> None:
    driver = engine()
    hits(driver, make_request("a", 30))
    request = make_request("b", 30)
    driver.scheduler.add(request)
    driver.launch()
    sampled = driver.launched.popleft().wait()
    sampled = sampled._replace(failed={0: FinishReason.INVALID_LOGITS})
    driver.record(driver.scheduler.update(sampled))
    driver.run()
    assert not any(TierBlock(0, digest) in driver.host for digest in digests_of(driver, request))


class Walk:
    """Processes that end at any moment, while streams, threads and the disk go on in any order, and
    memory and files are damaged; all by chance."""

    def __init__(self, chance: Random, directory: Path | None) -> None:
        self.chance, self.directory = chance, directory
        self.windows = chance.choice([(None,), (None,), (9,), (None, 6)])
        self.options: dict[str, Any] = {
            "windows": self.windows,
            "num_states": chance.choice([0, 0, 2, 6, 20]),
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
        for _ in range(num_actions):
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
                    nums = driver.pieces.num_slots
                    group = chance.randrange(len(nums))
                    slots = [chance.randrange(nums[group])]
                    flip_bits(driver, slots, chance.randrange(10_000), group)
                case "damage" if self.directory and (files := files_in(self.directory)):
                    damage(chance.choice(files), chance.choice(DAMAGES), chance.randrange(1000))
                case "wait":  # loads that have not ended are late; and nobody waits for others
                    driver.now += chance.choice([2.0, 60.0, 60.0])
                case "end":
                    self.check()
                    self.start()
                case "background":
                    self.background(chance.choices(BACKGROUND, self.weights)[0])

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
            case "begin stores":
                host.begin_stores()
            case "begin loads":
                host.begin_loads()
            case "end stores":
                host.end_stores()
            case "end loads":
                host.end_loads()
            case "disk" if self.driver.disk:
                self.driver.disk.work(most=1)

    def end(self) -> None:
        driver = self.driver
        while driver.launched:
            driver.collect()
        driver.now += 60.0
        driver.run()
        driver.host.work()
        driver.scheduler.schedule(driver.now)  # takes what nobody waits for any more
        found = driver.scheduler.stats()
        assert not any(each.num_used for each in found.groups)
        assert not driver.host.rate.open_bytes
        self.check()
        self.check_slots()

    def check(self) -> None:
        """What was answered is what there is alone."""
        for (name, index), tokens in self.driver.tokens.items():
            alone = run_alone(
                self.requests[name],
                max_model_len=MAX_MODEL_LEN,
                windows=self.windows,
                num_states=min(self.options["num_states"], 8),
            )
            assert tokens == alone.tokens[name, index][: len(tokens)]

    def check_slots(self) -> None:
        """No slot is lost or doubled: as many new blocks as there are slots are there at once."""
        tier = self.driver.host
        blocks = [
            TierBlock(group, f"{group} {number}".encode())
            for group, num_slots in enumerate(self.driver.pieces.num_slots)
            for number in range(num_slots)
        ]
        for block in blocks:
            tier.store(block, 0)
            tier.work()
        assert all(block in tier for block in blocks)
        assert in_memory(self.driver).num_blocks == len(blocks)


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
