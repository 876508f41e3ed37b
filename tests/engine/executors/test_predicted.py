"""A pipeline of stages in virtual time: what its stages wait for each other."""

from dataclasses import replace

import pytest

from penstock.engine.executors.predicted import PredictedExecutor, VirtualClock
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import FromEngine, StepReport, Submit
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from tests.support.inbox import ListInbox
from tests.support.made_up_steps import known_model, served_model
from tests.support.scheduling import make_request


def decode_reports(num_stages: int, num_requests: int) -> list[StepReport]:
    """Of the steps in which all requests decode."""
    info = replace(served_model(), pipeline_parallel_size=num_stages)
    clock, inbox, sent = VirtualClock(), ListInbox(), list[FromEngine]()
    executor = PredictedExecutor(info, known_model(runs_ahead=False), clock)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=32),
        groups=info.kv_groups,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        num_cohorts=num_stages,
    )
    loop = EngineLoop(scheduler, executor, inbox, sent.append, clock)
    for number in range(num_requests):
        inbox.commands.append(Submit(make_request(str(number), 20, max_tokens=40)))
    loop.step()
    while scheduler.has_work:
        loop.step()
    reports = [each for each in sent if isinstance(each, StepReport)]
    decodes = [each for each in reports if not each.work.num_prefill_tokens]
    # Without the first round, in which the stages fill, and the last, in which some have ended.
    return decodes[num_stages : -4 * num_stages]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_pipeline_with_enough_sequences_has_no_bubble(num_stages: int) -> None:
    reports = decode_reports(num_stages, 12)
    assert {each.work.num_sequences for each in reports} == {12 // num_stages}
    computed_s = sum(each.computed_s or 0.0 for each in reports)
    assert computed_s == pytest.approx(sum(each.step_s for each in reports), rel=1e-3)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_one_sequence_alone_is_in_one_stage_at_a_time(num_stages: int) -> None:
    for report in decode_reports(num_stages, 1):
        assert report.step_s == pytest.approx(num_stages * (report.computed_s or 0.0))
