"""Images of prompts: when they are encoded, for how long, and whose rows are kept."""

from dataclasses import replace

import pytest

from penstock.engine.step.model_info import EncoderInfo
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import ImageTooLarge, NoEncoder
from penstock.scheduler.inserts import SLICE_S
from penstock.scheduler.step_model.chunk_budget import ChunkBudget
from penstock.scheduler.types import Insert, ScheduledBatch
from tests.support.scheduling import Driver, make_request, tokens_alone

ENCODER = EncoderInfo(
    weight_bytes=0, flops_per_patch=1, flops_per_pair=0, bytes_per_token=1, max_patches=9
)


def image(
    start: int, num_tokens: int, name: bytes = b"a", *, slices: int = 1, is_whole: bool = False
) -> Insert:
    grid = (1, 1, num_tokens)
    return Insert(
        start, num_tokens, name * 16, grid, b"pixels", operations=slices, is_whole=is_whole
    )


def driver(cache_bytes: int = 1000, **config: int) -> Driver:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, **config}
    encoder = replace(ENCODER, cache_bytes=cache_bytes)
    return Driver(config=SchedulerConfig(**limits), encoder=encoder)  # type: ignore[arg-type]


def chunks(batches: list[ScheduledBatch]) -> list[tuple[int, int]]:
    """The start and the tokens of each prefill chunk."""
    return [
        pair
        for batch in batches
        for pair in list(zip(batch.starts, batch.num_tokens, strict=True))[batch.num_decodes :]
    ]


def test_a_chunk_ends_before_an_image_that_is_not_encoded_and_goes_on_once_it_is() -> None:
    run = driver()
    run.add(make_request("a", 20, max_tokens=1, inserts=(image(6, 8, slices=3),)))
    run.run()
    assert chunks(run.batches) == [(0, 6), (6, 14)]
    assert [bool(batch.encodes) for batch in run.batches] == [True, True, True, False]
    assert [len(batch.slots) for batch in run.batches] == [1, 0, 0, 1]


def test_the_image_after_next_is_encoded_beside_the_chunk_of_the_one_before() -> None:
    run = driver()
    images = (image(2, 4, b"a"), image(8, 4, b"b"))
    run.add(make_request("a", 20, max_tokens=1, inserts=images))
    run.run()
    # An executor encodes both in one step, if there is time.
    assert [[each.index for each in batch.encodes] for batch in run.batches] == [[0, 1], []]


def test_others_go_on_and_wait_for_a_slice_at_most() -> None:
    run = driver()
    run.add(make_request("text", 5, max_tokens=12))
    run.step()
    run.add(make_request("image", 20, max_tokens=2, inserts=(image(0, 8, slices=6),)))
    run.run()
    beside = [batch for batch in run.batches if batch.encodes]
    assert len(beside) == 6
    assert all(batch.num_decodes == 1 for batch in beside)  # a token of the text in each
    assert all(batch.encodes[0].budget_s == SLICE_S for batch in beside)
    alone = driver()
    alone.add(make_request("image", 20, max_tokens=2, inserts=(image(0, 8),)))
    batch = alone.step()
    assert batch is not None and batch.encodes[0].budget_s > SLICE_S


def test_equal_images_are_encoded_once_and_counted_as_hits() -> None:
    run = driver()
    for name, start in (("a", 3), ("b", 5)):
        run.add(make_request(name, 20, max_tokens=1, inserts=(image(start, 4, slices=2),)))
        run.step()
    run.run()
    assert sum(len(batch.encodes) for batch in run.batches) == 2
    run.add(make_request("c", 24, max_tokens=1, inserts=(image(9, 4, slices=2),)))
    run.run()
    assert sum(len(batch.encodes) for batch in run.batches) == 2
    stats = run.scheduler.stats()
    assert (stats.encoder_queries_total, stats.encoder_hits_total) == (3, 2)


