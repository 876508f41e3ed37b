"""Requests that may not run yet wait outside of the queue."""

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import DuplicateRequest
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import RequestId
from tests.support.scheduling import make_request

A = RequestId("a")


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs=4), groups=[KVGroup(16)], block_size=4, max_model_len=64
    )


def test_a_request_that_is_not_ready_counts_as_waiting_and_others_overtake_it(
    scheduler: Scheduler,
) -> None:
    scheduler.add(make_request("a", 5, n=2), is_ready=False)
    assert scheduler.num_waiting == 2 and scheduler.schedule(0.0) is None
    scheduler.add(make_request("b", 5))
    batch = scheduler.schedule(0.0)
    assert batch and len(batch.slots) == 1
    with pytest.raises(DuplicateRequest):
        scheduler.add(make_request("a", 5))
    scheduler.make_ready(A)
    batch = scheduler.schedule(0.0)
    assert batch and len(batch.assignments) == 1 and scheduler.num_waiting == 1


def test_when_answer_0_ends_before_it_is_ready_the_others_still_wait(scheduler: Scheduler) -> None:
    scheduler.add(make_request("a", 5, n=3), is_ready=False)
    (ended,) = scheduler.abort(A, 0)
    assert ended.finish and ended.index == 0
    assert scheduler.num_waiting == 2 and scheduler.schedule(0.0) is None
    scheduler.make_ready(A)
    batch = scheduler.schedule(0.0)
    assert batch and len(batch.slots) == 2 and scheduler.num_waiting == 0


def test_a_request_that_ends_before_it_is_ready_leaves_nothing(scheduler: Scheduler) -> None:
    scheduler.add(make_request("a", 5, n=2), is_ready=False)
    assert len(scheduler.abort(A)) == 2
    assert not scheduler.is_open(A) and not scheduler.has_work and not scheduler.num_waiting
    scheduler.make_ready(A)
    assert scheduler.schedule(0.0) is None
    scheduler.add(make_request("a", 5))  # the id is free again
    assert scheduler.schedule(0.0)
