"""Which sampled ids a rank writes that learns of them some steps later."""

import msgspec

from penstock.engine.executors.awaited_ids import AwaitedIds, StepIds
from penstock.scheduler.types import (
    FurtherTokens,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
    SlotAssignment,
    TokenLogprobs,
)


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
    told = awaited.told([StepIds([70, 71]), StepIds([72])])
    assert list(told) == [(4, 10, 70), (2, 19, 71), (1, 5, 72)]


def test_a_row_without_an_id_has_id_0_as_on_rank_0() -> None:
    awaited = AwaitedIds()
    awaited.launched(batch((4, 9, 1, True)))
    assert list(awaited.told([StepIds([-1])])) == [(4, 10, 0)]


def test_an_id_is_of_nobody_once_its_slot_has_another_sequence() -> None:
    awaited = AwaitedIds()
    awaited.launched(batch((4, 9, 1, True), (2, 16, 3, True)))
    following = batch((4, 0, 24, True), assigned=(4,))
    awaited.assigned(following)
    awaited.launched(following)
    assert list(awaited.told([StepIds([70, 71]), StepIds([72])])) == [(2, 19, 71), (4, 24, 72)]


def test_ids_after_accepted_drafts_follow_the_first_whatever_was_drafted() -> None:
    awaited = AwaitedIds()
    drafted = batch((4, 9, 4, True), (1, 30, 3, True), (2, 16, 3, True))
    awaited.launched(drafted._replace(num_decodes=2, drafts=((50, 51, 52), (60, 61))))
    told = awaited.told([StepIds([50, 7, 72], {0: [51, 8]})])
    assert list(told) == [(4, 10, 50), (4, 11, 51), (4, 12, 8), (1, 31, 7), (2, 19, 72)]
    assert StepIds([5, 6, 7], {1: [8, 9]}).num_accepted == [0, 2]


def test_nor_are_those_after_drafts_of_somebody_once_the_slot_has_another_sequence() -> None:
    awaited = AwaitedIds()
    drafted = batch((4, 9, 3, True))._replace(num_decodes=1, drafts=((50, 51),))
    awaited.launched(drafted)
    awaited.assigned(batch((4, 0, 24, True), assigned=(4,)))
    assert not list(awaited.told([StepIds([50], {0: [51, 8]})]))


def test_what_is_told_of_a_step_is_its_ids_alone() -> None:
    logprobs = [TokenLogprobs(-1.0, ())]
    further = {1: FurtherTokens([8, 9], logprobs * 2)}
    sampled = SampledTokens(step=1, token_ids=[6, 7], logprobs=[*logprobs, None], further=further)
    encoded = msgspec.msgpack.encode(StepIds.of(sampled))
    decoded = msgspec.msgpack.decode(encoded, type=StepIds)
    assert decoded == StepIds([6, 7], {1: [8, 9]}) and len(encoded) < 12
