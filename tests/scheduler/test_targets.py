"""Targets at work: what a step runs, and who is refused."""

from collections import defaultdict
from collections.abc import Sequence

import pytest

from penstock.scheduler.batch import work_of
from penstock.scheduler.config import Policy, SchedulerConfig
from penstock.scheduler.errors import InvalidConfig, TargetOutOfReach
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.inserts import EncoderCosts
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.chunk_budget import PREFILL_FLOOR
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.step_model.model import ClassError, StepModel
from penstock.scheduler.types import (
    Insert,
    Request,
    RequestId,
    ResumedAnswer,
    SampledTokens,
    ScheduledBatch,
)
from tests.support.made_up_steps import DEVICE, HOST, KNEE, served_model
from tests.support.scheduling import make_request

SERVED = served_model()
MODEL = StepModel(
    device=DEVICE,
    host=HOST,
    knee=KNEE,
    runs_ahead=False,
    errors={kind: ClassError(num_steps=99, mape=0.0, bias=0.0) for kind in StepClass},
)


class Bench:
    """A scheduler whose steps take the time that the model says."""

    def __init__(
        self,
        *,
        itl_target_s: float | None = None,
        ttft_target_s: float | None = None,
        max_num_seqs: int = 8,
        policy: Policy = Policy.FCFS,
        is_known: bool = True,
        groups: Sequence[KVGroup] = (KVGroup(4000),),
        num_cohorts: int = 1,
        operation_s: float = 0.0,
    ) -> None:
        """operation_s: of an encoder."""
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            itl_target_s=itl_target_s,
            ttft_target_s=ttft_target_s,
            policy=policy,
        )
        self.live = LiveStepModel(SERVED, MODEL if is_known else None)
        self.scheduler = Scheduler(
            config,
            groups=groups,
            block_size=16,
            max_model_len=20_000,
            step_model=self.live,
            num_cohorts=num_cohorts,
            encoder=EncoderCosts(1, 1 << 30, operation_s),
        )
        self._operation_s = operation_s
        self._encoding = defaultdict[tuple[str, int], float](float)
        self._inserts: dict[str, tuple[Insert, ...]] = {}
        self.now = 0.0
        self.first_token_s: dict[str, float] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request, now=self.now)
        self._inserts[request.id] = request.inserts

    def _encoded(self, batch: ScheduledBatch) -> tuple[list[tuple[RequestId, int]], float]:
        """What is complete, and the seconds of it."""
        done, spent_s = [], 0.0
        for name, index, budget_s in batch.encodes:
            all_s = self._inserts[name][index].operations * self._operation_s
            slices_s = min(all_s - self._encoding[name, index], budget_s - spent_s)
            self._encoding[name, index] += slices_s
            spent_s += slices_s
            if self._encoding[name, index] >= all_s - 1e-9:
                done.append((name, index))
        return done, spent_s

    def step(self) -> tuple[ScheduledBatch, float]:
        """The step, and its seconds."""
        batch = self.scheduler.schedule(self.now)
        assert batch
        seconds, (encoded, encoding_s) = 0.0, self._encoded(batch)
        if batch.slots:
            seconds = MODEL.cycle_s(SERVED.amounts(work_of(batch, SERVED.windows)))
        seconds += encoding_s
        self.now += seconds
        sampled = SampledTokens(
            step=batch.step,
            token_ids=[7] * sum(batch.samples),
            encoded=tuple(encoded),
            encoding_s=encoding_s,
        )
        for output in self.scheduler.update(sampled):
            self.first_token_s.setdefault(output.request_id, self.now)
        return batch, seconds

    def first_token_of(self, name: str) -> float:
        while name not in self.first_token_s:
            self.step()
        return self.first_token_s[name]


def busy(bench: Bench, num: int = 4, *, max_tokens: int = 4000) -> None:
    """Sequences that decode."""
    for index in range(num):
        bench.add(make_request(f"stream{index}", [10 + index] * 100, max_tokens=max_tokens))
    bench.step()


def test_steps_with_decodes_end_by_the_target_however_long_a_prompt_is() -> None:
    bench = Bench(itl_target_s=0.010)
    busy(bench)
    bench.add(make_request("long", [5] * 3000))
    chunks = []
    while "long" not in bench.first_token_s:
        batch, seconds = bench.step()
        assert seconds <= 0.0101
        chunks.append(batch.num_tokens[-1])
    assert len(chunks) > 10 and min(chunks[:-1]) > PREFILL_FLOOR
    assert chunks == sorted(chunks, reverse=True)  # contexts grow, and chunks shrink with them


