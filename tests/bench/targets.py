"""`python -m tests.bench.targets`: what targets and fair shares do, in virtual time.

Three questions, each on the scheduler and the loop that serve, and on the steps of a model on an
H200 by its datasheet, with a spread as measured steps have it:

itl      8k-token prompts among streams at 80 % of capacity: the ITL with and without a target.
fair     one key floods at ten times capacity: the TTFT of a quiet key, alone and beside it.
goodput  120 % of capacity: requests a second that meet their targets, with and without refusals.

Deterministic for a seed. The capacity is measured first, by a queue that never empties.
"""

import argparse
import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import NamedTuple

import msgspec

from penstock.engine.executors.scripted import scripted_info
from penstock.loadtest.report.report import RequestResult, percentile
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.config import Policy, SchedulerConfig
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.amounts import DEVICE_UNITS, AttentionGroup
from penstock.scheduler.step_model.analytic import analytic_model
from penstock.scheduler.step_model.model import QUANTILES, ClassError, StepModel

# Measured over predicted time at QUANTILES, as steps on a GPU have it: a few per cent, and a tail.
SPREAD = (
    0.95,
    0.955,
    0.965,
    0.97,
    0.98,
    0.985,
    0.99,
    1.0,
    1.005,
    1.01,
    1.02,
    1.03,
    1.05,
    1.12,
    1.2,
)
QUIET, FLOOD = "quiet", "flood"
WARM_UP_S = 3.0


class Shape(NamedTuple):
    """prompts: lengths to draw from. outputs: the least and the most."""

    prompts: tuple[int, ...]
    outputs: tuple[int, int]


def server(config: SchedulerConfig) -> SimulatedServer:
    """Llama-3.1-8B in bfloat16 on an H200: sizes of its config.json, peaks of the datasheet."""
    group = AttentionGroup(window=None, kv_bytes_per_token=131_072, flops_per_pair=4 * 4096 * 32)
    info = replace(
        scripted_info(num_blocks=12_000, block_size=64, max_model_len=32_768),
        attention=(group,),
        weight_bytes=15_000_000_000,
        flops_per_token=2 * 6_980_000_000,
        flops_per_sampled_token=2 * 525_000_000,
        runs_ahead=True,
        peak_bandwidth_bytes_per_s=4.8e12,
        peak_flops_per_s=989e12,
    )
    model = analytic_model(
        bandwidth=4.8e12,
        flops=989e12,
        weight_bytes=info.weight_bytes,
        flops_per_token=info.flops_per_token,
        num_layers=32,
    )
    return SimulatedServer(info, replace(model, errors=spread()), config)


def spread() -> dict[StepClass, ClassError]:
    assert len(SPREAD) == len(QUANTILES)
    error = ClassError(num_steps=1000, mape=0.03, bias=0.02, ratios=SPREAD)
    return dict.fromkeys(StepClass, error)


def requests(
    num: int,
    rate: float,
    random: Random,
    shape: Shape,
    *,
    tenant: str = "",
    first: int = 0,
) -> list[TimedRequest]:
    """Poisson arrivals."""
    at_s, made = 0.0, []
    for index in range(first, first + num):
        at_s += random.expovariate(rate)
        length = random.choice(shape.prompts)
        made.append(
            TimedRequest(
                index=index,
                arrival_s=at_s,
                prompt=[10 + index % 1000, index, *([7] * (length - 2))],
                num_prompt_tokens=length,
                max_tokens=random.randint(*shape.outputs),
                tenant=tenant,
            )
        )
    return made


def small_server(config: SchedulerConfig) -> SimulatedServer:
    """A 135M shape on two cores, in round figures: a step of one decode takes 12 ms, of sixteen 42,
    and a prompt of 512 tokens 300."""
    units = {"step": 0.008, "token_below_knee": 0.002, "token_above_knee": 0.00058}
    return SimulatedServer(
        scripted_info(num_blocks=2_000, block_size=16, max_model_len=8192),
        StepModel(
            device=tuple(units.get(unit, 0.0) for unit in DEVICE_UNITS),
            host=(1e-3, 2e-5, 1e-4, 0.0),
            knee=16,
            runs_ahead=False,
            errors=spread(),
        ),
        config,
    )


def run(made: SimulatedServer, trace: Sequence[TimedRequest], seed: int) -> list[RequestResult]:
    ordered = sorted(trace, key=lambda each: each.arrival_s)
    plan = Plan(server=made._replace(max_num_queued_reqs=1_000_000), seed=seed)
    return simulate(plan, ordered).observed.results


def capacity(trace: Sequence[TimedRequest], made: SimulatedServer, seed: int) -> float:
    """Requests a second, of a queue that never empties."""
    results = run(made, [replace(each, arrival_s=0.001) for each in trace], seed)
    return len(results) / max(each.ended_s for each in results)


def itl_ms(results: Sequence[RequestResult]) -> list[float]:
    gaps = []
    for result in results:
        times = result.arrivals_s
        gaps += [(b - a) * 1e3 for a, b in pairwise(times)]
    return sorted(gaps)


def ttft_ms(results: Sequence[RequestResult]) -> list[float]:
    return sorted(each.ttft_s * 1e3 for each in results if each.error is None)


