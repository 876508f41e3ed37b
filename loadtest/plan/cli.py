"""`penstock plan`: its flags, and the order of a plan."""

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib import metadata
from typing import Any

import msgspec

from penstock.engine.config import Quantization
from penstock.loadtest.bench.config import check_writable, report_config, workload_config
from penstock.loadtest.bench.flags import add_groups
from penstock.loadtest.bench.forecast import UNTESTABLE
from penstock.loadtest.bench.results import show_text, write_file
from penstock.loadtest.calibrate.engine_flags import add_engine_flags
from penstock.loadtest.command_line import (
    FAILED,
    BenchParser,
    add_flags,
    exit_status,
    printer,
    require,
)
from penstock.loadtest.plan.candidates import (
    NO_QUANTIZATION,
    Candidates,
    make_candidates,
)
from penstock.loadtest.plan.choice import Choice, Sized, choose, front, sized
from penstock.loadtest.plan.document import CapacityPlan, as_csv, document, render_plan
from penstock.loadtest.plan.page import plan_page
from penstock.loadtest.plan.probe import Targets
from penstock.loadtest.plan.refutation import forecast_at, refutation
from penstock.loadtest.plan.search import Load, Searched, Task, search_all
from penstock.loadtest.simulate.outcome import effect_of_acceptance
from penstock.loadtest.simulate.server import ACCEPTANCE
from penstock.loadtest.simulate.simulation import Plan
from penstock.loadtest.workload.config import PromptFormat, WorkloadConfig
from penstock.scheduler.errors import InvalidConfig

_DESCRIPTION = """\
How many devices does a load take, with which flags, at what cost? The real
scheduler is simulated with each candidate, at rates that close in on the
highest one that meets the targets. The plan ends with the command that would
refute it.

  penstock plan configs/models/Llama-3.1-8B --device H200 --price-per-gpu-hour 3.5 \\
    --request-rate 60 --goodput ttft:2000 tpot:50 --report plan.html
  penstock plan --calibration here.json --goodput ttft:200 tpot:20 --max-num-seqs 16 64

Exit status: 0 for a plan that meets the targets, 1 where none does, 2 for wrong
flags, 3 for a plan whose error bars are so wide that nothing could refute it."""

_NOTABLE_UNCHECKED = 0.05
# A note on a plan from a datasheet; a calibration has the stages that were measured.
NO_STAGES = (
    "PP stays at 1: how long states take from the GPUs of a stage to those of the next is not in "
    "the step model, and a plan does not recommend what it cannot predict. More devices than a "
    "replica has are more replicas, behind a router of your own"
)

say = printer("penstock plan")


def make_parser() -> BenchParser:
    parser = BenchParser(prog="penstock plan", description=_DESCRIPTION)
    servers = parser.add_argument_group("the servers: one value each, or several to compare")
    add_flags(servers, _SERVERS, **_SETTINGS)
    add_engine_flags(parser, "model", "memory")
    add_flags(parser.add_argument_group("load and targets"), _LOAD, goodput={"required": True})
    add_groups(parser, "prompts")
    add_flags(parser.add_argument_group("search and results"), _RESULT)
    # Flags of a measured load that have no meaning here, and are read all the same.
    parser.set_defaults(
        num_prompts=1, max_concurrency=None, ramp_up_strategy=None, ramp_up_start_rps=None,
        ramp_up_end_rps=None, endpoint=None, backend=None, policy=None, batching=None,
        itl_target_ms=None, ttft_target_ms=None,
        percentile_metrics="ttft", metric_percentiles="99",
    )  # fmt: skip
    return parser


