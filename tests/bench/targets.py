"""`python -m tests.bench.targets`: what targets and fair shares do, in virtual time.

Three questions, each on the scheduler and the loop that serve, and on the steps of a model on an
H200 by its datasheet, with a spread as measured steps have it:

itl      8k-token prompts among streams at 80 % of capacity: the ITL with and without a target.
fair     one key floods at ten times capacity: the TTFT of a quiet key, alone and beside it.
goodput  120 % of capacity: requests a second that meet their targets, with and without refusals.

Deterministic for a seed. The capacity is measured first, by a queue that never empties.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import NamedTuple

import msgspec

from penstock.engine.executors.scripted import scripted_info
from penstock.engine.model_info import AttentionGroup
from penstock.loadtest.report.report import RequestResult, percentile
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.config import Policy, SchedulerConfig
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.analytic import analytic_model
from penstock.scheduler.step_model.model import QUANTILES, ClassError

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
    errors = {
        kind: ClassError(num_steps=1000, mape=0.03, bias=0.02, ratios=SPREAD) for kind in StepClass
    }
    assert len(SPREAD) == len(QUANTILES)
    return SimulatedServer(info, replace(model, errors=errors), config)


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


def run(config: SchedulerConfig, trace: Sequence[TimedRequest], seed: int) -> list[RequestResult]:
    ordered = sorted(trace, key=lambda each: each.arrival_s)
    plan = Plan(server=replace_queue(server(config)), seed=seed)
    return simulate(plan, ordered).observed.results


def replace_queue(made: SimulatedServer) -> SimulatedServer:
    return made._replace(max_num_queued_reqs=1_000_000)


def capacity(trace: Sequence[TimedRequest], config: SchedulerConfig, seed: int) -> float:
    """Requests a second, of a queue that never empties."""
    results = run(config, [replace(each, arrival_s=0.001) for each in trace], seed)
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
    rate = 0.8 * capacity(trace(1.0), with_target, seed)
    made = {"itl_rate": rate, "itl_target_ms": target_ms}
    for name, each in (("without", config), ("with", with_target)):
        results = run(each, trace(rate), seed)
        made[f"itl_p99_ms_{name}"] = percentile(itl_ms(results), 99)
        made[f"itl_p50_ms_{name}"] = percentile(itl_ms(results), 50)
        made[f"itl_ttft_p99_ms_{name}"] = percentile(ttft_ms(results), 99)
    made["itl_p99_over_target"] = made["itl_p99_ms_with"] / target_ms
    return made


def fair(num: int, seed: int) -> dict[str, float]:
    """Without the first seconds, in which it is not known yet that there is a second key."""
    num = min(num, 80)  # the flood is thirty times as many, and takes a while to be served
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048)
    shape = Shape((200, 500, 1000, 3000), (100, 300))
    rate = capacity(requests(400, 1.0, Random(seed), shape), config, seed)
    quiet = requests(num, 0.3 * rate, Random(seed), shape, tenant=QUIET)
    flooding = requests(
        int(10 * rate * quiet[-1].arrival_s),
        10 * rate,
        Random(seed + 1),
        shape,
        tenant=FLOOD,
        first=num,
    )
    fairly = replace(config, policy=Policy.FAIR)
    made = {"fair_capacity": rate}
    for name, each, trace in (
        ("alone", config, quiet),
        ("fcfs", config, [*quiet, *flooding]),
        ("fair", fairly, [*quiet, *flooding]),
    ):
        results = run(each, trace, seed)
        of_quiet = [r for r in results if r.index < num and r.sent_s > WARM_UP_S]
        made[f"fair_ttft_p99_ms_{name}"] = percentile(ttft_ms(of_quiet), 99)
        made[f"fair_ttft_p50_ms_{name}"] = percentile(ttft_ms(of_quiet), 50)
        made[f"fair_all_tokens_per_s_{name}"] = tokens_per_s(results)
    made["fair_over_alone"] = made["fair_ttft_p99_ms_fair"] / made["fair_ttft_p99_ms_alone"]
    return made


def tokens_per_s(results: Sequence[RequestResult]) -> float:
    """Of prompts and answers together, until all have ended."""
    total = sum(each.num_prompt_tokens + each.num_output_tokens for each in results)
    return total / max(each.ended_s for each in results)


def goodput(num: int, seed: int) -> dict[str, float]:
    config = SchedulerConfig(max_num_batched_tokens=2048)
    shape = Shape((200, 500, 1000, 3000), (50, 350))
    rate = 1.2 * capacity(requests(num, 1.0, Random(seed), shape), config, seed)
    trace = requests(num, rate, Random(seed), shape)
    ttft_s, tpot_s = 1.0, 0.05
    targets = replace(config, ttft_target_s=ttft_s, itl_target_s=tpot_s)
    made = {"goodput_rate": rate}
    for name, each in (("fcfs", config), ("targets", targets)):
        results = run(each, trace, seed)
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