def itl(num: int, seed: int) -> dict[str, float]:
    config = SchedulerConfig(max_num_batched_tokens=8192)
    shape = Shape((*[500] * 9, 8000), (50, 350))

    def trace(rate: float) -> list[TimedRequest]:
        return requests(num, rate, Random(seed), shape)

    target_ms = 25.0
    with_target = replace(config, itl_target_s=target_ms / 1e3)
    rate = 0.8 * capacity(trace(1.0), server(with_target), seed)
    made = {"itl_rate": rate, "itl_target_ms": target_ms}
    for name, each in (("without", config), ("with", with_target)):
        results = run(server(each), trace(rate), seed)
        made[f"itl_p99_ms_{name}"] = percentile(itl_ms(results), 99)
        made[f"itl_p50_ms_{name}"] = percentile(itl_ms(results), 50)
        made[f"itl_ttft_p99_ms_{name}"] = percentile(ttft_ms(results), 99)
    made["itl_p99_over_target"] = made["itl_p99_ms_with"] / target_ms
    return made


def fair(num: int, seed: int) -> dict[str, float]:
    """Of two servers, by the sequences that they run together."""
    num = min(num, 80)  # the flood is thirty times as many, and takes a while to be served
    made: dict[str, float] = {}
    large = server(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048))
    made |= flooded("fair_64", large, Shape((200, 500, 1000, 3000), (100, 300)), num, seed)
    small = small_server(SchedulerConfig(max_num_seqs=16))
    return made | flooded("fair_16", small, Shape((100, 200, 400), (20, 80)), num, seed)


def flooded(
    name: str, made: SimulatedServer, shape: Shape, num: int, seed: int
) -> dict[str, float]:
    """Without the first seconds, in which it is not known yet that there is a second key."""
    rate = capacity(requests(400, 1.0, Random(seed), shape), made, seed)
    quiet = requests(num, 0.3 * rate, Random(seed), shape, tenant=QUIET)
    flooding = requests(
        int(10 * rate * quiet[-1].arrival_s),
        10 * rate,
        Random(seed + 1),
        shape,
        tenant=FLOOD,
        first=num,
    )
    fairly = made._replace(scheduler=replace(made.scheduler, policy=Policy.FAIR))
    answers = {f"{name}_capacity": rate}
    for kind, each, trace in (
        ("alone", made, quiet),
        ("fcfs", made, [*quiet, *flooding]),
        ("fair", fairly, [*quiet, *flooding]),
    ):
        results = run(each, trace, seed)
        of_quiet = [r for r in results if r.index < num and r.sent_s > WARM_UP_S]
        answers[f"{name}_ttft_p99_ms_{kind}"] = percentile(ttft_ms(of_quiet), 99)
        answers[f"{name}_ttft_p50_ms_{kind}"] = percentile(ttft_ms(of_quiet), 50)
        of_all = [r for r in results if r.error is None]
        answers[f"{name}_tokens_per_s_{kind}"] = tokens_per_s(of_all, quiet[-1].arrival_s)
        answers[f"{name}_all_tokens_per_s_{kind}"] = tokens_per_s(of_all)
        if kind != "alone":
            of_flood = [r for r in results if r.index >= num]
            answers[f"{name}_flood_itl_p99_ms_{kind}"] = percentile(itl_ms(of_flood), 99)
            answers[f"{name}_flood_itl_max_ms_{kind}"] = itl_ms(of_flood)[-1]
    alone, fair = (answers[f"{name}_ttft_p99_ms_{kind}"] for kind in ("alone", "fair"))
    return answers | {f"{name}_over_alone": fair / alone}


def tokens_per_s(results: Sequence[RequestResult], until_s: float = math.inf) -> float:
    """Of prompts and answers together, until then, or until all have ended."""
    total, end_s = 0, min(until_s, max(each.ended_s for each in results))
    for each in results:
        num_outputs = bisect_right(each.arrivals_s, end_s)
        total += num_outputs + (each.num_prompt_tokens if num_outputs else 0)
    return total / end_s


def goodput(num: int, seed: int) -> dict[str, float]:
    config = SchedulerConfig(max_num_batched_tokens=2048)
    shape = Shape((200, 500, 1000, 3000), (50, 350))
    rate = 1.2 * capacity(requests(num, 1.0, Random(seed), shape), server(config), seed)
    trace = requests(num, rate, Random(seed), shape)
    ttft_s, tpot_s = 1.0, 0.05
    targets = replace(config, ttft_target_s=ttft_s, itl_target_s=tpot_s)
    made = {"goodput_rate": rate}
    for name, each in (("fcfs", config), ("targets", targets)):
        results = run(server(each), trace, seed)
        good = sum(
            r.error is None and r.ttft_s <= ttft_s and (r.tpot_s or 0.0) <= tpot_s for r in results
        )
        made[f"goodput_{name}"] = good / max(r.ended_s for r in results)
        made[f"goodput_share_{name}"] = good / len(results)
        made[f"goodput_refused_{name}"] = sum(r.status == 429 for r in results) / len(results)
    made["goodput_over_fcfs"] = made["goodput_targets"] / made["goodput_fcfs"]
    return made


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("questions", nargs="*", metavar="itl|fair|goodput", help="default: all")
    parser.add_argument("--num-prompts", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    every = {"itl": itl, "fair": fair, "goodput": goodput}
    made: dict[str, float] = {}
    for name in args.questions or every:
        if name not in every:
            parser.error(f"{name} is none of {', '.join(every)}")
        answer = every[name](args.num_prompts, args.seed)
        for key, value in answer.items():
            print(f"{key:<32} {value:>12.3f}", flush=True)
        made |= answer
    print(msgspec.json.encode(made | {"seed": args.seed}).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
