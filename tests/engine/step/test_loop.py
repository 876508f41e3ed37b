"""The step loop with its own inbox and clock: the order of things within a step."""

from dataclasses import replace

import pytest

from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
from penstock.engine.step.executor import PendingTokens
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import (
    Abort,
    FromEngine,
    RatesMeasured,
    Refused,
    StepReport,
    Submit,
)
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import FinishReason, RequestId, SampledTokens, ScheduledBatch
from tests.support.inbox import ListInbox
from tests.support.scheduling import make_request

INFO = scripted_info(num_blocks=64, max_model_len=512)


class SlowExecutor(ScriptedExecutor):
    """Notes in which order steps are launched and waited for."""

    def __init__(self, *, runs_ahead: bool, num_stages: int) -> None:
        info = replace(INFO, pipeline_parallel_size=num_stages)
        super().__init__(info, runs_ahead=runs_ahead)
        self.events: list[str] = []

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        self.events.append(f"launch {batch.step}")
        return Noting(super().execute(batch), batch.step, self.events)


class Noting:
    def __init__(self, pending: PendingTokens, step: int, events: list[str]) -> None:
        self._pending, self._step, self._events = pending, step, events

    def wait(self) -> SampledTokens:
        self._events.append(f"wait {self._step}")
        return self._pending.wait()


class Bench:
    def __init__(self, runs_ahead: bool = False, num_stages: int = 1) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4),
            groups=[KVGroup(64)],
            block_size=16,
            max_model_len=512,
            num_cohorts=num_stages,
        )
        self.inbox = ListInbox()
        self.sent: list[FromEngine] = []
        self.executor = SlowExecutor(runs_ahead=runs_ahead, num_stages=num_stages)
        self.loop = EngineLoop(self.scheduler, self.executor, self.inbox, self.sent.append)

    def reports(self) -> list[StepReport]:
        return [message for message in self.sent if isinstance(message, StepReport)]


def test_a_device_that_runs_ahead_gets_its_next_step_before_the_last_is_waited_for() -> None:
    bench = Bench(runs_ahead=True)
    bench.inbox.commands.append(Submit(make_request("a", 5, max_tokens=3)))
    for _ in range(4):
        bench.loop.step()
    assert bench.executor.events == [
        "launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"
    ]  # fmt: skip


def test_a_device_that_does_not_run_ahead_answers_in_the_same_step() -> None:
    bench = Bench(runs_ahead=False)
    bench.inbox.commands.append(Submit(make_request("a", 5, max_tokens=2)))
    bench.loop.step()
    bench.loop.step()
    assert bench.executor.events == ["launch 1", "wait 1", "launch 2", "wait 2"]


def test_a_pipeline_gets_as_many_steps_as_it_has_stages_before_the_first_is_waited_for() -> None:
    bench = Bench(num_stages=3)
    for name in "abc":
        bench.inbox.commands.append(Submit(make_request(name, 5, max_tokens=3)))
    for _ in range(10):
        bench.loop.step()
    assert bench.executor.events == [
        # All prompts are in one step, and what follows needs their first tokens.
        "launch 1", "wait 1",
        "launch 2", "launch 3", "launch 4", "wait 2", "launch 5", "wait 3", "launch 6", "wait 4",
        "launch 7", "wait 5", "wait 6", "wait 7",
    ]  # fmt: skip


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_one_report_a_step_holds_the_tokens_of_all_sequences(runs_ahead: bool) -> None:
    bench = Bench(runs_ahead)
    for name in "ab":
        bench.inbox.commands.append(Submit(make_request(name, 5, max_tokens=4)))
    for _ in range(6):
        bench.loop.step()
    reports = bench.reports()
    assert [len(report.outputs) for report in reports] == [2, 2, 2, 2]
    assert [report.work.num_decode_tokens for report in reports] == [0, 2, 2, 2]
    assert reports[-1].stats.num_running == 0


def test_an_idle_loop_waits_for_a_command_and_a_busy_one_does_not() -> None:
    bench = Bench()
    bench.loop.step()
    bench.inbox.commands.append(Submit(make_request("a", 5, max_tokens=3)))
    bench.loop.step()
    bench.loop.step()
    assert bench.inbox.patience == [None, None, 0.0]


