"""The scheduler that serves and the one that is simulated decide the same, step by step.

The serving side is the engine's loop on `ScriptedExecutor`, which computes through a real paged
pool, on a clock that every step moves by the time that the step model says.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.executors import predicted
from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import FromEngine, StepReport, Submit, ToEngine
from penstock.engine.step.model_info import ModelInfo
from penstock.loadtest.calibrate.calibration import FrontEnd
from penstock.loadtest.calibrate.drafts import DraftsAssumed
from penstock.loadtest.simulate import replica
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.batch import work_of
from penstock.scheduler.config import Batching, Policy, SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step_model.amounts import AttentionGroup
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.types import (
    Request,
    RequestId,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
)
from tests.support.made_up_steps import FLOPS_PER_PAIR, KV_BYTES, known_model

FRONT_END_S = 0.003


class TimedExecutor(ScriptedExecutor):
    """Computes every token, in the time that the model says; notes what it was told to run."""

    def __init__(self, info: ModelInfo) -> None:
        # Drafts are right where they are what a simulation samples.
        super().__init__(
            info, runs_ahead=info.runs_ahead, paranoid=True, token_at=lambda *_: predicted.TOKEN_ID
        )
        self.now_s = 0.0
        self.host_s = 0.0
        self.batches: list[ScheduledBatch] = []
        self.free_s = [0.0] * info.pipeline_parallel_size
        self._model = known_model(runs_ahead=info.runs_ahead)

    def execute(self, batch: ScheduledBatch) -> "TimedStep":
        self.batches.append(batch)
        amounts = self.info.amounts(work_of(batch, self.info.windows))
        device_s, host_s = self._model.time_of(amounts)
        *stages, last = range(len(self.free_s))
        end_s = self.now_s
        for stage in stages or [last]:
            end_s = self.free_s[stage] = max(self.free_s[stage], end_s) + device_s
        in_last_s = device_s if stages else 0.0
        return TimedStep(self, super().execute(batch).wait(), end_s, in_last_s, host_s)


class TimedStep:
    """in_last_s: what the last of several stages takes, which begins when it is waited for."""

    def __init__(
        self,
        executor: TimedExecutor,
        sampled: SampledTokens,
        end_s: float,
        in_last_s: float,
        host_s: float,
    ) -> None:
        self._executor, self._sampled = executor, sampled
        self._end_s, self._in_last_s, self._host_s = end_s, in_last_s, host_s

    def wait(self) -> SampledTokens:
        executor = self._executor
        executor.now_s = max(executor.now_s, self._end_s) + self._in_last_s
        executor.host_s = self._host_s
        if not self._in_last_s:
            return self._sampled
        return self._sampled._replace(computed_s=self._in_last_s)


class _AllServed(Exception):
    pass


class ArrivingRequests:
    """An inbox to which requests come at their times."""

    def __init__(self, executor: TimedExecutor, requests: list[Request]) -> None:
        self._executor = executor
        self._requests = requests

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        now_s = self._executor.now_s
        if timeout_s is None and not self._requests:
            raise _AllServed
        if timeout_s is None:
            now_s = max(now_s, self._requests[0].arrival_s)
        elif timeout_s:
            next_s = self._requests[0].arrival_s if self._requests else now_s + timeout_s
            now_s = max(now_s, min(now_s + timeout_s, next_s))
        self._executor.now_s = now_s
        while self._requests and self._requests[0].arrival_s <= now_s:
            yield Submit(self._requests.pop(0))


def served(
    info: ModelInfo,
    config: SchedulerConfig,
    trace: list[TimedRequest],
    drafts: DraftsAssumed | None = None,
) -> tuple[list[ScheduledBatch], dict[str, list[float]]]:
    """What was run, and when each request had its tokens."""
    executor = TimedExecutor(info)
    token_times: dict[str, list[float]] = {}

    def send(message: FromEngine) -> None:
        assert isinstance(message, StepReport)
        executor.now_s += executor.host_s
        for output in message.outputs:
            token_times.setdefault(output.request_id, []).append(executor.now_s)

    requests = [
        Request(
            id=RequestId(str(each.index)),
            prompt_token_ids=tuple(each.prompt),  # type: ignore[arg-type]  # never text here
            sampling=SamplingParams(max_tokens=each.max_tokens, temperature=0.0),
            arrival_s=each.arrival_s + FRONT_END_S,
            priority=each.priority,
            tenant=each.tenant,
        )
        for each in trace
    ]
    live = LiveStepModel(info, known_model(runs_ahead=info.runs_ahead))
    scheduler = Scheduler(
        config,
        groups=info.kv_groups,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        step_model=live,
        num_cohorts=info.pipeline_parallel_size,
        drafter=replica._drafter(drafts, live, 0),
    )
    inbox = ArrivingRequests(executor, requests)
    loop = EngineLoop(scheduler, executor, inbox, send, lambda: executor.now_s, live)
    with pytest.raises(_AllServed):
        loop.run()
    return executor.batches, token_times


def simulated(
    info: ModelInfo,
    config: SchedulerConfig,
    trace: list[TimedRequest],
    drafts: DraftsAssumed | None = None,
) -> tuple[list[ScheduledBatch], dict[str, list[float]], int]:
    batches: list[ScheduledBatch] = []

    class Noting(predicted.PredictedExecutor):
        def execute(self, batch: ScheduledBatch) -> predicted.PredictedStep:
            batches.append(batch)
            return super().execute(batch)

    model = known_model(runs_ahead=info.runs_ahead)
    front_end = FrontEnd(delay_s=FRONT_END_S)
    server = SimulatedServer(info, model, config, front_end, drafts=drafts)
    plan = Plan(server=server, seed=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "PredictedExecutor", Noting)
        made = simulate(plan, trace)
    assert not made.observed.failed
    times = {str(each.index): each.arrivals_s for each in made.observed.results}
    return batches, times, made.stats[0].preemptions_total


def decisions(batch: ScheduledBatch) -> tuple[object, ...]:
    """All that a batch says but for the ids of prompts, which are the same."""
    assignments = tuple(
        (each.slot, len(each.token_ids), each.num_prompt_tokens, each.tables)
        for each in batch.assignments
    )
    rows = (batch.slots, batch.starts, batch.num_tokens, batch.samples, batch.num_decodes)
    drafts = batch.drafts, batch.num_unresolved
    return (batch.step, assignments, batch.table_updates, batch.copies, *rows, *drafts)


@st.composite
def traces(draw: st.DrawFn) -> list[TimedRequest]:
    """Requests of which some share the beginnings of their prompts, alone and in bursts."""
    at_s, trace = 0.0, []
    for index in range(draw(st.integers(1, 14))):
        at_s += draw(st.sampled_from((0.0, 0.0, 0.001, 0.01, 0.3)))
        shared = draw(st.integers(0, 2))
        ids = [10 + shared] * draw(st.sampled_from((0, 4, 9, 24)))
        ids += [100 + index] * draw(st.integers(1, 40))
        trace.append(
            TimedRequest(
                index=index,
                arrival_s=at_s,
                prompt=ids,
                num_prompt_tokens=len(ids),
                max_tokens=draw(st.integers(1, 40)),
                tenant=draw(st.sampled_from("aab")),
                priority=draw(st.integers(0, 1)),
            )
        )
    return trace


@settings(max_examples=120, deadline=None)
@given(
    trace=traces(),
    device=st.sampled_from(("waits", "runs ahead", "two stages", "three stages")),
    batching=st.sampled_from(Batching),
    policy=st.sampled_from(Policy),
    itl_target_s=st.sampled_from((None, 0.0025)),
    budget=st.sampled_from((8, 20, 64)),
    num_blocks=st.sampled_from((28, 40, 200)),
    caches=st.booleans(),
    drafts=st.sampled_from((None, DraftsAssumed((0.7,)), DraftsAssumed((1.0, 0.5), 0.6))),
)
def test_every_step_of_a_simulation_is_the_one_that_would_have_been_served(
    trace: list[TimedRequest],
    device: str,
    batching: Batching,
    policy: Policy,
    itl_target_s: float | None,
    budget: int,
    num_blocks: int,
    caches: bool,
    drafts: DraftsAssumed | None,
) -> None:
    num_stages = {"two stages": 2, "three stages": 3}.get(device, 1)
    info = make_info(num_blocks, runs_ahead=device == "runs ahead", num_stages=num_stages)
    config = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        batching=batching,
        policy=policy,
        itl_target_s=itl_target_s,
        enable_prefix_caching=caches,
    )
    batches, times = served(info, config, trace, drafts)
    of_simulation, simulated_times, _ = simulated(info, config, trace, drafts)
    assert list(map(decisions, of_simulation)) == list(map(decisions, batches))
    assert simulated_times == times


def make_info(num_blocks: int, *, runs_ahead: bool, num_stages: int = 1) -> ModelInfo:
    group = AttentionGroup(window=None, kv_bytes_per_token=KV_BYTES, flops_per_pair=FLOPS_PER_PAIR)
    info = scripted_info(num_blocks=num_blocks, block_size=4, max_model_len=110)
    return replace(
        info, attention=(group,), runs_ahead=runs_ahead, pipeline_parallel_size=num_stages
    )


def test_the_traces_are_hard_enough_that_sequences_are_preempted() -> None:
    prompts = [[100 + index] * 30 for index in range(8)]
    trace = [
        TimedRequest(index=index, arrival_s=0.0, prompt=ids, num_prompt_tokens=30, max_tokens=40)
        for index, ids in enumerate(prompts)
    ]
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64)
    for runs_ahead in (False, True):
        info = make_info(40, runs_ahead=runs_ahead)
        batches, _ = served(info, config, trace)
        of_simulation, _, num_preemptions = simulated(info, config, trace)
        assert num_preemptions > 0
        assert list(map(decisions, of_simulation)) == list(map(decisions, batches))
