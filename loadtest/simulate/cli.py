"""`penstock simulate`: its flags, and the order of a simulation."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

from penstock.engine.process.garbage import uncollected
from penstock.loadtest.bench.config import BenchConfig, measured_config
from penstock.loadtest.bench.flags import add_groups
from penstock.loadtest.bench.http_target import TargetConfig
from penstock.loadtest.bench.results import settings_of, show, write
from penstock.loadtest.calibrate.engine_flags import add_engine_flags
from penstock.loadtest.command_line import BenchParser, add_flags, exit_status, printer, require
from penstock.loadtest.report.figures import Measurement
from penstock.loadtest.report.report import Summary, details, render
from penstock.loadtest.simulate.outcome import (
    effect_of_acceptance,
    error_bars,
    figures_over_time,
    render_outcome,
    summary_of,
)
from penstock.loadtest.simulate.server import ACCEPTANCE, NamedServer, simulated_server
from penstock.loadtest.simulate.simulation import (
    Plan,
    Simulated,
    as_ids,
    simulate,
    step_factors,
)
from penstock.loadtest.workload.config import PromptFormat
from penstock.loadtest.workload.token_counter import estimate_tokens
from penstock.loadtest.workload.workload import make_workload
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.routing import RouterPolicy

_DESCRIPTION = """\
A load on servers that need not exist: the real scheduler on a virtual clock, with the flags, the
layout and the JSON keys of penstock bench.

  penstock simulate --calibration here.json --request-rate 8 --num-prompts 500
  penstock simulate configs/models/Llama-3.1-8B --device H200 --replicas 4 --router prefix-aware \\
    --dataset-name mooncake --dataset-path trace.jsonl --report out.html"""
_PROGRESS_S = 5.0
say = printer("penstock simulate")
_SERVERS = {
    "model_dir MODEL_DIR": "a directory with config.json",
    "--calibration FILE": "of penstock calibrate, in place of it",
    "--device NAME": "as in configs/hardware.toml, such as H200",
    "--memory-gb GB": "default: of an H100 80, of an H200 141",
    "--tensor-parallel-size, -tp N": "as penstock serve: GPUs of each replica; default: 1, or as "
    "calibrated",
    **ACCEPTANCE,
    "--replicas N = 1": "servers behind one router",
    "--router": "which replica gets a request",
    "--max-num-queued-reqs N = 1024": "as penstock serve, of each replica: further answers get "
    "status 429",
    "--[no-]spread": "draw step times with the spread that calibration saw",
    "--[no-]error-bars": "simulate twice more, with all steps as much shorter and longer as the "
    "step model may be off",
    "--tokenizer PATH": "counts the tokens of a file's texts; default: an estimate",
}


def make_parser() -> BenchParser:
    parser = BenchParser(prog="penstock simulate", description=_DESCRIPTION)
    add_flags(
        parser.add_argument_group("the servers"),
        _SERVERS,
        model_dir={"nargs": "?"},
        router={"choices": [*RouterPolicy], "default": RouterPolicy.LEAST_LOADED},
        spread={"default": True},
        error_bars={"default": True},
    )
    add_engine_flags(parser, "model", "memory", "scheduling")
    add_groups(parser, "load", "prompts", "results")
    # A server that exists is asked for these, and the settings of a result name them too.
    parser.set_defaults(endpoint=None, backend=None, model=None, sweep=False)
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 if all requests completed, 1 if one was refused, 2 for flags."""

    def simulate_flags() -> int:
        args = make_parser().parse_args(argv)
        config = _config(args)
        with uncollected():  # of torch too, which a model's directory has imported
            return _simulate(config, simulated_server(args))

    return exit_status(simulate_flags, "penstock simulate: error")


def _config(args: argparse.Namespace) -> BenchConfig:
    if args.prompt_format == PromptFormat.TEXT:
        raise InvalidConfig("--prompt-format text says nothing here: prompts are simulated as ids")
    require(args.replicas >= 1, "--replicas", args.replicas, "at least 1")
    return measured_config(args)


def _simulate(config: BenchConfig, named: NamedServer) -> int:
    args, server = config.args, named.server
    limited = replace(config.workload, max_model_len=server.info.max_model_len)
    workload = make_workload(limited, config.count or estimate_tokens)
    requests = as_ids(workload.requests, limited)
    plan = Plan(
        server=server,
        num_replicas=args.replicas,
        router=RouterPolicy(args.router),
        max_concurrency=args.max_concurrency,
        seed=limited.seed if args.spread else None,
    )
    notes = [named.note]
    if workload.num_too_long:
        notes.append(f"{workload.num_too_long} requests are too long for the model, and left out")
    if args.seed is None:
        say(f"seed {limited.seed}; --seed with it simulates the same requests again")
    progress = _progress(len(requests), is_shown=not args.disable_tqdm)
    simulated = simulate(plan, requests, on_progress=progress)
    summary = _settings(config, named, plan, simulated)
    summary["num_too_long"] = workload.num_too_long
    if args.error_bars:
        bounds = [simulate(plan, requests, factors=step_factors(server, sign)) for sign in (-1, 1)]
        others = [summary_of(plan, each, config.report) for each in bounds]
        summary["error_bars"] = error_bars(summary, others)
        if server.drafts is not None:
            notes.append(effect_of_acceptance(plan, requests))
    if args.calibration is not None and (unchecked := summary["unchecked_step_ratio"]):
        notes.append(
            f"{unchecked:.0%} of the steps are outside of what the calibration saw; calibrate with "
            "a load like this one"
        )
    for line in notes:
        say(line)
    # The last line of the layout ends it; the outcome has its own.
    text = render(summary, config.report).removesuffix("=" * 50) + render_outcome(summary)
    show(args, summary, text)
    document = summary | details(simulated.observed) if args.save_detailed else summary
    run = Measurement(summary=summary, observed=simulated.observed)
    more = figures_over_time(plan, simulated)
    write(args, document, run, [], text, notes, more=more, say=say)
    return 1 if summary["failed"] else 0


def _settings(config: BenchConfig, named: NamedServer, plan: Plan, simulated: Simulated) -> Summary:
    settings = settings_of(config, TargetConfig(base_url="", model=named.name, ignore_eos=True))
    return (
        settings
        | {"backend": "simulated", "endpoint_type": "simulated", "device": plan.server.info.device}
        | {"num_prompts": len(simulated.observed.results)}
        | summary_of(plan, simulated, config.report)
    )


def _progress(total: int, *, is_shown: bool) -> Callable[[int, int], None]:
    shown_s = time.monotonic()

    def progress(num_done: int, num_steps: int) -> None:
        nonlocal shown_s
        if is_shown and time.monotonic() - shown_s >= _PROGRESS_S:
            shown_s = time.monotonic()
            say(f"{num_done} of {total} requests, {num_steps} steps")

    return progress
