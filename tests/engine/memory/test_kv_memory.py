"""Keys and values outlive an engine: never a wrong token, whatever became of their memory."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.engine.memory import huge_pages
from penstock.engine.memory.pool.journal import ENTRY_BYTES
from penstock.engine.memory.pool.kv_memory import KVMemory, identity_of, make_descriptor
from penstock.scheduler.cache.journal import StoredBlock
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import FinishReason, Request
from tests.support.scheduling import Driver, make_request, tokens_alone

IDENTITY = bytes(range(32))
MAX_MODEL_LEN, NUM_BLOCKS, HEADER = 64, 24, 4096

pytestmark = pytest.mark.skipif(
    not huge_pages.are_possible(), reason="this system has no memory for it (Linux 6.1 has)"
)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = make_descriptor()
    assert descriptor is not None
    yield descriptor
    os.close(descriptor)


def engine(memory: int, *, num_blocks: int = NUM_BLOCKS, identity: bytes = IDENTITY) -> Driver:
    """As a new process would begin."""
    kept = KVMemory(memory, identity)
    return Driver(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, kept=kept)


def hits(driver: Driver, request: Request) -> int:
    """Prompt tokens found. The answer must be right, whatever was."""
    driver.scheduler.add(request)
    driver.run()
    key = (request.id, 0)
    assert driver.tokens[key] == tokens_alone(request, max_model_len=MAX_MODEL_LEN)[key]
    return driver.num_cached[key]


def flip(memory: int, at: int, mask: int = 1) -> None:
    (byte,) = os.pread(memory, 1, at)
    os.pwrite(memory, bytes([byte ^ mask]), at)


def test_another_engine_finds_the_prefixes_of_the_one_before(memory: int) -> None:
    assert hits(engine(memory), make_request("a", 30)) == 0
    assert hits(engine(memory), make_request("b", 30)) == 28
    # Its answer, too, is the beginning of what may come.
    again = engine(memory)
    prompt = [*make_request("", 30).prompt_token_ids]
    prompt += tokens_alone(make_request("a", 30), max_model_len=MAX_MODEL_LEN)["a", 0]
    assert hits(again, make_request("c", prompt)) == 36


def test_survivors_are_found_under_their_own_salt_alone(memory: int) -> None:
    hits(engine(memory), make_request("a", 30, cache_salt="mine"))
    assert hits(engine(memory), make_request("b", 30)) == 0
    assert hits(engine(memory), make_request("c", 30, cache_salt="mine")) == 28


@pytest.mark.parametrize("change", ["identity", "size"])
def test_a_pool_of_something_else_is_not_read(memory: int, change: str) -> None:
    hits(engine(memory), make_request("a", 30))
    if change == "identity":
        other = engine(memory, identity=bytes(32))
    else:
        other = engine(memory, num_blocks=NUM_BLOCKS + 1)
    assert other.kv.num_free == other.kv.num_blocks
    assert hits(other, make_request("b", 30)) == 0


def test_the_size_of_the_pool_before_is_known_before_it_is_mapped(memory: int) -> None:
    assert KVMemory(memory, IDENTITY).num_blocks is None
    engine(memory)
    assert KVMemory(memory, IDENTITY).num_blocks == (NUM_BLOCKS,)
    assert KVMemory(memory, bytes(32)).num_blocks is None
    assert os.fstat(memory).st_size == 0  # free before the next pool is sized


@pytest.mark.parametrize("part", ["tokens", "digests", "entry"])
def test_a_flipped_bit_costs_its_block_and_what_follows_and_no_token(
    memory: int, part: str
) -> None:
    first = engine(memory)
    hits(first, make_request("a", 30))
    [journal] = first.executor.journals
    assert journal
    parts = journal._parts  # type: ignore[attr-defined]
    third = make_request("", 30).prompt_token_ids[8:12]
    survivors = {block.block_id: block for block in journal.survivors()}
    (block_id,) = (
        b for b in survivors if tuple(first.executor._pools[0].ids[b * 4 : b * 4 + 4]) == third
    )
    place = {"tokens": parts[0].offset + block_id * 32, "digests": parts[1].offset + block_id * 32}
    flip(memory, place.get(part, HEADER + block_id * ENTRY_BYTES + 5))
    again = engine(memory)
    assert hits(again, make_request("b", 30)) == 8
    assert hits(again, make_request("c", 30)) == 28  # computed again
    assert again.kv.num_used == 0


def test_blocks_are_evicted_as_if_the_engine_had_gone_on(memory: int) -> None:
    first = engine(memory)
    shared = [3] * 16
    hits(first, make_request("old", [5] * 20, max_tokens=1))
    hits(first, make_request("system", [*shared, 4, 4, 4, 4, 4], max_tokens=1))
    hits(first, make_request("again", [*shared, 6, 6, 6, 6, 6], max_tokens=1))
    again = engine(memory)
    num_idle = again.kv.num_evictable
    assert num_idle == 5 + 5 + 1
    # As many new blocks as leave no room for the oldest, whose last block goes first.
    hits(again, make_request("big", [9] * 60, max_tokens=1))
    assert hits(again, make_request("again2", [*shared, 6, 6, 6, 6, 6], max_tokens=1)) == 20
    assert hits(again, make_request("old2", [5] * 20, max_tokens=1)) < 16


def test_what_a_failed_sequence_computed_is_not_found_by_another_engine(memory: int) -> None:
    first = engine(memory)
    first.scheduler.add(make_request("a", 30))
    batch = first.scheduler.schedule(0.0)
    assert batch
    sampled = first.executor.execute(batch).wait()
    sampled = sampled._replace(failed={0: FinishReason.INVALID_LOGITS})
    first.record(first.scheduler.update(sampled))
    assert first.finishes["a", 0][0].reason is FinishReason.INVALID_LOGITS
    assert first.kv.num_evictable == 0
    assert hits(engine(memory), make_request("b", 30)) == 0


def test_what_a_step_computed_that_did_not_end_is_not_found_by_another_engine(memory: int) -> None:
    first = engine(memory)
    first.scheduler.add(make_request("a", 40))
    first.step()  # 32 tokens of it
    first.launch()  # and here it is killed
    assert hits(engine(memory), make_request("b", 40)) == 32


def test_files_of_a_model_that_changed_are_another_identity(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    before = identity_of(tmp_path, 16)
    assert identity_of(tmp_path, 16) == before != identity_of(tmp_path, 32)
    os.utime(file, ns=(1, 1))
    assert identity_of(tmp_path, 16) != before
    assert identity_of(file, 16) != before


class Lives(RuleBasedStateMachine):
    """One engine after the other in the same memory, which loses bits, entries and its header."""

    @initialize()
    def start(self) -> None:
        descriptor = make_descriptor()
        assert descriptor is not None
        self.memory = descriptor
        self.requests: dict[str, Request] = {}
        self._live()

    def _live(self) -> None:
        kept = KVMemory(self.memory, IDENTITY)
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
        self.driver = Driver(
            num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, config=config, kept=kept
        )

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=40),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 2),
    )
    def add(self, prompt: list[int], max_tokens: int, n: int) -> None:
        name = str(len(self.requests))
        request = make_request(name, prompt, max_tokens=max_tokens, n=n, temperature=1.0, seed=n)
        self.requests[name] = request
        self.driver.scheduler.add(request)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @rule(in_a_step=st.booleans())
    def end(self, in_a_step: bool) -> None:
        """The engine is killed, between two steps or when one has computed."""
        if in_a_step:
            self.driver.launch()
        self._check()
        self._live()

    @precondition(lambda self: hasattr(self, "driver"))
    @rule(at=st.floats(0, 1, exclude_max=True), of=st.sampled_from(["header", "entries", "pool"]))
    def flip(self, at: float, of: str) -> None:
        """A bit, of what nobody uses at the time: the engine has ended."""
        self._check()
        [journal] = self.driver.executor.journals
        assert journal
        parts = journal._parts  # type: ignore[attr-defined]
        start, size = {
            "header": (0, 72),
            "entries": (HEADER, NUM_BLOCKS * ENTRY_BYTES),
            "pool": (parts[int(at * 2)].offset, NUM_BLOCKS * 32),
        }[of]
        flip(self.memory, start + int(at * 1000) % size, 1 << int(at * 8))
        self._live()

    @rule(block=st.integers(0, NUM_BLOCKS - 1), length=st.integers(1, ENTRY_BYTES - 1))
    def tear(self, block: int, length: int) -> None:
        """An entry is written in part: another one's first bytes."""
        self._check()
        other = os.pread(self.memory, length, HEADER + (block + 1) % NUM_BLOCKS * ENTRY_BYTES)
        os.pwrite(self.memory, other, HEADER + block * ENTRY_BYTES)
        self._live()

    @rule(size=st.integers(0, HEADER + NUM_BLOCKS * ENTRY_BYTES))
    def truncate(self, size: int) -> None:
        """All after it is zeros."""
        self._check()
        whole = os.fstat(self.memory).st_size
        # The mapping of the engine that ended must not be touched again.
        del self.driver
        os.ftruncate(self.memory, size)
        os.ftruncate(self.memory, whole)
        self._live()

    def _check(self) -> None:
        """What was returned is what each answer begins with when it runs alone."""
        for (name, index), ids in self.driver.tokens.items():
            alone = tokens_alone(self.requests[name], max_model_len=MAX_MODEL_LEN)[name, index]
            assert alone[: len(ids)] == ids

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self._check()
            assert self.driver.kv.num_used == 0
            os.close(self.memory)


Lives.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestLives = Lives.TestCase


@given(
    digests=st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=12, unique=True),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_each_block_is_evicted_before_the_one_before_it(
    digests: list[bytes], data: st.DataObject
) -> None:
    descriptor = make_descriptor()
    assert descriptor is not None
    try:
        [(_, journal, _)] = KVMemory(descriptor, IDENTITY).map([(len(digests), [(1, 8)])])
        parents = [b"the root has one"]
        for block_id, digest in enumerate(digests):
            parent = data.draw(st.sampled_from(parents))
            journal.record([StoredBlock(block_id, digest, parent)])
            parents.append(digest)
        [(_, journal, _)] = KVMemory(descriptor, IDENTITY).map([(len(digests), [(1, 8)])])
        order = journal.survivors()
        assert sorted(block.digest for block in order) == sorted(digests)
        places = {block.digest: place for place, block in enumerate(order)}
        for block in order:
            assert places.get(block.parent, len(order)) > places[block.digest]
    finally:
        os.close(descriptor)
