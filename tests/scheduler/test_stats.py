"""What a step reads and computes, counted for layers with and without a window."""

from penstock.scheduler.batch import work_of
from penstock.scheduler.stats import AttentionWork, GraphSizes, StepWork
from tests.support.tiny_models import make_batch

# Two decodes at positions 9 and 1, and a chunk of 5 tokens at positions 6 to 10.
BATCH = make_batch((0, 1, 2), (9, 1, 6), (1, 1, 5), num_decodes=2, samples=(True, True, False))


def test_a_step_is_counted_by_hand() -> None:
    assert work_of(BATCH, (None, 4)) == StepWork(
        num_prefill_tokens=5,
        num_decode_tokens=2,
        num_sequences=3,
        num_sampled=2,
        num_scored=0,
        num_chunks=1,
        attention=(
            AttentionWork(10 + 2 + 11, 10 + 2 + 7 + 8 + 9 + 10 + 11, decode_context_tokens=10 + 2),
            # The chunk's first query, at 6, sees keys 3 to 6; its last one keys 7 to 10.
            AttentionWork(4 + 2 + 8, 4 + 2 + 4 * 5, decode_context_tokens=4 + 2),
        ),
    )


def test_a_window_counts_the_keys_that_a_walk_over_all_queries_finds() -> None:
    for window in (1, 2, 5, 7, 100):
        for start in range(9):
            for n in range(1, 9):
                (work,) = work_of(make_batch((0,), (start,), (n,)), (window,)).attention
                seen = [range(max(0, p + 1 - window), p + 1) for p in range(start, start + n)]
                assert work.context_tokens == len(set().union(*seen))
                assert work.pairs == sum(map(len, seen))


def test_a_step_is_padded_to_the_next_graph_of_its_kind() -> None:
    sizes = GraphSizes(decodes=(1, 2, 4), chunks=(8,))
    decodes = [make_batch(tuple(range(n)), (5,) * n, (1,) * n, num_decodes=n) for n in (2, 3, 5)]
    assert [work_of(batch, (None,), sizes).num_padding for batch in decodes] == [0, 1, 0]
    assert work_of(BATCH, (None,), sizes).num_padding == 1  # 7 tokens, with a chunk
