"""`python -m tests.bench.prefill_apart`: would devices that only prefill, and others that only
decode, carry more than devices that do both?

In virtual time, on the scheduler and the loop that serve, and on steps by the datasheet of
--device. A prompt is computed on a device for prefill, which sends the first token; its keys and
values cross the link, and a device for decode goes on with them. For the devices that do both there
are the flags that Penstock has against long prompts, smaller steps and `--itl-target-ms`, and the
best of them counts; for those apart, the best ratio of up to eight devices. What counts is the
highest rate, a device, at which the 99th percentiles of TTFT and TPOT meet the targets. The second
token has the target of TTFT too, from the first one on: else a queue for devices that decode would
hide in the TPOT of a long answer. The table is Markdown.

What is in favour of devices apart: the link is never shared, memory that waits for a transfer costs
nothing, and the ratio fits the load at all times.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from penstock.engine.config import Dtype, KVCacheDtype
from penstock.loadtest.plan.probe import Targets
from penstock.loadtest.plan.search import Load, find_limit
from penstock.loadtest.report.report import Replay
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.server import planned_server
from penstock.loadtest.simulate.simulation import Plan, TargetJudge, simulate
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.step_model.amounts import Amounts
from penstock.scheduler.step_model.model import StepModel, StepTime
from tests.support.paths import MODEL_CONFIGS

# Mean tokens of prompts and answers.
LOADS = {"chat": (1000, 250), "documents": (8000, 250), "reasoning": (500, 2000)}
TARGETS_MS = ((2000.0, 50.0), (500.0, 20.0), (300.0, 10.0))  # of TTFT and TPOT
# Bytes a second, of one device: NVLink 4, and host memory by PCIe 5 and back.
LINKS = {"450 GB/s": 450e9, "25 GB/s": 25e9}
MOST_DEVICES = 8
_STEP_TOKENS = (1024, 2048, 8192)
_PRECISION = 0.04
_UNLIMITED = 1 << 20  # tokens of a step that computes no prompts


class Carried(NamedTuple):
    """rate: requests a second of one device. how: the flags, or the ratio."""

    rate: float
    how: str


class Tried(NamedTuple):
    rate: float
    is_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptsGiven(StepModel):
    """Of a device that gets its prompts' keys and values: a chunk costs what one token does."""

    def time_of(self, amounts: Amounts) -> StepTime:
        given = amounts.prefill_tokens - amounts.chunks
        return super(_PromptsGiven, self).time_of(
            amounts._replace(
                tokens=amounts.tokens - given,
                prefill_kv_bytes=0,
                attention_flops=0,
                chunks=0,
                prefill_tokens=0,
            )
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--model", type=Path, default=MODEL_CONFIGS / "Llama-3.1-8B")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each probe, simulated")
    args = parser.parse_args(argv)
    print("| load | TTFT, TPOT, ms | both on each device | apart |", flush=True)
    print("|---|---|---:|" + "---|" * len(LINKS))
    for name, (ttft_ms, tpot_ms) in product(args.loads, TARGETS_MS):
        targets = Targets({"ttft": ttft_ms, "tpot": tpot_ms})
        num_prompt, num_output = LOADS[name]
        config = WorkloadConfig(input_len=num_prompt, output_len=num_output, range_ratio=0.5)
        load = Load(config, args.seconds)
        together = best_together(args, load, targets, tpot_ms)
        cells = [name, f"{ttft_ms:g}, {tpot_ms:g}", _shown(together)]
        for link in LINKS:
            apart = best_apart(args, load, targets, LINKS[link])
            times = f"{apart.rate / together.rate:.2f} times" if together.rate else "-"
            cells.append(f"{link}: {_shown(apart)}, {times}")
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