_SERVERS = {
    "model_dir MODEL_DIR": "a directory with config.json",
    "--calibration FILE": "of penstock calibrate, in place of it",
    "--device NAME ...": "as in configs/hardware.toml, such as H200",
    "--price-per-gpu-hour PRICE ...": "of each --device, in any currency",
    "--memory-gb GB": "default: of an H100 80, of an H200 141",
    "--quantization": "of weights, as penstock serve; none: as they are; default: none int8",
    "--tensor-parallel-size, -tp N ...": "GPUs of each replica, as penstock serve; default: 1, or "
    "where the model does not fit one, the fewest of 2, 4 and 8, and twice as many; or as "
    "calibrated",
    "--max-num-seqs N ...": "as penstock serve; default: 128 256 512, or the calibrated value",
    "--max-num-batched-tokens TOKENS ...": "as penstock serve; default: 1024 2048 8192, or the "
    "calibrated value",
    "--[no-]enable-prefix-caching": "as penstock serve",
    "--max-num-queued-reqs N = 1024": "as penstock serve",
    **ACCEPTANCE,
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "model_dir": {"nargs": "?"},
    "device": {"dest": "devices"},
    "quantization": {"nargs": "+", "choices": [NO_QUANTIZATION, *Quantization]},
    "tensor_parallel_size": {"dest": "sizes"},
    "max_num_seqs": {"dest": "seqs"},
    "max_num_batched_tokens": {"dest": "tokens"},
}
_LOAD = {
    "--request-rate R = inf": "requests per second to carry; inf is what one replica carries, or a "
    "trace's own rate",
    "--burstiness B = 1": "1 is a Poisson process, less comes in bursts, more comes evenly",
    "--goodput METRIC:MS ...": "the targets of the 99th percentile, such as ttft:2000 tpot:50",
}
_RESULT = {
    "--seconds S = 600": "simulated at each rate",
    "--precision R = 0.05": "to which the highest rate is found",
    "--check-seconds S = 60": "of the measurement that would refute the plan",
    "--jobs N": "processes; default: one for each core",
    "--tokenizer PATH": "counts the tokens of a file's texts; default: an estimate",
    "--output FILE = plan.json": "the plan, as JSON",
    "--csv FILE": "write every point as a row",
    "--report FILE": "write a self-contained HTML page",
    "--json": "print the plan as one line of JSON, not as text",
}


def main(argv: list[str]) -> int:
    """Returns the exit status: 0, or 1 where no candidate meets the targets, 2 for flags, 3 where
    no measurement could refute the plan."""
    return exit_status(lambda: _plan(argv), "penstock plan: error")


