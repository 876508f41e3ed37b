"""`python -m tests.bench.server.predicted_drafts`: what a simulation says of steps with drafts,
beside what a server does.

A server is calibrated on closed loops, some of whose chats predict their answers. Then chats are
asked whose predictions have every so many words changed, in closed loops of some streams; each load
is simulated with the acceptance that its own drafts had, as `/metrics` count them, and with 0.1
less and more. Greedy answers repeat, so drafts of the answer so far are among them. Prints
Markdown, and JSON as its last line.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import wait_until_ready
from penstock.loadtest.bench.replay import run
from penstock.loadtest.calibrate.calibration import (
    Calibration,
    measure_front_end,
    read_metrics,
    read_steps,
)
from penstock.loadtest.calibrate.cli import calibration_of, describe
from penstock.loadtest.calibrate.drafts import DraftsAssumed, drafts_of
from penstock.loadtest.report.report import Replay, ReportConfig, RequestResult, Summary, summarize
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.workload import TimedRequest, make_prompt
from tests.bench.server.predicted import _model, _say
from tests.support.serving import RunningServer, ready

_WORDS = "the water of a river goes through gates and turns wheels".split()  # noqa: SIM905
# Every so many words of a prediction is another; None: there is no prediction.
LEVELS: tuple[int | None, ...] = (None, 2, 5, 20)
FIGURES = (("TPOT mean, ms", "mean_tpot_ms"), ("output tokens/s", "output_throughput"))


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop that was measured. drafts: what they did in it."""

    name: str
    streams: int
    observed: Replay
    drafts: DraftsAssumed | None


@dataclass(frozen=True, slots=True)
class Compared:
    load: str
    figure: str
    measured: float
    predicted: float
    with_less: float
    with_more: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--model", help="a directory, or a shape of random weights such as 135m")
    add("--streams", nargs="+", type=int, default=[1, 4, 16])
    add("--requests", type=int, default=24, help="of each load")
    add("--output-len", type=int, default=96)
    add("--rounds", type=int, default=2, help="of the calibration")
    args, flags = parser.parse_known_args(argv)
    sources = ("--speculative-config", '{"method": "ngram"}', "--no-enable-prefix-caching")
    with TemporaryDirectory() as scratch:
        model = _model(args.model, Path(scratch))
        with ready(RunningServer(*model, "--num-threads", "1", *sources, *flags)) as (server,):
            calibration, loads = run(_measure(server.url, args))
    print(describe(calibration), end="\n\n")
    print("| load | drafts | figure | measured | predicted | error | acceptance 0.1 less, more |")
    print("|---|---|---|---:|---:|---:|---:|")
    rows = []
    for load in loads:
        for row in compare(calibration, load):
            rows.append(row)
            print(
                f"| {row.load} | {load.drafts or 'none'} | {row.figure} | {row.measured:.2f} | "
                f"{row.predicted:.2f} | {row.error:+.1%} | {row.with_less:.2f}, "
                f"{row.with_more:.2f} |"
            )
    worst = max(abs(row.error) for row in rows)
    print(msgspec.json.encode({"worst_error": worst, "rows": rows}).decode(), flush=True)
    return 0


async def _measure(url: str, args: argparse.Namespace) -> tuple[Calibration, list[Load]]:
    (served, *_) = await wait_until_ready(url, timeout_s=60.0, say=_say)
    config = TargetConfig(
        base_url=url, model=served.id, endpoint="/v1/chat/completions", ignore_eos=True
    )
    asked = [_request(number, args.output_len) for number in range(args.requests)]
    async with HttpTarget(config) as target:
        first = await _closed_loop(target, config, asked, {}, 4)
        answers = {each.index: each.text for each in first.results}
        for turn in range(args.rounds):
            for streams in (1, 2, 3, 6, 12, 24):
                _say(f"calibrating with {streams} at a time, {turn + 1} of {args.rounds}")
                some = asked[: max(4, 2 * streams)]
                for every in (None, 3, 50):
                    await _closed_loop(target, config, some, _predicting(answers, every), streams)
        front_end = await measure_front_end(url, {}, _say)
        steps = await read_steps(url, {})
        loads = []
        for every in LEVELS:
            for streams in args.streams:
                name = f"{streams} streams, " + (
                    "no prediction" if every is None else f"one word of {every} is another"
                )
                _say(f"measuring {name}")
                before = await read_metrics(url, {})
                fields = _predicting(answers, every)
                observed = await _closed_loop(target, config, asked, fields, streams)
                drafts = drafts_of(await read_metrics(url, {}), before)
                loads.append(Load(name, streams, observed, drafts))
        return calibration_of(url, front_end, steps), loads


def _request(number: int, output_len: int) -> TimedRequest:
    random = Random(number)
    prompt = " ".join(random.choices(_WORDS, k=random.randrange(20, 60)))
    return TimedRequest(
        index=number, arrival_s=0.0, prompt=prompt, num_prompt_tokens=0, max_tokens=output_len
    )


def _predicting(answers: dict[int, str], every: int | None) -> dict[int, dict[str, Any]]:
    """The fields of each request besides, by its number."""
    if every is None:
        return {}
    fields: dict[int, dict[str, Any]] = {}
    for number, answer in answers.items():
        words = answer.split(" ")
        words[every - 1 :: every] = ["otherwise"] * len(words[every - 1 :: every])
        fields[number] = {"prediction": {"type": "content", "content": " ".join(words)}}
    return fields


async def _closed_loop(
    target: HttpTarget,
    config: TargetConfig,
    asked: list[TimedRequest],
    fields: dict[int, dict[str, Any]],
    streams: int,
) -> Replay:
    """Raises AssertionError where a request failed."""
    places, results = asyncio.Semaphore(streams), list[RequestResult]()

    async def ask(request: TimedRequest) -> None:
        own = HttpTarget(replace(config, extra_body=fields.get(request.index, {})))
        encoded = own.encode(request)
        async with places:
            results.append(await target.send(request, encoded, time.perf_counter()))

    begun_s = time.perf_counter()
    await asyncio.gather(*map(ask, asked))
    failed = [each.error for each in results if each.error]
    assert not failed, failed[0]
    return Replay(results=results, duration_s=time.perf_counter() - begun_s, client_cpu_share=0.0)


def compare(calibration: Calibration, load: Load) -> list[Compared]:
    measured = summarize(load.observed, ReportConfig())
    drafts = [load.drafts and load.drafts.changed_by(more) for more in (0.0, -0.1, 0.1)]
    predicted = [_simulated(calibration, load, each) for each in drafts]
    return [
        Compared(load.name, figure, measured[key], *(each[key] for each in predicted))
        for figure, key in FIGURES
    ]


def _simulated(made: Calibration, load: Load, drafts: DraftsAssumed | None) -> Summary:
    server = SimulatedServer(
        made.model, made.step_model, made.scheduler, made.front_end, drafts=drafts
    )
    requests = [
        TimedRequest(
            index=each.index,
            arrival_s=0.0,
            prompt=make_prompt(str(each.index), each.num_prompt_tokens, 256),
            num_prompt_tokens=each.num_prompt_tokens,
            max_tokens=each.num_output_tokens,
        )
        for each in load.observed.results
    ]
    plan = Plan(server=server, max_concurrency=load.streams)
    return summarize(simulate(plan, requests).observed, ReportConfig())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
