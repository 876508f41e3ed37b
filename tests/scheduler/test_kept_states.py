"""Snapshots of recurrent states below the pool, and beyond the end of an engine: what is found by
them, and never another token."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.memory import huge_pages
from penstock.engine.memory.pool.kv_memory import KVMemory, make_descriptor
from penstock.engine.memory.tiers.block_files import BlockFiles
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.scheduler.cache.state_cache import OPENING
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import FinishReason, RequestId, ResumedAnswer
from tests.support.scheduling import Driver, make_request, tokens_alone
from tests.support.tier_files import DAMAGES, damage, files_in
from tests.support.tiered import BLOCK_SIZE, GIB, IDENTITY, MAX_MODEL_LEN, hits, on_disk, stats

NUM_STATES = 8
PROMPT = [3 + i % 90 for i in range(30)]
# Its snapshot: of whole blocks, before the few tokens that open the answer.
OF_PROMPT = (len(PROMPT) - OPENING) // BLOCK_SIZE * BLOCK_SIZE
STATE_BYTES = 16


def engine(
    directory: Path | None = None,
    *,
    kept: KVMemory | None = None,
    num_blocks: int = 24,
    num_states: int = NUM_STATES,
) -> Driver:
    """As a new process would begin."""
    files = None if directory is None else BlockFiles(directory, IDENTITY, GIB)
    return Driver(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_states=num_states,
        kept=kept,
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        make_tier=None
        if files is None
        else lambda memory: DiskTier(files, memory, 1e9, num_readers=0),
    )


def answer(name: str, prompt: list[int], max_tokens: int = 8) -> list[int]:
    request = make_request(name, prompt, max_tokens=max_tokens)
    return tokens_alone(request, max_model_len=MAX_MODEL_LEN, num_states=NUM_STATES)[name, 0]


def state_files(directory: Path) -> list[Path]:
    return [path for path in files_in(directory) if path.name.endswith(".1")]


def test_another_process_goes_on_from_the_states_in_the_directory(tmp_path: Path) -> None:
    assert hits(engine(tmp_path), make_request("a", PROMPT)) == 0
    # One where the prompt ends, and one where the answer does.
    assert len(state_files(tmp_path)) == 2
    again = engine(tmp_path)
    assert hits(again, make_request("b", PROMPT)) == OF_PROMPT
    assert on_disk(again).read_bytes_total == OF_PROMPT // BLOCK_SIZE * 64 + STATE_BYTES
    # The next turn: the whole first one is found, but for the rest of its last block.
    turn = [*PROMPT, *answer("a", PROMPT), 60, 61]
    assert hits(engine(tmp_path), make_request("c", turn)) == 36


def test_a_state_comes_back_after_its_memory_was_used_for_others(tmp_path: Path) -> None:
    driver = engine(tmp_path, num_states=3)
    hits(driver, make_request("a", PROMPT))
    for number in range(3):
        hits(driver, make_request(f"b{number}", [40 + number] * 30))
    assert hits(driver, make_request("c", PROMPT)) == OF_PROMPT
    assert stats(driver).hit_tokens_total


def test_where_one_state_is_all_there_is_a_loaded_one_becomes_the_sequences_own(
    tmp_path: Path,
) -> None:
    hits(engine(tmp_path), make_request("a", PROMPT))
    driver = engine(tmp_path, num_states=1)
    assert hits(driver, make_request("b", PROMPT)) == OF_PROMPT
    assert driver.scheduler.stats().groups[1].num_free == 1


def test_of_an_answer_the_last_state_alone_is_written(tmp_path: Path) -> None:
    hits(engine(tmp_path), make_request("a", PROMPT, max_tokens=30))
    assert len(state_files(tmp_path)) == 2


@pytest.mark.parametrize("kind", DAMAGES)
def test_without_its_state_what_came_after_the_one_before_is_computed(
    tmp_path: Path, kind: str
) -> None:
    hits(engine(tmp_path), make_request("a", PROMPT))
    for path in state_files(tmp_path):
        damage(path, kind, seed=3)
    again = engine(tmp_path)
    assert hits(again, make_request("b", PROMPT)) == 0
    damaged = on_disk(again).damaged_blocks_total
    assert (damaged, stats(again).unreadable_total) == ((0, 0) if kind == "missing" else (1, 1))
    assert hits(engine(tmp_path), make_request("c", PROMPT)) == OF_PROMPT  # written again


def test_a_stream_that_another_server_takes_over_goes_on_from_the_directory(
    tmp_path: Path,
) -> None:
    whole = answer("a", PROMPT, max_tokens=30)
    first = engine(tmp_path)
    first.scheduler.add(make_request("a", PROMPT, max_tokens=30))
    while len(first.tokens["a", 0]) < 17:
        first.step()
    first.record(first.scheduler.abort(RequestId("a")))
    first.step()  # what it gave back is stored with the next step that ends
    first.scheduler.add(make_request("b", [9], max_tokens=2))
    first.run()
    assert first.tier is not None
    first.tier.work()
    known = tuple(first.tokens["a", 0])
    second = engine(tmp_path)
    request = make_request("a", PROMPT, max_tokens=30)
    second.scheduler.add(replace(request, resumed=(ResumedAnswer(0, known),)))
    second.run()
    assert [*known, *second.tokens["a", 0]] == whole
    # All but the rest of a block was computed by the first one.
    batches = [batch for batch in second.batches if batch.num_decodes < len(batch.slots)]
    computed = sum(sum(batch.num_tokens[batch.num_decodes :]) for batch in batches)
    assert computed < 2 * BLOCK_SIZE


def test_what_a_failed_sequence_computed_is_found_by_no_other_process(tmp_path: Path) -> None:
    driver = engine(tmp_path)
    hits(driver, make_request("a", PROMPT))
    driver.scheduler.add(make_request("b", PROMPT))
    driver.step()
    [sequence] = driver.scheduler._requests[RequestId("b")]
    driver.scheduler._finish(sequence, FinishReason.INVALID_LOGITS)
    assert driver.tier is not None
    driver.tier.work()
    assert len(state_files(tmp_path)) == 1  # where the other's answer ended
    assert hits(engine(tmp_path), make_request("c", PROMPT)) == 0


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = make_descriptor()
    assert descriptor is not None
    yield descriptor
    os.close(descriptor)


needs_huge_pages = pytest.mark.skipif(
    not huge_pages.are_possible(), reason="this system has no memory for it (Linux 6.1 has)"
)


def kept_engine(memory: int, num_states: int = NUM_STATES) -> Driver:
    return engine(kept=KVMemory(memory, IDENTITY), num_states=num_states)


def run(driver: Driver, name: str, prompt: list[int], max_tokens: int = 8) -> int:
    """How many tokens of the prompt were found."""
    driver.scheduler.add(make_request(name, prompt, max_tokens=max_tokens))
    driver.run()
    assert driver.tokens[name, 0] == answer(name, prompt, max_tokens)
    return driver.num_cached[name, 0]


@needs_huge_pages
def test_another_engine_goes_on_from_the_states_of_the_one_before(memory: int) -> None:
    assert run(kept_engine(memory), "a", PROMPT) == 0
    assert run(kept_engine(memory), "b", PROMPT) == OF_PROMPT
    assert run(kept_engine(memory), "c", [*PROMPT, *answer("a", PROMPT), 60, 61]) == 36


@needs_huge_pages
def test_an_engine_that_is_killed_in_the_midst_of_an_answer_leaves_the_prompts_state(
    memory: int,
) -> None:
    first = kept_engine(memory)
    first.scheduler.add(make_request("a", PROMPT, max_tokens=30))
    for _ in range(20):
        first.step()
    first.launch()
    second = kept_engine(memory)
    assert second.scheduler.stats().groups[1].num_evictable == 1
    assert run(second, "b", PROMPT, max_tokens=30) == OF_PROMPT


@needs_huge_pages
def test_a_state_that_changed_meanwhile_is_not_used(memory: int) -> None:
    first = kept_engine(memory)
    run(first, "a", PROMPT)
    states = first.executor.journals[1]
    for block in states.survivors():
        place = states._parts[1].offset + 8 * block.block_id  # type: ignore[attr-defined]
        [byte] = os.pread(memory, 1, place)
        os.pwrite(memory, bytes([byte ^ 1]), place)
    again = kept_engine(memory)
    assert run(again, "b", PROMPT) == 0
    assert again.scheduler.stats().prefix_stateless_tokens_total


@needs_huge_pages
def test_a_pool_of_another_number_of_states_is_made_anew(memory: int) -> None:
    run(kept_engine(memory), "a", PROMPT)
    other = kept_engine(memory, num_states=NUM_STATES + 1)
    assert other.scheduler.stats().groups[1].num_free == NUM_STATES + 1
    assert run(other, "b", PROMPT) == 0