def best_together(
    args: argparse.Namespace, load: Load, targets: Targets, tpot_ms: float
) -> Carried:
    """Replicas share nothing but the load, so one of them tells what each carries."""
    best = Carried(0.0, "none")
    for tokens, itl_ms in product(_STEP_TOKENS, (None, tpot_ms)):
        config = SchedulerConfig(
            max_num_batched_tokens=tokens, itl_target_s=None if itl_ms is None else itl_ms / 1e3
        )
        server = _server(args, config)
        how = f"{tokens} tokens a step" + (f", ITL {itl_ms:g}" if itl_ms else "")

        def measure(rate: float, server: SimulatedServer = server) -> Tried:
            requests = load.at(rate)
            judge = TargetJudge(targets.limits_ms, len(requests))
            observed = simulate(Plan(server=server), requests, judge=judge).observed
            return Tried(rate, targets.are_met(observed))

        best = max(best, Carried(_limit(measure), how), key=lambda each: each.rate)
    return best


def best_apart(
    args: argparse.Namespace, load: Load, targets: Targets, bytes_per_s: float
) -> Carried:
    """Of up to MOST_DEVICES, what the fewer of both kinds carry."""
    prefill = _server(args, SchedulerConfig(max_num_batched_tokens=8192))
    decode = _server(args, SchedulerConfig(max_num_batched_tokens=_UNLIMITED))
    model = decode.step_model
    given = _PromptsGiven(**{name: getattr(model, name) for name in StepModel.__slots__})
    decode = decode._replace(step_model=given)
    ttft, tpot = (Targets({name: targets.limits_ms[name]}) for name in ("ttft", "tpot"))

    def prefills(rate: float) -> Tried:
        requests = [replace(request, max_tokens=1) for request in load.at(rate)]
        judge = TargetJudge(ttft.limits_ms, len(requests))
        observed = simulate(Plan(server=prefill), requests, judge=judge).observed
        return Tried(rate, ttft.are_met(observed))

    def decodes(rate: float) -> Tried:
        since_first, whole = decoded(decode, load.at(rate), bytes_per_s)
        return Tried(rate, ttft.are_met(since_first) and tpot.are_met(whole))

    most_prefills, most_decodes = _limit(prefills), _limit(decodes)
    best = Carried(0.0, "none")
    for p, d in product(range(1, MOST_DEVICES), repeat=2):
        if p + d <= MOST_DEVICES:
            rate = min(p * most_prefills, d * most_decodes) / (p + d)
            best = max(best, Carried(rate, f"{p} for {d}"), key=lambda each: each.rate)
    return best


def decoded(
    server: SimulatedServer, requests: list[TimedRequest], bytes_per_s: float
) -> tuple[Replay, Replay]:
    """Answers whose first token was sent when the request arrives here: from their transfer on, and
    with that token."""
    token_bytes = sum(group.kv_bytes_per_token for group in server.info.attention)
    handed = []
    for request in requests:
        if request.max_tokens > 1:
            assert isinstance(request.prompt, list)
            transfer_s = len(request.prompt) * token_bytes / bytes_per_s
            handed.append(
                replace(
                    request,
                    arrival_s=request.arrival_s + transfer_s,
                    prompt=[*request.prompt, 0],
                    max_tokens=request.max_tokens - 1,
                )
            )
    handed.sort(key=lambda request: request.arrival_s)
    sent_s = {request.index: request.arrival_s for request in requests}
    observed = simulate(Plan(server=server), handed).observed
    results = [
        replace(
            result,
            arrivals_s=[sent_s[result.index], *result.arrivals_s],
            num_output_tokens=1 + result.num_output_tokens,
        )
        for result in observed.results
    ]
    return observed, replace(observed, results=results)


def _limit(measure: Callable[[float], Tried]) -> float:
    met, _ = find_limit(lambda rate: measure(rate).is_met, 4.0, _PRECISION)
    return met or 0.0


def _server(args: argparse.Namespace, scheduler: SchedulerConfig) -> SimulatedServer:
    options = argparse.Namespace(
        model_dir=args.model,
        memory_gb=None,
        dtype=Dtype.AUTO,
        kv_cache_dtype=KVCacheDtype.AUTO,
        max_model_len=32768,
        block_size=None,
        kv_cache_memory_bytes=None,
        max_num_queued_reqs=_UNLIMITED,
    )
    return planned_server(options, args.device, None, scheduler).server


def _shown(carried: Carried) -> str:
    return f"{carried.rate:.2f}/s ({carried.how})" if carried.rate else "no rate"


if __name__ == "__main__":
    sys.exit(main())
