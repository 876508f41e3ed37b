"""`python -m tests.bench.server.predicted`: what a simulation says beside what a server does.

A server is started and gets requests all at once, which gives its capacity, and then in Poisson
arrivals at 50, 70 and 85 % of it, each load after one of the same rate and other requests. In the
end it is calibrated by its own steps, those of all loads; so both sides have had the same machine,
which on one that is shared is never the same twice. Then the loads are simulated. The table has
both figures, and what the aims are. It is Markdown; the last line is JSON.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass, replace

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import warm_up
from penstock.loadtest.bench.replay import replay, run
from penstock.loadtest.calibrate.calibration import Calibration
from penstock.loadtest.calibrate.cli import calibrate_server, describe
from penstock.loadtest.report.report import ReportConfig, Summary, summarize
from penstock.loadtest.simulate.outcome import error_bars, run_class
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import TimedRequest, make_requests
from penstock.scheduler.stats import StepClass
from tests.support.serving import MODEL, RunningServer

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


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure. low, high: the error bar."""

    load: str
    figure: str
    measured: float
    predicted: float
    low: float
    high: float
    aim: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= self.aim


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--prefix", default="", help="a command that runs the server, such as 'chrt -f 20'")
    add("--flags", default="--num-threads 1", help="of the server")
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=64)
    add("--seconds", type=float, default=8.0, help="of each load")
    add("--burst", type=int, default=200, help="requests that are sent at once")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    server = RunningServer(*shlex.split(args.flags), prefix=tuple(shlex.split(args.prefix)))
    try:
        server.wait_until_ready()
        calibration, compared = run(_compare(server.url, args))
    finally:
        server.process.terminate()
        server.process.wait()
    print(describe(calibration), end="\n\n")
    print("| load | figure | measured | predicted (error bar) | error | aim | met |")
    print("|---|---|---:|---:|---:|---:|---|")
    for each in compared:
        print(
            f"| {each.load} | {each.figure} | {each.measured:.2f} | {each.predicted:.2f} "
            f"({each.low:.2f} to {each.high:.2f}) | {each.error:+.1%} | {each.aim:.0%} | "
            f"{'yes' if each.is_met else 'no'} |"
        )
    summary = {
        "seed": args.seed,
        "num_met": sum(each.is_met for each in compared),
        "figures": [msgspec.to_builtins(each) | {"error": each.error} for each in compared],
    }
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


async def _compare(url: str, args: argparse.Namespace) -> tuple[Calibration, list[Compared]]:
    workload = WorkloadConfig(
        seed=args.seed,
        num_prompts=args.burst,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=0.5,
    )
    async with HttpTarget(TargetConfig(base_url=url, model=MODEL, ignore_eos=True)) as target:
        await warm_up(target, workload, 20, 20)

        async def measure(requests: list[TimedRequest]) -> Summary:
            return summarize(await replay(target, requests), REPORT)

        burst = make_requests(workload)
        measured_burst = await measure(burst)
        capacity = measured_burst["request_throughput"]
        _say(f"capacity {capacity:.1f} requests/s")

        def at(share: float, seed: int) -> list[TimedRequest]:
            rate = share * capacity
            num = max(20, round(rate * args.seconds))
            return make_requests(replace(workload, seed=seed, num_prompts=num, request_rate=rate))

        loads = []
        for number, share in enumerate(SHARES):
            _say(f"measuring at {share:.0%}")
            await measure(at(share, args.seed + 1000 + number))
            requests = at(share, args.seed + 2000 + number)
            loads.append((share, requests, await measure(requests)))
        calibration = await calibrate_server(url, {})
        predicted, bars, kind = _predicted(calibration, burst)
        key, load = "request_throughput", f"all at once, {kind}"
        compared = [_figure(load, "requests/s", key, CAPACITY_AIM, measured_burst, predicted, bars)]
        for share, requests, measured in loads:
            predicted, bars, kind = _predicted(calibration, requests)
            compared += [
                _figure(f"{share:.0%}, {kind}", figure, key, aim, measured, predicted, bars)
                for figure, key, aim in AIMS
            ]
    return calibration, compared


def _predicted(
    made: Calibration, requests: list[TimedRequest]
) -> tuple[Summary, dict[str, tuple[float, float]], str]:
    """With error bars, and the class of the run."""
    server = SimulatedServer(made.model, made.step_model, made.scheduler, made.front_end_s)
    errors = made.step_model.errors
    runs = [
        simulate(
            Plan(server=server),
            requests,
            factors={
                kind: 1 + sign * (errors[kind].bias if kind in errors else 0.0)
                for kind in StepClass
            },
        )
        for sign in (0, -1, 1)
    ]
    middle, *others = (summarize(each.observed, REPORT) for each in runs)
    return middle, error_bars(middle, others), run_class(runs[0])


def _figure(
    load: str,
    figure: str,
    key: str,
    aim: float,
    measured: Summary,
    predicted: Summary,
    bars: dict[str, tuple[float, float]],
) -> Compared:
    low, high = bars.get(key, (predicted[key], predicted[key]))
    return Compared(load, figure, measured[key], predicted[key], low, high, aim)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
