"""`python -m tests.bench.server.targets [itl|fair|goodput]`: does a live server keep its targets?

The questions of `tests.bench.targets`, put to a real server over HTTP: by default the 135M shape
with random weights. Each answer is with the flag and without it, on the same requests.

itl      prompts of 3,000 tokens among short ones at 80 % of capacity: the ITL.
fair     one API key floods at ten times capacity: the TTFT of a quiet key, alone and beside it.
goodput  120 % of capacity: requests a second that meet their targets.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.replay import replay, run
from penstock.loadtest.report.report import RequestResult, percentile
from penstock.loadtest.workload.workload import TimedRequest
from tests.bench.peers.models import SHAPES, write_model
from tests.bench.targets import FLOOD, QUIET, Shape, itl_ms, requests, ttft_ms
from tests.support.serving import RunningServer

MIXED = Shape((*[200] * 9, 3000), (20, 80))
SHORT = Shape((100, 200, 400), (20, 80))
ITL_TARGET_MS, TTFT_TARGET_S, TPOT_TARGET_S = 100.0, 2.0, 0.1
NUM_BURST = 48
FLAGS = ("--max-num-seqs", "16")
# Prompts that no load has: what is found in the prefix cache are blocks of preempted sequences.
WARM_UP, BURST = 30_000, 20_000


class Served:
    """A server of one model, and loads that are sent to it."""

    def __init__(self, server: RunningServer, model: str) -> None:
        self._url, self._model = server.url, model

    def capacity(self, shape: Shape, seed: int) -> float:
        """Requests a second, all sent at once."""
        made = requests(NUM_BURST, 1.0, Random(seed), shape, first=BURST)
        burst = [replace(each, arrival_s=0.0) for each in made]
        results = self.send({QUIET: burst})
        return len(results) / (
            max(each.ended_s for each in results) - min(each.sent_s for each in results)
        )

    def send(self, by_key: dict[str, list[TimedRequest]]) -> list[RequestResult]:
        """Each key's requests, at the same time; returns the results of the first key, and does not
        wait for the others'."""
        return run(self._send(by_key))

    async def _send(self, by_key: dict[str, list[TimedRequest]]) -> list[RequestResult]:
        async def send(key: str, trace: list[TimedRequest]) -> list[RequestResult]:
            headers = {"Authorization": f"Bearer {key}"}
            config = TargetConfig(
                base_url=self._url, model=self._model, ignore_eos=True, headers=headers
            )
            async with HttpTarget(config) as target:
                return (await replay(target, trace)).results

        first, *others = [asyncio.create_task(send(*each)) for each in by_key.items()]
        results = await first
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return results


@contextmanager
def served(model: Path, *flags: str) -> Iterator[Served]:
    keys = ("--api-key", QUIET, FLOOD)
    server = RunningServer(str(model), *FLAGS, *keys, "--served-model-name", "m", *flags)
    try:
        server.wait_until_ready()
        made = Served(server, "m")
        # What a first step costs is not seen.
        made.send({QUIET: requests(4, 1.0, Random(99), MIXED, first=WARM_UP)})
        yield made
    finally:
        server.process.terminate()
        server.process.wait()


def itl(model: Path, seconds: float, seed: int) -> dict[str, float]:
    made = {"itl_target_ms": ITL_TARGET_MS}
    trace: list[TimedRequest] = []
    for name, flags in (("without", ()), ("with", ("--itl-target-ms", f"{ITL_TARGET_MS:g}"))):
        with served(model, *flags) as server:
            if not trace:
                rate = made["itl_rate"] = 0.8 * server.capacity(MIXED, seed)
                trace = requests(round(rate * seconds), rate, Random(seed), MIXED)
            results = server.send({QUIET: trace})
        made |= _percentiles("itl", name, itl_ms(results))
        made |= _percentiles("itl_ttft", name, ttft_ms(results))
    return made | {"itl_p99_over_target": made["itl_p99_ms_with"] / ITL_TARGET_MS}


def fair(model: Path, seconds: float, seed: int) -> dict[str, float]:
    made: dict[str, float] = {}
    quiet: list[TimedRequest] = []
    flood: list[TimedRequest] = []
    for name, policy in (("alone", "fcfs"), ("fcfs", "fcfs"), ("fair", "fair")):
        with served(model, "--scheduling-policy", policy) as server:
            if not quiet:
                rate = made["fair_capacity"] = server.capacity(SHORT, seed)
                quiet = requests(round(0.3 * rate * seconds), 0.3 * rate, Random(seed), SHORT)
                num = round(10 * rate * quiet[-1].arrival_s)
                flood = requests(num, 10 * rate, Random(seed + 1), SHORT, first=len(quiet))
            others = {} if name == "alone" else {FLOOD: flood}
            results = server.send({QUIET: quiet} | others)
        made |= _percentiles("fair_ttft", name, ttft_ms(results))
        made[f"fair_refused_{name}"] = _share_refused(results)
    return made | {
        "fair_over_alone": made["fair_ttft_p99_ms_fair"] / made["fair_ttft_p99_ms_alone"]
    }


def goodput(model: Path, seconds: float, seed: int) -> dict[str, float]:
    made: dict[str, float] = {}
    trace: list[TimedRequest] = []
    targets = (
        *("--ttft-target-ms", f"{TTFT_TARGET_S * 1e3:g}"),
        *("--itl-target-ms", f"{TPOT_TARGET_S * 1e3:g}"),
    )
    for name, flags in (("fcfs", ()), ("targets", targets)):
        with served(model, *flags) as server:
            if not trace:
                rate = made["goodput_rate"] = 1.2 * server.capacity(SHORT, seed)
                trace = requests(round(rate * seconds), rate, Random(seed), SHORT)
            results = server.send({QUIET: trace})
        good = sum(
            r.error is None and r.ttft_s <= TTFT_TARGET_S and (r.tpot_s or 0.0) <= TPOT_TARGET_S
            for r in results
        )
        took_s = max(r.ended_s for r in results) - min(r.scheduled_s for r in results)
        made[f"goodput_{name}"] = good / took_s
        made[f"goodput_refused_{name}"] = _share_refused(results)
    return made | {"goodput_over_fcfs": made["goodput_targets"] / made["goodput_fcfs"]}


def _percentiles(what: str, name: str, values: list[float]) -> dict[str, float]:
    return {f"{what}_p{share}_ms_{name}": percentile(values, share) for share in (50, 99)}


def _share_refused(results: Iterable[RequestResult]) -> float:
    statuses = [each.status for each in results]
    return statuses.count(429) / len(statuses)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("questions", nargs="*", metavar="itl|fair|goodput", help="default: all")
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    every = {"itl": itl, "fair": fair, "goodput": goodput}
    made: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(SHAPES[args.shape], model)
        for name in args.questions or every:
            if name not in every:
                parser.error(f"{name} is none of {', '.join(every)}")
            answer = every[name](model, args.seconds, args.seed)
            for key, value in answer.items():
                print(f"{key:<32} {value:>12.3f}", flush=True)
            made |= answer
    print(msgspec.json.encode(made | {"seed": args.seed}).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
