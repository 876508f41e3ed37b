"""Which sampled ids a rank writes that learns of them some steps later."""

from penstock.engine.executors.awaited_ids import AwaitedIds
from penstock.scheduler.types import SamplingParams, ScheduledBatch, SlotAssignment


def batch(*rows: tuple[int, int, int, bool], assigned: tuple[int, ...] = ()) -> ScheduledBatch:
    """rows: slot, start, tokens, and whether it samples."""
    slots, starts, counts, samples = zip(*rows, strict=True)
    sampling = SamplingParams(max_tokens=1)
    return ScheduledBatch(
        step=1,
        assignments=tuple(
            SlotAssignment(
                slot=slot,
                token_ids=(5,),
                num_prompt_tokens=1,
                tables=((0,),),
                sampling=sampling,
                seed=0,
            )
            for slot in assigned
        ),
        table_updates=(),
        copies=(),
        slots=slots,
        starts=starts,
        num_tokens=counts,
        samples=samples,
        num_decodes=0,
    )


def test_ids_belong_after_the_tokens_of_the_rows_that_sample() -> None:
    awaited = AwaitedIds()
    awaited.launched(batch((4, 9, 1, True), (0, 0, 8, False), (2, 16, 3, True)))
    awaited.launched(batch((1, 0, 5, True)))
    assert list(awaited.told([[70, 71], [72]])) == [(4, 10, 70), (2, 19, 71), (1, 5, 72)]


def test_a_row_without_an_id_has_id_0_as_on_rank_0() -> None:
    awaited = AwaitedIds()
    awaited.launched(batch((4, 9, 1, True)))
    assert list(awaited.told([[-1]])) == [(4, 10, 0)]


def test_an_id_is_of_nobody_once_its_slot_has_another_sequence() -> None:
    awaited = AwaitedIds()
    awaited.launched(batch((4, 9, 1, True), (2, 16, 3, True)))
    following = batch((4, 0, 24, True), assigned=(4,))
    awaited.assigned(following)
    awaited.launched(following)
    assert list(awaited.told([[70, 71], [72]])) == [(2, 19, 71), (4, 24, 72)]