def image(start: int, *, operations: int = 100) -> Insert:
    return Insert(start, 64, b"image", (1, 8, 8), operations=operations)


def test_steps_that_encode_beside_decodes_end_by_the_target_and_run_prompts_too() -> None:
    bench = Bench(itl_target_s=0.010, operation_s=1e-3)
    busy(bench)
    bench.add(make_request("image", [5] * 200, inserts=(image(100),)))
    bench.add(make_request("text", [6] * 3000))
    beside = []
    while "image" not in bench.first_token_s:
        batch, seconds = bench.step()
        assert seconds <= 0.0101
        if batch.encodes:
            beside.append(batch)
    assert len(beside) > 10
    # Half of what decodes leave is for the prompt that need not wait.
    assert all(len(batch.slots) > batch.num_decodes for batch in beside[:5])


@pytest.mark.parametrize("has_decodes", [False, True])
def test_a_forecast_counts_what_is_to_be_encoded(has_decodes: bool) -> None:
    bench = Bench(ttft_target_s=1000.0, operation_s=1e-3)
    if has_decodes:
        busy(bench)
    for name in ("before", "last"):
        each = image(100)._replace(digest=name.encode())
        bench.add(make_request(name, [5] * 200, inserts=(each,)))
    predicted_s = bench.scheduler._requests[RequestId("last")][0].predicted_ttft_s
    arrival_s = bench.now
    taken_s = bench.first_token_of("last") - arrival_s
    assert predicted_s == pytest.approx(taken_s, rel=0.25)
    assert predicted_s is not None and predicted_s > 0.2


def test_of_two_cohorts_each_step_has_half_of_the_target() -> None:
    bench = Bench(itl_target_s=0.020, num_cohorts=2)
    busy(bench)
    bench.add(make_request("long", [5] * 3000))
    steps = []
    while "long" not in bench.first_token_s:
        steps.append(bench.step())
    assert {batch.num_decodes for batch, _ in steps} == {2}
    assert 0.009 < max(seconds for _, seconds in steps) <= 0.0101


def test_a_prompt_is_expected_to_pass_every_stage() -> None:
    expected = []
    for num_stages in (1, 3):
        bench = Bench(ttft_target_s=100.0, num_cohorts=num_stages)
        bench.add(make_request("alone", [5] * 1000))
        bench.step()
        expected.append(bench.scheduler.take_started()[0].predicted_ttft_s)
    assert expected[0] and expected[1] == pytest.approx(3 * expected[0])


def test_without_decodes_a_step_is_as_long_as_it_may_be() -> None:
    bench = Bench(itl_target_s=0.010)
    bench.add(make_request("long", [5] * 8000))
    assert bench.step()[0].num_tokens == (2048,)


def test_a_target_that_cannot_be_met_slows_prompts_and_does_not_stop_them() -> None:
    bench = Bench(itl_target_s=0.0001)
    busy(bench)
    bench.add(make_request("long", [5] * 640))
    for _ in range(10):
        assert bench.step()[0].num_tokens[-1] == PREFILL_FLOOR


def test_the_target_of_a_request_holds_while_it_runs() -> None:
    bench = Bench()
    bench.add(make_request("quick", [4] * 10, max_tokens=3, itl_target_s=0.005))
    bench.step()
    bench.add(make_request("long", [5] * 6000))
    assert bench.step()[1] <= 0.0051
    assert bench.step()[1] <= 0.0051  # its last token
    assert bench.step()[0].num_tokens == (2048,)


def test_a_request_that_would_start_late_is_refused_with_the_time_that_is_missing() -> None:
    bench = Bench(ttft_target_s=0.5)
    busy(bench)
    bench.add(make_request("a", [5] * 12_000, ttft_target_s=9.0))
    with pytest.raises(TargetOutOfReach) as refused:
        bench.add(make_request("b", [6] * 12_000))
    error = refused.value
    assert error.retry_after_s == error.predicted_s - 0.5 > 0
    assert "the target is 0.5 s; try again in" in str(error)
    assert bench.scheduler.stats().out_of_reach_total == 1
    assert not bench.scheduler.is_open(make_request("b", 1).id)