def test_what_the_prefix_cache_has_is_not_encoded() -> None:
    run = driver(cache_bytes=0)
    request = make_request("a", 20, max_tokens=3, inserts=(image(2, 6),))
    for number in range(2):
        run.add(replace(request, id=type(request.id)(str(number))))
        run.run()
    assert sum(len(batch.encodes) for batch in run.batches) == 1
    assert run.tokens["1", 0] == run.tokens["0", 0]
    other = replace(request, id=type(request.id)("other"), inserts=(image(2, 6, b"b"),))
    run.add(other)
    run.run()
    assert run.num_cached["other", 0] == 0
    assert run.tokens["other", 0] != run.tokens["0", 0]
    assert run.tokens["0", 0] != tokens_alone(make_request("text", 20, max_tokens=3))["text", 0]


def test_what_was_begun_for_an_aborted_request_is_dropped_unless_another_needs_it() -> None:
    run = driver()
    for name in "ab":
        inserts = (image(0, 4, slices=9), image(6, 4, name.encode() * 2, slices=9))
        run.add(make_request(name, 20, max_tokens=1, inserts=inserts))
    run.step()
    run.scheduler.abort(make_request("a", 1).id)
    batch = run.step()
    assert batch is not None
    assert list(batch.dropped) == [b"aa" * 16]
    run.run()
    assert len(run.tokens["b", 0]) == 1


def test_rows_are_dropped_least_recently_used_first_where_the_memory_is_full() -> None:
    run = driver(cache_bytes=10)
    for name in "abac":
        number = str(len(run.batches))
        run.add(make_request(number, 20 + len(run.batches), max_tokens=1, cache_salt=number,
                             inserts=(image(1, 5, name.encode()),)))  # fmt: skip
        run.run()
    run.add(make_request("last", 8, max_tokens=1))
    run.run()
    dropped = [digest for batch in run.batches for digest in batch.dropped]
    assert dropped == [b"b" * 16]
    assert {*run.executor._inserts._rows} == {b"a" * 16, b"c" * 16}


def test_an_image_that_is_whole_is_one_chunk_whatever_a_target_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = driver(max_num_seqs=2, max_num_batched_tokens=16)
    targets = run.scheduler._targets
    monkeypatch.setattr(targets, "chunk_budget", lambda *_, **__: ChunkBudget(5))
    run.add(make_request("a", 40, max_tokens=2, inserts=(image(10, 15, is_whole=True),)))
    run.run()
    pieces = [(0, 5), (5, 5), (10, 15), (25, 5), (30, 5), (35, 5)]
    assert chunks(run.batches) == pieces
    with pytest.raises(
        ImageTooLarge, match=r"has 16 tokens.* room for 15; raise --max-num-batched"
    ):
        run.add(make_request("b", 40, inserts=(image(10, 16, is_whole=True),)))
    assert not run.scheduler.has_work


def test_a_cached_prefix_does_not_end_inside_an_image_that_is_whole() -> None:
    run = driver()
    inserts = (image(6, 12, is_whole=True),)
    run.add(make_request("a", 18, max_tokens=1, inserts=inserts))
    run.run()
    run.add(make_request("b", [*range(3, 21), 9, 9], max_tokens=1, inserts=inserts))
    run.run()
    # 18 tokens were computed; four blocks end inside of the image, and one before it.
    assert run.num_cached["b", 0] == 4


def test_a_sample_of_a_prompt_that_ends_with_an_image_that_is_whole_computes_all_of_it() -> None:
    run = driver()
    inserts = (image(6, 10, is_whole=True),)
    run.add(make_request("a", 16, max_tokens=3, n=2, temperature=1.0, inserts=inserts))
    run.run()
    assert chunks(run.batches) == [(0, 6), (6, 10), (4, 12)]


def test_without_an_encoder_images_are_refused() -> None:
    run = Driver()
    with pytest.raises(NoEncoder):
        run.add(make_request("a", 20, inserts=(image(2, 6),)))
    assert not run.scheduler.has_work


def test_the_executor_gets_no_contents_with_an_assignment() -> None:
    run = driver()
    run.add(make_request("a", 20, max_tokens=1, inserts=(image(2, 6),)))
    run.run()
    [assignment] = run.batches[0].assignments
    assert [(each.start, each.content) for each in assignment.inserts] == [(2, b"")]