def test_after_some_seconds_without_a_command_it_asks_what_to_do_until_there_is_an_answer() -> None:
    bench = Bench()
    asked: list[float | None] = []

    def when_idle() -> RatesMeasured | None:
        asked.append(bench.inbox.patience[-1])
        return RatesMeasured(1.0, 2.0) if len(asked) == 2 else None

    bench.loop = EngineLoop(
        bench.scheduler, bench.executor, bench.inbox, bench.sent.append, when_idle=when_idle
    )
    bench.loop.step()
    bench.inbox.commands.append(Submit(make_request("a", 5, max_tokens=1)))
    bench.loop.step()
    assert len(asked) == 1
    bench.loop.step()
    bench.loop.step()
    assert asked == [5.0, 5.0]
    assert [message for message in bench.sent if isinstance(message, RatesMeasured)]
    assert bench.inbox.patience[-1] is None


def test_an_abort_takes_effect_before_the_next_step_and_is_reported() -> None:
    bench = Bench()
    bench.inbox.commands.append(Submit(make_request("a", 5, max_tokens=300)))
    bench.loop.step()
    bench.inbox.commands.append(Abort(RequestId("a")))
    bench.loop.step()
    assert len(bench.executor.events) == 2
    last = bench.reports()[-1]
    assert last.step == 0
    assert last.stats.groups[0].num_used == 0
    (output,) = last.outputs
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ABORT


def test_a_request_for_an_adapter_that_is_not_there_is_refused_when_it_comes() -> None:
    bench = Bench()
    bench.inbox.commands.append(Submit(make_request("a", 5, adapter="french")))
    bench.inbox.commands.append(Submit(make_request("b", 5, max_tokens=1)))
    bench.loop.step()
    assert isinstance(bench.sent[0], Refused)
    assert "no adapter 'french'" in bench.sent[0].message
    assert [output.request_id for output in bench.reports()[-1].outputs] == ["b"]


def test_a_request_that_the_scheduler_refuses_is_answered_and_the_loop_goes_on() -> None:
    bench = Bench()
    bench.inbox.commands.append(Submit(make_request("a", 600)))
    bench.inbox.commands.append(Submit(make_request("b", 5, max_tokens=1)))
    bench.loop.step()
    assert isinstance(bench.sent[0], Refused)
    assert "600 tokens" in bench.sent[0].message
    assert bench.reports()[-1].outputs.request_ids == ["b"]


class TimedExecutor(ScriptedExecutor):
    """On a clock of its own: launching takes 1 s, and the device 10 s a step, one after another."""

    def __init__(self, *, runs_ahead: bool) -> None:
        super().__init__(INFO, runs_ahead=runs_ahead)
        self.now_s = 100.0
        self._free_s = 0.0

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        self.now_s += 1.0
        self._free_s = max(self._free_s, self.now_s) + 10.0
        if not self.info.runs_ahead:
            self.now_s = self._free_s
        return TimedStep(self, self._free_s, super().execute(batch).wait())


class TimedStep:
    def __init__(self, executor: TimedExecutor, end_s: float, sampled: SampledTokens) -> None:
        self._executor, self._end_s, self._sampled = executor, end_s, sampled

    def wait(self) -> SampledTokens:
        self._executor.now_s = max(self._executor.now_s, self._end_s)
        return self._sampled


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_report_tells_the_time_of_the_host_from_that_of_the_device(runs_ahead: bool) -> None:
    executor = TimedExecutor(runs_ahead=runs_ahead)
    inbox, sent = ListInbox(), list[FromEngine]()

    def send(message: FromEngine) -> None:
        executor.now_s += 2.0  # reporting takes time too
        sent.append(message)

    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4), groups=[KVGroup(64)], block_size=16, max_model_len=512
    )
    loop = EngineLoop(scheduler, executor, inbox, send, lambda: executor.now_s)
    loop.step()  # nothing to do: it waits for commands
    executor.now_s += 1000.0
    inbox.commands.append(Submit(make_request("a", 5, max_tokens=4)))
    for _ in range(5):
        loop.step()
    reports = [message for message in sent if isinstance(message, StepReport)][1:3]
    if runs_ahead:
        # The launch of the next step and the last report are hidden behind the device's 10 s.
        assert [(each.step_s, each.wait_s, each.host_s) for each in reports] == [(10, 7, 3)] * 2
    else:
        # `execute` launches and computes; the last step's report comes between two steps.
        assert [(each.step_s, each.wait_s, each.host_s) for each in reports] == [(11, 11, 2)] * 2
