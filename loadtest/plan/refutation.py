"""The forecast of one server with its share of the load, and the commands that would refute it."""

import argparse
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.loadtest.bench.forecast import (
    FIGURES,
    REPORT,
    Forecast,
    ForecastFigure,
    load_of,
)
from penstock.loadtest.command_line import BenchParser
from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.choice import Choice
from penstock.loadtest.plan.probe import Targets
from penstock.loadtest.plan.search import MIN_REQUESTS, Task
from penstock.loadtest.report.report import Summary, summarize
from penstock.loadtest.simulate.simulation import Plan, as_ids, simulate, step_factors
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.token_counter import tokenizer_counter
from penstock.loadtest.workload.workload import make_requests

# Draws of the spread of step times: a measurement is one draw of many.
_NUM_DRAWS = 4
DEMO_NAMES = ("penstock-demo", "demo_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refutation:
    """The commands of the measurement that must find what the plan's forecast says."""

    serve: str
    bench: str


def refutation(
    parser: BenchParser,
    args: argparse.Namespace,
    name: str,
    choice: Choice,
    task: Task,
    own_rate: float,
) -> Refutation:
    """name: the model's. own_rate: the mean rate of a trace's own arrivals."""
    share = choice.point.rate / choice.sized.num_replicas
    config = _check_config(task.workload, share, args.check_seconds, own_rate)
    return Refutation(
        serve=serve_command(choice.sized.candidate, args, name),
        bench=_bench_command(parser, args, config, task.targets),
    )


def _check_config(
    config: WorkloadConfig, rate: float, seconds: float, own_rate: float
) -> WorkloadConfig:
    """The load of one server at that mean rate."""
    config = replace(config, max_model_len=None)
    num = max(MIN_REQUESTS, math.ceil(rate * seconds))
    if config.follows_trace:
        speedup = float(f"{rate / own_rate * config.trace_speedup:.4g}")
        return replace(config, num_prompts=num, trace_speedup=speedup)
    return replace(config, num_prompts=num, request_rate=float(f"{rate:.4g}"))


def forecast_at(
    candidate: Candidate, rate: float, *, task: Task, seconds: float, own_rate: float
) -> Forecast:
    """Forecasts a measurement of so many seconds of one server at that rate.

    The bar of a figure is from the least to the most of simulations in which all steps are as much
    shorter or longer as the step model may be off, each with several draws of the spread of step
    times; and what the front end and the client may add: the shares of FIGURES.
    """
    server, config = candidate.server, _check_config(task.workload, rate, seconds, own_rate)
    limited = replace(config, max_model_len=server.info.max_model_len)
    requests = as_ids(make_requests(limited, tokenizer_counter(task.tokenizer)), limited)
    runs: list[Summary] = []
    for sign in (0, -1, 1):
        factors = step_factors(server, sign)
        for seed in range(_NUM_DRAWS):
            plan = Plan(server=server, seed=seed)
            runs.append(summarize(simulate(plan, requests, factors=factors).observed, REPORT))
    targets_ms = task.targets.limits_ms
    figures = list(_figures(runs, has_e2el="e2el" in targets_ms))
    return Forecast(load=load_of(config), targets_ms=targets_ms, figures=figures)


def _figures(runs: Sequence[Summary], *, has_e2el: bool) -> Iterable[ForecastFigure]:
    for figure, key, share in FIGURES:
        if key == "p99_e2el_ms" and not has_e2el:
            continue
        values = [run[key] for run in runs if run[key] is not None]
        if values:
            low, high = min(values) * (1 - share), max(values) * (1 + share)
            middle = sum(values[:_NUM_DRAWS]) / _NUM_DRAWS
            yield ForecastFigure(figure=figure, key=key, value=middle, low=low, high=high)


def serve_command(candidate: Candidate, args: argparse.Namespace, name: str) -> str:
    """Starts the server that is planned. The other flags of a calibrated one are not known here."""
    config = candidate.server.scheduler
    words = ["penstock", "serve"]
    if args.calibration is None:
        words += [str(args.model_dir)]
        if not any(args.model_dir.glob("*.safetensors")):
            words += ["--load-format", "dummy"]  # random weights take the same time
    elif name not in DEMO_NAMES:
        words += [name]
    words += [
        *("--max-num-seqs", str(config.max_num_seqs)),
        *("--max-num-batched-tokens", str(config.max_step_tokens)),
    ]
    ranks = ("--tensor-parallel-size", "--pipeline-parallel-size")
    for flag, size in zip(ranks, candidate.ranks, strict=True):
        if size > 1:
            words += [flag, str(size)]
    if args.calibration is None and candidate.quantization:
        words += ["--quantization", candidate.quantization]
    if not config.enable_prefix_caching:
        words.append("--no-enable-prefix-caching")
    for flag in ("dtype", "kv_cache_dtype", "max_model_len", "block_size", "kv_cache_memory_bytes"):
        value = getattr(args, flag)
        if value not in (None, "auto"):
            words += [f"--{flag.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _bench_command(
    parser: BenchParser, args: argparse.Namespace, config: WorkloadConfig, targets: Targets
) -> str:
    words = ["penstock", "bench", "--num-prompts", str(config.num_prompts)]
    if config.follows_trace:
        words += ["--trace-speedup", f"{config.trace_speedup:g}"]
    else:
        words += ["--request-rate", f"{config.request_rate:g}"]
    if config.burstiness != 1.0:
        words += ["--burstiness", f"{config.burstiness:g}"]
    words += ["--seed", str(config.seed)]
    words += _given(parser, args, without=("seed", "trace_speedup"))
    if args.tokenizer is not None:
        words += ["--tokenizer", str(args.tokenizer)]
    if config.dataset.has_texts:
        words.append("--ignore-eos")  # answers are planned at the file's lengths
    limits = [f"{metric}:{limit:g}" for metric, limit in targets.limits_ms.items()]
    return shlex.join([*words, "--goodput", *limits, "--check", str(args.output)])


def _given(parser: BenchParser, args: argparse.Namespace, without: Iterable[str]) -> list[str]:
    """The flags of prompts that were typed, as they are typed."""
    words: list[str] = []
    # Private, but argparse has no other way to tell which flag is in which group.
    (group,) = (each for each in parser._action_groups if each.title == "prompts")
    for action in group._group_actions:
        value = getattr(args, action.dest)
        if action.dest in without or value == action.default or value is None:
            continue
        words.append(action.option_strings[0])
        if action.nargs != 0:
            words.append(_typed(value))
    return words


def _typed(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    inputs, outputs = value
    if inputs == outputs:
        return f"{inputs:g}"
    return f'{{"input": {inputs:g}, "output": {outputs:g}}}'
