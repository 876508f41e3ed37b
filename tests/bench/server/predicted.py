"""`python -m tests.bench.server.predicted`: what a simulation says beside what a server does.

A server is started, and calibrated on sweeps of closed loops with other lengths and prompts than
those of any measured load: so what is compared was held out. There is a sweep before each round and
one after the last, since a machine that others use is not as fast at all times. In a round the
server gets requests all at once, which gives its capacity, and Poisson arrivals at 50, 70 and 85 %
of it, with other requests in each; every load of every round is simulated too. The table has the
medians over the rounds, the spread of the measurements, and what the aims are. It is Markdown; the
last line is JSON.

A machine that is slower for a minute makes a queue much longer, and no calibration knows it
beforehand. So each load is simulated once more with the times of its own steps, a factor for each
class: what is off then is the simulation, and the rest is the machine.
"""

import argparse
import itertools
import shlex
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TypeAlias

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import wait_until_ready, warm_up
from penstock.loadtest.bench.replay import replay, run
from penstock.loadtest.calibrate.calibration import (
    Calibration,
    measure_front_end,
    read_metrics,
    read_steps,
)
from penstock.loadtest.calibrate.cli import calibration_of, describe
from penstock.loadtest.calibrate.drafts import drafts_of
from penstock.loadtest.report.report import ReportConfig, Summary, summarize
from penstock.loadtest.simulate.outcome import error_bars
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import TimedRequest, make_requests
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.model import ClassError, StepModel
from penstock.scheduler.step_model.samples import StepSample
from tests.bench.peers.models import SHAPES, write_model
from tests.support.serving import RunningServer

SHARES = (0.5, 0.7, 0.85)
REPORT = ReportConfig(percentiles=(50.0, 99.0))
# Figure, key, and by how much the prediction may be off.
AIMS = (
    ("TPOT p50, ms", "p50_tpot_ms", 0.05),
    ("TPOT p99, ms", "p99_tpot_ms", 0.05),
    ("TTFT p50, ms", "p50_ttft_ms", 0.10),
    ("TTFT p99, ms", "p99_ttft_ms", 0.15),
)
CAPACITY_AIM = 0.10
Figures: TypeAlias = tuple[tuple[str, str, float], ...]


# Of the calibration: every magnitude of prompt, and answers unlike those that are measured.
LEVELS = (1, 2, 4, 8, 16, 32, 64, 128)
SWEPT = WorkloadConfig(input_len=150, output_len=40, range_ratio=0.9)
# Of a class, for a speed of its own.
_MIN_STEPS = 5