def _plan(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    workload, targets = _checked(args)
    candidates = make_candidates(args)
    longest = min(each.server.info.max_model_len for each in candidates.all)
    task = Task(
        workload=replace(workload, max_model_len=longest),
        seconds=args.seconds,
        tokenizer=args.tokenizer,
        targets=targets,
        precision=args.precision,
    )
    first_notes = [*candidates.notes, *candidates.left_out]
    load = task.load()
    for line in first_notes:
        say(line)
    if args.seed is None:
        say(f"seed {workload.seed}; --seed with it makes the same plan again")
    plan = _capacity_plan(parser, args, candidates, task, load)
    text = render_plan(plan)
    show_text(msgspec.json.encode(document(plan)).decode() if args.json else text)
    for line in plan.notes[len(first_notes) :]:
        say(line)
    _write(args, plan, text)
    if plan.choice is None or not plan.choice.meets_targets:
        return FAILED
    return 0 if plan.choice.forecast.is_testable else UNTESTABLE


def _capacity_plan(
    parser: BenchParser, args: argparse.Namespace, candidates: Candidates, task: Task, load: Load
) -> CapacityPlan:
    own_rate, rate = 1.0, None if math.isinf(args.request_rate) else args.request_rate
    if task.workload.follows_trace:
        rate = own_rate = load.own_rate()
    total = len(candidates.all)
    num_processes = min(args.jobs or os.cpu_count() or 1, total)
    processes = f"{num_processes} process{'es' * (num_processes > 1)}"
    say(f"{total} candidates, {task.seconds:g} s a probe, {processes}")
    searched = search_all(task, candidates.all, load, num_processes, _progress(total))
    ranked, choice, check = sized(searched, rate), None, None
    notes = [*candidates.notes, *candidates.left_out]
    if args.calibration is None:
        notes.append(NO_STAGES)
    if ranked:
        forecasts = partial(forecast_at, task=task, seconds=args.check_seconds, own_rate=own_rate)
        choice = choose(ranked[0], load, task.targets, rate, forecasts)
        check = refutation(parser, args, candidates.name, choice, task, own_rate)
        notes += _notes(args, ranked, choice)
        server, share = choice.sized.candidate.server, choice.point.rate / choice.sized.num_replicas
        if server.drafts is not None:
            requests = load.at(share, args.check_seconds)
            notes.append(effect_of_acceptance(Plan(server=server), requests))
    return CapacityPlan(
        name=candidates.name,
        date=f"{datetime.now():%Y%m%d-%H%M%S}",
        version=metadata.version("penstock"),
        rate=rate,
        targets=task.targets,
        searched=searched,
        ranked=ranked,
        choice=choice,
        front=front(searched),
        refutation=check,
        notes=notes,
    )


def _checked(args: argparse.Namespace) -> tuple[WorkloadConfig, Targets]:
    """Raises InvalidConfig."""
    if args.prompt_format == PromptFormat.TEXT:
        raise InvalidConfig("--prompt-format text says nothing here: prompts are simulated as ids")
    for flag, value in (("--seconds", args.seconds), ("--check-seconds", args.check_seconds)):
        require(0 < value < math.inf, flag, value, "more than 0")
    require(0.001 <= args.precision < 1, "--precision", args.precision, "in [0.001, 1)")
    if args.jobs is not None:
        require(args.jobs >= 1, "--jobs", args.jobs, "at least 1")
    for name, path in (("--output", args.output), ("--csv", args.csv), ("--report", args.report)):
        if path is not None:
            check_writable(name, path)
    limits_ms = report_config(args).goodput_ms
    assert limits_ms  # the flag is required
    return workload_config(args), Targets(limits_ms)


def _progress(total: int) -> Callable[[int, Searched], None]:
    start_s = time.monotonic()

    def progress(num_done: int, searched: Searched) -> None:
        elapsed_s = time.monotonic() - start_s
        found = (
            "meets the targets at no rate"
            if searched.limit is None
            else f"{searched.limit:.2f} requests/s"
        )
        left = f"; {elapsed_s / num_done * (total - num_done):.0f} s left" * (num_done < total)
        num_steps = sum(point.num_steps for point in searched.points)
        cpu_s = sum(point.cpu_s for point in searched.points)
        say(
            f"{num_done} of {total}: {searched.candidate}: {found}; {len(searched.points)} probes, "
            f"{cpu_s:.1f} s of CPU, {cpu_s / max(1, num_steps) * 1e6:.0f} us a step{left}"
        )

    return progress


def _notes(args: argparse.Namespace, ranked: list[Sized], choice: Choice) -> list[str]:
    """Sentences on how the choice came about, and how far it can be trusted."""
    notes, best = [], ranked[0]
    unchecked = choice.point.unchecked_step_ratio or 0.0
    if args.calibration is not None and unchecked > _NOTABLE_UNCHECKED:
        notes.append(
            f"{unchecked:.0%} of the steps are outside of what the calibration saw; calibrate "
            "with a load like this one"
        )
    if choice.sized.limit != best.limit:
        notes.append(
            f"the rate is {choice.sized.limit:.2f} requests/s: the forecast of the highest one of "
            f"the search, {best.limit:.2f}, misses the targets"
        )
    if choice.sized.num_replicas != best.num_replicas:
        notes.append(
            f"behind a router {choice.sized.num_replicas} replicas are needed, where the highest "
            f"rate of one says {best.num_replicas}"
        )
    if best.candidate.quantization and args.calibration is None:
        plain = next((each for each in ranked if each.candidate.quantization is None), None)
        notes.append(
            f"{best.candidate.quantization} weights change the answers; docs/quantized.md says "
            "by how much. With weights as they are: "
            + (f"{plain.num_devices} x {plain.candidate.device}" if plain else "no plan")
        )
    return notes


def _write(args: argparse.Namespace, plan: CapacityPlan, text: str) -> None:
    data = msgspec.json.format(msgspec.json.encode(document(plan))) + b"\n"
    files = [(args.output, data)]
    if args.csv is not None:
        files.append((args.csv, as_csv(plan).encode()))
    if args.report is not None:
        files.append((args.report, plan_page(plan, text).encode()))
    for path, content in files:
        write_file(path, content)
        say(f"written to {path}")
