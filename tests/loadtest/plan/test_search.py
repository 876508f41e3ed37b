"""The search of the highest rate, against queues whose answer is known."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.probe import Targets, probe
from penstock.loadtest.plan.search import SHARES, Load, find_limit, search
from penstock.loadtest.report.report import Replay, RequestResult
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, TargetJudge, simulate
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.step_model.amounts import DEVICE_UNITS, HOST_UNITS
from penstock.scheduler.step_model.model import StepModel
from tests.loadtest.plan.queue_theory import highest_rate, share_that_waits_at_most
from tests.loadtest.simulate.test_same_decisions import make_info

SERVICE_S = 0.1
# One token each, so that a request is one step; and the prompts as short as they may be.
WORKLOAD = WorkloadConfig(seed=5, input_len=2, output_len=1)


def one_at_a_time(service_s: float = SERVICE_S) -> SimulatedServer:
    """A server whose every step takes the same time, and holds one request: D/1 of M/D/1."""
    model = StepModel(
        device=(service_s, *[0.0] * (len(DEVICE_UNITS) - 1)),
        host=(0.0,) * len(HOST_UNITS),
        knee=1,
        runs_ahead=False,
    )
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8)
    info = make_info(60, runs_ahead=False)
    return SimulatedServer(info, model, config, max_num_queued_reqs=10**6)


def candidate_of(server: SimulatedServer) -> Candidate:
    return Candidate(device="queue", price=2.0, quantization=None, server=server)


def test_the_formula_agrees_with_the_mean_wait_that_everybody_knows() -> None:
    rate, step = 7.0, 0.001
    mean = math.fsum(
        (1 - share_that_waits_at_most(rate, SERVICE_S, index * step)) * step
        for index in range(2000)
    )
    load = rate * SERVICE_S
    assert mean == pytest.approx(load * SERVICE_S / (2 * (1 - load)), rel=0.02)


def test_waiting_times_are_those_of_the_m_d_1_queue() -> None:
    load = Load(WORKLOAD, 1200.0)
    requests = load.at(7.0)
    observed = simulate(Plan(server=one_at_a_time(), seed=None), requests).observed
    waits = [result.ttft_s - SERVICE_S for result in observed.results]
    for wait_s in (0.001, 0.1, 0.25, 0.6):
        share = sum(wait <= wait_s for wait in waits) / len(waits)
        assert share == pytest.approx(share_that_waits_at_most(7.0, SERVICE_S, wait_s), abs=0.02)


@pytest.mark.parametrize("limit_s", [pytest.param(0.35, marks=pytest.mark.slow), 1.0])
def test_the_search_finds_the_rate_that_the_m_d_1_queue_allows(limit_s: float) -> None:
    known = highest_rate(SERVICE_S, limit_s, 0.99)
    searched = search(
        candidate_of(one_at_a_time()), Load(WORKLOAD, 1000.0), Targets({"ttft": limit_s * 1e3}),
        precision=0.02,
    )  # fmt: skip
    assert searched.limit == pytest.approx(known, rel=0.04)
    best = searched.best
    assert best is not None and best.ttft_p99_ms is not None
    assert 0.8 * limit_s * 1e3 < best.ttft_p99_ms <= limit_s * 1e3


@pytest.mark.parametrize("limit", [0.013, 6.9, 7.0, 7.3, 4000.0])
@pytest.mark.parametrize("precision", [0.5, 0.05, 0.01])
def test_bisection_ends_within_the_precision_of_any_limit(limit: float, precision: float) -> None:
    rates: list[float] = []

    def meets_targets(rate: float) -> bool:
        rates.append(rate)
        return rate <= limit

    met, missed = find_limit(meets_targets, start=7.0, precision=precision)
    assert met is not None and missed is not None
    assert met <= limit < missed <= met * (1 + precision)
    assert len(set(rates)) == len(rates)  # none is probed twice
    bisections = math.ceil(math.log2(math.log(4) / math.log1p(precision)))
    assert len(rates) <= abs(math.log(limit / 7.0, 4)) + 5 + max(0, bisections)


def test_a_limit_below_all_rates_is_no_rate() -> None:
    rates: list[float] = []
    met, _ = find_limit(lambda rate: bool(rates.append(rate)), 1.0, 0.05)  # type: ignore[func-returns-value]
    assert met is None and len(rates) < 10


def test_targets_below_the_time_of_service_are_met_at_no_rate() -> None:
    targets = Targets({"ttft": 0.9e3 * SERVICE_S})
    searched = search(candidate_of(one_at_a_time()), Load(WORKLOAD, 100.0), targets, precision=0.1)
    assert searched.limit is None and searched.best is None
    assert not any(point.is_met for point in searched.points)


def test_a_probe_that_cannot_meet_the_targets_is_ended_early() -> None:
    targets = Targets({"ttft": 500.0})
    requests = Load(WORKLOAD, 500.0).at(20.0)
    point = probe(candidate_of(one_at_a_time()), requests, 20.0, targets)
    assert not point.is_met and not point.is_whole
    assert point.num_steps < 0.1 * len(requests)


@pytest.mark.parametrize("rate", [5.0, 8.6, 9.0, 9.9])
def test_ending_early_never_changes_the_verdict(rate: float) -> None:
    server, targets = one_at_a_time(), Targets({"ttft": 700.0, "e2el": 700.0})
    requests = Load(WORKLOAD, 120.0).at(rate)
    whole = simulate(Plan(server=server, seed=0), requests).observed
    assert probe(candidate_of(server), requests, rate, targets).is_met == targets.are_met(whole)


def test_points_below_the_limit_are_for_the_front() -> None:
    targets = Targets({"ttft": 1000.0})
    searched = search(candidate_of(one_at_a_time()), Load(WORKLOAD, 200.0), targets, precision=0.1)
    assert searched.limit is not None
    rates = [point.rate / searched.limit for point in searched.points[-len(SHARES) :]]
    assert rates == pytest.approx(SHARES)
    assert all(point.is_met for point in searched.points[-len(SHARES) :])


def result(index: int, ttft_s: float, *, error: str | None = None) -> RequestResult:
    return RequestResult(
        index=index, scheduled_s=0.0, sent_s=0.0, ended_s=ttft_s, num_prompt_tokens=1,
        num_output_tokens=1, arrivals_s=[] if error else [ttft_s], error=error,
    )  # fmt: skip


@pytest.mark.parametrize(("num_late", "is_met"), [(0, True), (2, True), (3, False)])
@pytest.mark.parametrize("error", [None, "refused"])
def test_a_target_is_of_the_99th_percentile_and_failures_count(
    num_late: int, is_met: bool, error: str | None
) -> None:
    num, targets = 201, Targets({"ttft": 100.0})
    results = [result(index, 0.05) for index in range(num - num_late)]
    results += [result(num + index, 9.0, error=error) for index in range(num_late)]
    observed = Replay(results=results, duration_s=1.0, client_cpu_share=0.0)
    assert targets.are_met(observed) == is_met
    judge = TargetJudge(targets.limits_ms, num)
    for each in results:
        judge.on_end(each)
    assert judge.is_over([], 0.0) == (not is_met)


def test_open_requests_that_are_late_count_before_they_end() -> None:
    targets = Targets({"ttft": 100.0, "e2el": 1000.0})
    waiting = replace(result(0, 0.0), arrivals_s=[])
    judge = TargetJudge(targets.limits_ms, 10)  # one of ten may be late
    assert not judge.is_over([waiting] * 2, 0.09) and judge.is_over([waiting] * 2, 0.2)
    answered = replace(result(0, 0.0), arrivals_s=[0.05])
    assert not judge.is_over([answered] * 2, 0.9) and judge.is_over([answered] * 2, 1.1)


def test_another_rate_stretches_the_same_requests() -> None:
    load = Load(replace(WORKLOAD, range_ratio=0.5, input_len=40), 100.0)
    slow, fast = load.at(2.0), load.at(4.0)
    assert len(fast) == 2 * len(slow) == 400
    for a, b in zip(slow, fast, strict=False):
        assert a.prompt == b.prompt and a.arrival_s == pytest.approx(2 * b.arrival_s)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(fast)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.15)
