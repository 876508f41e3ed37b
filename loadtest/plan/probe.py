"""`Targets` of a plan, and `Point`: one candidate that was simulated at one rate."""

import math
from dataclasses import dataclass, replace
from statistics import fmean

from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.report.report import Replay, is_good, percentile, seconds_of
from penstock.loadtest.simulate.outcome import server_figures
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import PERCENT, Plan, Simulated, TargetJudge, simulate
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.stats import expected_work


@dataclass(frozen=True, slots=True)
class Targets:
    """limits_ms: how high the 99th percentile may be, by the metric's name in `--goodput`."""

    limits_ms: dict[str, float]

    def are_met(self, observed: Replay) -> bool:
        """A request that failed is slower than any limit."""
        if observed.is_interrupted or not observed.results:
            return False
        return all(
            self.percentile_ms(observed, metric) <= limit
            for metric, limit in self.limits_ms.items()
        )

    @staticmethod
    def percentile_ms(observed: Replay, metric: str, percent: float = PERCENT) -> float:
        """Infinite where so many requests failed."""
        values = sorted(seconds_of(result, metric) for result in observed.results)
        if not values:
            return math.inf
        seconds = percentile(values, percent)
        if math.isnan(seconds):  # between two ranks, one of which is infinite
            seconds = values[math.floor((len(values) - 1) * percent / 100)]
        return seconds * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """rate: requests per second of all replicas together. is_met: whether all targets are. The
    figures of a probe that was ended early, as it had missed them, are None. num_devices, and all
    rates, of tokens and of good requests, are of all replicas together.

    user_tokens_per_s: of one stream, from its mean TPOT. input_share: of the time in which a
    device computes, what it takes to compute prompts. unchecked_step_ratio: of the steps, those
    outside of what the step model was checked on.
    """

    rate: float
    num_replicas: int
    num_devices: int
    is_met: bool
    num_requests: int
    num_steps: int
    cpu_s: float
    goodput: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    user_tokens_per_s: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    kv_peak: float | None = None
    preemptions: int | None = None
    prefix_hit_ratio: float | None = None
    input_share: float | None = None
    unchecked_step_ratio: float | None = None
    run_class: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.output_tokens_per_s is not None

    @property
    def device_tokens_per_s(self) -> float:
        """The output tokens of each device."""
        return (self.output_tokens_per_s or 0.0) / self.num_devices


def probe(
    candidate: Candidate,
    requests: list[TimedRequest],
    rate: float,
    targets: Targets,
    *,
    num_replicas: int = 1,
) -> Point:
    """requests: those of the rate. Ended early where the targets cannot be met any more."""
    plan = Plan(server=candidate.server, num_replicas=num_replicas)
    simulated = simulate(plan, requests, judge=TargetJudge(targets.limits_ms, len(requests)))
    observed = simulated.observed
    point = Point(
        rate=rate,
        num_replicas=num_replicas,
        num_devices=num_replicas * candidate.num_devices,
        num_requests=len(observed.results),
        num_steps=simulated.num_steps,
        cpu_s=simulated.cpu_s,
        is_met=targets.are_met(observed),
    )
    if observed.is_interrupted:
        return point
    done, duration_s = observed.completed, observed.duration_s
    tpot_s = fmean([tpot for each in done if (tpot := each.tpot_s) is not None] or [0.0])
    num_good = sum(is_good(result, targets.limits_ms) for result in done)
    return replace(
        point,
        **server_figures(simulated),
        goodput=num_good / duration_s,
        input_tokens_per_s=sum(each.num_prompt_tokens for each in done) / duration_s,
        output_tokens_per_s=sum(each.num_output_tokens for each in done) / duration_s,
        user_tokens_per_s=1 / tpot_s if tpot_s else None,
        ttft_p50_ms=targets.percentile_ms(observed, "ttft", 50),
        ttft_p99_ms=targets.percentile_ms(observed, "ttft"),
        tpot_p50_ms=targets.percentile_ms(observed, "tpot", 50),
        tpot_p99_ms=targets.percentile_ms(observed, "tpot"),
        input_share=_input_share(candidate.server, simulated),
    )


def _input_share(server: SimulatedServer, simulated: Simulated) -> float:
    """Returns the time that chunks add to steps of the mean number of decodes, over that of all."""
    steps = simulated.all_steps
    done = simulated.observed.completed
    num_chunk_tokens = sum(each.num_prompt_tokens - each.num_cached_tokens for each in done)
    if not steps or not num_chunk_tokens:
        return 0.0
    prompt = fmean(each.num_prompt_tokens for each in done)
    context = int(prompt + fmean(each.num_output_tokens for each in done) / 2)
    decodes = max(1, round(fmean(step.num_running for step in steps)))
    room = max(1, server.scheduler.max_step_tokens - decodes)
    chunk = max(1, min(room, round(num_chunk_tokens / len(done))))
    added_s = _step_s(server, decodes, context, chunk) - _step_s(server, decodes, context, 0)
    busy_s = sum(step.step_s for step in steps)
    return max(0.0, min(1.0, added_s * num_chunk_tokens / chunk / busy_s))


def _step_s(server: SimulatedServer, decodes: int, context: int, chunk: int) -> float:
    """A step of so many decodes and one chunk of so many tokens."""
    work = expected_work(
        server.info.windows, keys=decodes * context, num_decodes=decodes, chunk=chunk
    )._replace(num_sampled=decodes)
    return server.step_model.cycle_s(server.info.amounts(work))