@dataclass(frozen=True, slots=True)
class Round:
    """One figure of one load in one round. low, high: the error bar. at_own_speed: predicted with
    the speed that the load's own steps had, so not held out."""

    load: str
    figure: str
    measured: float
    predicted: float
    low: float
    high: float
    at_own_speed: float
    aim: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one load, over all rounds."""

    rounds: list[Round]

    @property
    def error(self) -> float:
        """The median over the rounds, each of which compares the same requests."""
        return median(each.predicted / each.measured - 1 for each in self.rounds)

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= self.rounds[0].aim

    @property
    def num_within(self) -> int:
        """Rounds in which the measured figure was within the error bar."""
        return sum(each.low <= each.measured <= each.high for each in self.rounds)

    def row(self) -> str:
        rounds, first = self.rounds, self.rounds[0]
        measured = [each.measured for each in rounds]
        errors = [each.predicted / each.measured - 1 for each in rounds]
        own = [each.at_own_speed / each.measured - 1 for each in rounds]
        bar = f"{median(r.low for r in rounds):.2f} to {median(r.high for r in rounds):.2f}"
        return (
            f"| {first.load} | {first.figure} | {median(measured):.2f} "
            f"({min(measured):.2f} to {max(measured):.2f}) | "
            f"{median(each.predicted for each in rounds):.2f} ({bar}) | "
            f"{self.error:+.1%} ({min(errors):+.1%} to {max(errors):+.1%}) | {first.aim:.0%} | "
            f"{'yes' if self.is_met else 'no'} | {self.num_within} of {len(rounds)} | "
            f"{median(own):+.1%} ({min(own):+.1%} to {max(own):+.1%}) |"
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--prefix", default="", help="a command that runs the server, such as 'chrt -f 20'")
    add("--flags", default="--num-threads 1 --no-enable-prefix-caching", help="of the server")
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=64)
    add("--seconds", type=float, default=15.0, help="of each load")
    add("--sweep-seconds", type=float, default=1.0, help="of each level of a sweep, at least")
    add("--model", help="a directory, or a shape of random weights such as 135m")
    add("--burst", type=int, default=300, help="requests that are sent at once")
    add("--rounds", type=int, default=3, help="of all loads")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        calibration, loads = _run(args, _model(args.model, Path(scratch)))
    print(describe(calibration), end="\n\n")
    compared = _compare(calibration, loads)
    print("| load | figure | measured (spread) | predicted (error bar) | error (spread) | aim "
          "| met | within the bar | error at the load's own speed |")  # fmt: skip
    print("|---|---|---:|---:|---:|---:|---|---|---:|")
    for each in compared:
        print(each.row())
    summary = {
        "seed": args.seed,
        "num_met": sum(each.is_met for each in compared),
        "num_figures": len(compared),
        "rounds": [msgspec.to_builtins(each.rounds) for each in compared],
    }
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


def _model(name: str | None, scratch: Path) -> tuple[str, ...]:
    """The server's argument for it. A shape's weights are written to scratch."""
    if name is None:
        return ()
    if name in SHAPES:
        write_model(SHAPES[name], scratch / name)
        return (str(scratch / name),)
    return (name,)


def _run(args: argparse.Namespace, model: tuple[str, ...]) -> tuple[Calibration, list["Measured"]]:
    prefix = tuple(shlex.split(args.prefix))
    server = RunningServer(*model, *shlex.split(args.flags), prefix=prefix)
    try:
        server.wait_until_ready()
        return run(_measure(server.url, args))
    finally:
        server.process.terminate()
        server.process.wait()


@dataclass(frozen=True, slots=True)
class Measured:
    """One load of one round."""

    name: str
    requests: list[TimedRequest]
    summary: Summary
    steps: list[StepSample]
    figures: Figures


async def _measure(url: str, args: argparse.Namespace) -> tuple[Calibration, list[Measured]]:
    workload = WorkloadConfig(
        seed=args.seed,
        num_prompts=args.burst,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=0.5,
    )
    loads: list[Measured] = []
    swept: list[StepSample] = []
    (served, *_) = await wait_until_ready(url, timeout_s=60.0, say=_say)
    async with HttpTarget(TargetConfig(base_url=url, model=served.id, ignore_eos=True)) as target:
        await warm_up(target, workload, 20, 20)

        async def measure(name: str, requests: list[TimedRequest], figures: Figures) -> Summary:
            _say(f"measuring {name}")
            first = (await read_steps(url, {})).num_steps
            summary = summarize(await replay(target, requests), REPORT)
            steps = await _steps_after(url, first)
            loads.append(Measured(name, requests, summary, steps, figures))
            return summary

        throughput: Figures = (("requests/s", "request_throughput", CAPACITY_AIM),)
        for number in range(args.rounds):
            swept += await _sweep(url, target, args, number)
            seed = args.seed + 100 * (number + 1)
            burst = make_requests(replace(workload, seed=seed))
            capacity = (await measure("all at once", burst, throughput))["request_throughput"]
            for part, share in enumerate(SHARES, start=1):
                rate = share * capacity
                at_rate = replace(
                    workload,
                    seed=seed + part,
                    num_prompts=max(20, round(rate * args.seconds)),
                    request_rate=rate,
                )
                await measure(f"{share:.0%}", make_requests(at_rate), AIMS)
        swept += await _sweep(url, target, args, args.rounds)
        front_end = await measure_front_end(url, {}, _say)
        read = replace(await read_steps(url, {}), steps=swept)
        made = calibration_of(url, front_end, read)
        return replace(made, drafts=drafts_of(await read_metrics(url, {}))), loads


async def _sweep(
    url: str, target: HttpTarget, args: argparse.Namespace, number: int
) -> list[StepSample]:
    """Closed loops of each level; returns those of their steps that the server has kept."""
    first = (await read_steps(url, {})).num_steps
    for level in LEVELS:
        _say(f"calibrating with {level} at a time")
        end_s = time.monotonic() + args.sweep_seconds
        seeds = itertools.count(args.seed + 5000 + 1000 * number + level)
        while time.monotonic() < end_s:
            swept = replace(SWEPT, seed=next(seeds), num_prompts=max(8, 2 * level))
            await replay(target, make_requests(swept), max_concurrency=level)
    return await _steps_after(url, first)


async def _steps_after(url: str, first: int) -> list[StepSample]:
    """Those that the server has kept."""
    return [step for step in (await read_steps(url, {})).steps if step.number > first]


def _compare(calibration: Calibration, loads: list[Measured]) -> list[Compared]:
    compared: dict[tuple[str, str], Compared] = {}
    for number, load in enumerate(loads, start=1):
        _say(f"simulating {number} of {len(loads)}: {load.name}")
        predicted, bars = _predicted(calibration, load.requests)
        own = _simulated(calibration, load.requests, speed_of(calibration.step_model, load.steps))
        for figure, key, aim in load.figures:
            low, high = bars.get(key, (predicted[key], predicted[key]))
            row = Round(
                load.name, figure, load.summary[key], predicted[key], low, high, own[key], aim
            )
            compared.setdefault((load.name, figure), Compared([])).rounds.append(row)
    return list(compared.values())


def _predicted(
    made: Calibration, requests: list[TimedRequest]
) -> tuple[Summary, dict[str, tuple[float, float]]]:
    """With error bars."""
    errors = made.step_model.errors
    middle, *others = (
        _simulated(
            made,
            requests,
            {
                kind: 1 + sign * (min(errors[kind].bias, 0.9) if kind in errors else 0.0)
                for kind in StepClass
            },
        )
        for sign in (0, -1, 1)
    )
    return middle, error_bars(middle, others)


def _simulated(
    made: Calibration, requests: list[TimedRequest], factors: dict[StepClass, float]
) -> Summary:
    server = SimulatedServer(
        made.model, made.step_model, made.scheduler, made.front_end, drafts=made.drafts
    )
    return summarize(simulate(Plan(server=server), requests, factors=factors).observed, REPORT)


def speed_of(model: StepModel, steps: list[StepSample]) -> dict[StepClass, float]:
    """Measured over simulated time of these steps, by class; of all of them where a class has too
    few, and 1 where there are none."""
    drawn = {kind: _mean_drawn(error) for kind, error in model.errors.items()}
    measured, predicted = dict.fromkeys(StepClass, 0.0), dict.fromkeys(StepClass, 0.0)
    nums = Counter(step.kind for step in steps)
    for step in steps:
        measured[step.kind] += step.cycle_s
        time_s = model.cycle_s(step.amounts)
        predicted[step.kind] += time_s * drawn.get(step.kind, 1.0)
    of_all = sum(measured.values()) / sum(predicted.values()) if steps else 1.0
    return {
        kind: measured[kind] / predicted[kind] if nums[kind] >= _MIN_STEPS else of_all
        for kind in StepClass
    }


def _mean_drawn(error: ClassError, num: int = 1000) -> float:
    """Of the ratios by which a simulation spreads the steps of a class."""
    return fmean(error.ratio_at((i + 0.5) / num) for i in range(num))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