@pytest.mark.parametrize("itl_target_s", [None, 0.008])
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_a_forecast_is_right_within_a_tenth(num_ahead: int, itl_target_s: float | None) -> None:
    bench = Bench(ttft_target_s=100.0, itl_target_s=itl_target_s)
    busy(bench)
    for index in range(num_ahead):
        bench.add(make_request(f"ahead{index}", [20 + index] * 3000, max_tokens=5))
    bench.add(make_request("it", [9] * 4000, arrival_s=bench.now))
    arrived_s = bench.now
    (sequence,) = bench.scheduler._requests[make_request("it", 1).id]
    predicted_s = sequence.predicted_ttft_s
    assert predicted_s is not None
    assert predicted_s == pytest.approx(bench.first_token_of("it") - arrived_s, rel=0.12)


def test_a_forecast_counts_the_wait_for_a_slot() -> None:
    bench = Bench(ttft_target_s=100.0, max_num_seqs=4)
    for index in range(4):
        bench.add(make_request(f"stream{index}", [10 + index] * 20, max_tokens=200 + 50 * index))
    bench.step()
    bench.add(make_request("it", [9] * 40))
    (sequence,) = bench.scheduler._requests[make_request("it", 1).id]
    assert sequence.predicted_ttft_s == pytest.approx(bench.first_token_of("it"), rel=0.1)


def test_a_forecast_counts_the_wait_for_blocks_of_a_window() -> None:
    window = KVGroup(24, 64, alignment=16)
    bench = Bench(ttft_target_s=100.0, groups=(KVGroup(4000), window))
    for index in range(4):
        bench.add(make_request(f"stream{index}", [10 + index] * 170, max_tokens=200 + 50 * index))
        bench.first_token_of(f"stream{index}")
    used = bench.scheduler.stats().groups[1].num_used
    assert 4 * (window.most_blocks(200, 16) - 1) <= used
    arrived_s = bench.now
    bench.add(make_request("it", [9] * 200, arrival_s=arrived_s))
    (sequence,) = bench.scheduler._requests[make_request("it", 1).id]
    waited_s = bench.first_token_of("it") - arrived_s
    assert sequence.predicted_ttft_s == pytest.approx(waited_s, rel=0.1)


def test_what_is_cached_need_not_be_computed_before_the_first_token() -> None:
    bench = Bench(ttft_target_s=0.2)
    bench.add(make_request("first", [5] * 8000, max_tokens=1, ttft_target_s=10.0))
    bench.first_token_of("first")
    bench.add(make_request("again", [5] * 8000, max_tokens=1, arrival_s=bench.now))
    with pytest.raises(TargetOutOfReach):
        bench.add(make_request("other", [6] * 8000, max_tokens=1, arrival_s=bench.now))


def test_time_that_has_passed_since_the_arrival_counts() -> None:
    bench = Bench(ttft_target_s=0.5)
    bench.now = 3.0
    with pytest.raises(TargetOutOfReach, match=r"after 2\.\d+ s"):
        bench.add(make_request("slow", [5] * 10, arrival_s=1.0))


def test_nobody_is_refused_before_steps_like_those_have_run() -> None:
    bench = Bench(ttft_target_s=0.001, is_known=False)
    bench.add(make_request("a", [5] * 8000))
    assert bench.scheduler.stats().out_of_reach_total == 0


def test_what_an_earlier_engine_accepted_is_not_refused() -> None:
    bench = Bench(ttft_target_s=0.001)
    again = make_request("a", [5] * 8000)
    bench.add(
        Request(
            id=again.id,
            prompt_token_ids=again.prompt_token_ids,
            sampling=again.sampling,
            arrival_s=0.0,
            resumed=(ResumedAnswer(0, (7, 7)),),
        )
    )
    assert bench.scheduler.is_open(again.id)


def test_under_the_fair_policy_a_flood_of_others_refuses_nobody() -> None:
    bench = Bench(ttft_target_s=1.0, policy=Policy.FAIR)
    for index in range(60):
        request = make_request(
            f"f{index}", [index + 3] * 2000, tenant="flood", ttft_target_s=1000.0
        )
        bench.add(request)
    bench.step()
    with pytest.raises(TargetOutOfReach):
        bench.add(make_request("one more", [5] * 2000, tenant="flood"))
    bench.add(make_request("quiet", [6] * 2000, tenant="quiet"))
    assert bench.first_token_of("quiet") < 1.0 + bench.now


@pytest.mark.parametrize(("name", "value"), [("itl", 0.0), ("ttft", -1.0), ("itl", float("nan"))])
def test_a_target_that_is_no_time_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=f"--{name}-target-ms is"):
        SchedulerConfig(**{f"{name}_target_s": value})  # type: ignore[arg-type]
