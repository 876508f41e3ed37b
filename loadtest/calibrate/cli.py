"""`penstock calibrate`: its flags, and the order of a calibration."""

import argparse
import asyncio
import os
from dataclasses import replace
from datetime import datetime
from importlib import metadata
from pathlib import Path

from penstock.engine.config import LoadFormat
from penstock.loadtest.bench.config import check_writable
from penstock.loadtest.bench.forecast import UNTESTABLE
from penstock.loadtest.calibrate.calibration import (
    PROBE_TOKENS,
    Calibration,
    Measured,
    ServerSteps,
    cached_share,
    measure_front_end,
    read_metrics,
    read_steps,
)
from penstock.loadtest.calibrate.drafts import drafts_of
from penstock.loadtest.calibrate.engine_flags import add_engine_flags, engine_config
from penstock.loadtest.calibrate.sweep import run_sweep
from penstock.loadtest.command_line import BenchParser, add_flags, exit_status, printer, require
from penstock.loadtest.report.report import NOTABLE_CACHED_SHARE
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.stats import expected_work
from penstock.scheduler.step_model.amounts import DEVICE_UNITS, HOST_UNITS
from penstock.scheduler.step_model.fit import fit

_DESCRIPTION = """\
Fit a model of step times, and write it to a file for penstock simulate.

  penstock calibrate --base-url http://127.0.0.1:8000     from the steps of a server that had load
  penstock calibrate MODEL_DIR --seconds 60               from a sweep in this process

Exit status: 0, 1 where the server had too little load, 2 for wrong flags, 3 where
the steps are predicted so badly that no plan made with the file could be refuted."""


_POOR = (
    "This calibration tests nothing: most steps are of classes with a bias of more than 60 %, so\n"
    "that a server twice as fast as a forecast and one half as fast are within its error bars.\n"
    "Calibrate again with more load, and with nothing else running."
)
say = printer("penstock calibrate")

_FLAGS = {
    "model MODEL": "as of penstock serve; default: the demo model",
    "--base-url URL": "a running server, in place of a model",
    "--seconds S = 60": "of the sweep in this process",
    "--output FILE = calibration.json": "the file to write",
}


def make_parser() -> BenchParser:
    parser = BenchParser(prog="penstock calibrate", description=_DESCRIPTION)
    add_flags(parser, _FLAGS, model={"nargs": "?"})
    add_engine_flags(parser, "loading", "model", "memory", "scheduling")
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status: 0, or 1 where the server had too little load, 2 for flags, or 3
    for a calibration that is poor."""
    return exit_status(lambda: _calibrate(argv), "penstock calibrate: error")


def _calibrate(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    check_writable("--output", args.output)
    require(args.seconds > 0, "--seconds", args.seconds, "more than 0")
    if args.base_url is not None:
        if args.model is not None:
            raise InvalidConfig("give either MODEL or --base-url, not both")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        calibration = asyncio.run(calibrate_server(args.base_url, headers))
    else:
        calibration = _from_sweep(args)
    calibration.write(args.output)
    print(describe(calibration))
    say(f"written to {args.output}")
    return UNTESTABLE if calibration.is_poor else 0


async def calibrate_server(base_url: str, headers: dict[str, str]) -> Calibration:
    """From the steps that a running server keeps. Raises TargetUnusable and TooFewSteps."""
    metrics = await read_metrics(base_url, headers)  # before what is measured here
    if (cached := cached_share(metrics)) > NOTABLE_CACHED_SHARE:
        say(
            f"{cached:.0%} of the prompt tokens since the server's start were in its prefix cache, "
            "so the steps are of prompts that it had seen; unless your load shares prompts, start "
            "the server anew, and load it by penstock bench without --seed, which sends new ones"
        )
    measured = await measure_front_end(base_url, headers, say)
    made = calibration_of(base_url, measured, await read_steps(base_url, headers))
    return replace(made, drafts=drafts_of(metrics))


def calibration_of(base_url: str, measured: Measured, read: ServerSteps) -> Calibration:
    """Raises TooFewSteps."""
    model = fit(read.steps, runs_ahead=read.model.runs_ahead)
    probe = expected_work(read.model.windows, chunk=PROBE_TOKENS)
    engine_s = sum(model.time_of(read.model.amounts(probe)))
    delay_s = max(0.0, measured.ttft_s - engine_s - measured.costs.idle_s)
    return Calibration(
        name=measured.name,
        source=f"{len(read.steps)} steps of {base_url}",
        date=f"{datetime.now():%Y%m%d-%H%M%S}",
        version=read.version,
        model=read.model,
        scheduler=read.scheduler,
        step_model=model,
        front_end=measured.costs._replace(delay_s=delay_s),
    )


def _from_sweep(args: argparse.Namespace) -> Calibration:
    # Not at the top: `--help` and the completion of a shell should not wait for them.
    from penstock.engine.hub.hub import open_model
    from penstock.engine.loading.executor import build_executor
    from penstock.engine.process.phases import Phases

    config = engine_config(args)
    needs_weights = config.load_format is LoadFormat.AUTO
    files = open_model(config.model, needs_weights=needs_weights, impl=config.model_impl)
    if files.download:
        say(files.download.what)
        files.download.run()
    executor = build_executor(replace(config, model=str(files.directory)), Phases())
    samples = run_sweep(
        executor,
        config.scheduler,
        seconds=args.seconds,
        on_level=lambda number, total: say(f"load {number + 1} of {total}"),
    )
    return Calibration(
        name=Path(config.model).name,
        source=f"{len(samples)} steps of a sweep, without a server and what that costs",
        date=f"{datetime.now():%Y%m%d-%H%M%S}",
        version=metadata.version("penstock"),
        model=executor.info,
        scheduler=config.scheduler,
        step_model=fit(samples, runs_ahead=executor.info.runs_ahead),
    )


def describe(calibration: Calibration) -> str:
    """Says what a person should know of it: the coefficients, and where they hold."""
    info, model = calibration.model, calibration.step_model
    lines = [_POOR, ""] if calibration.is_poor else []
    lines += [
        f"{calibration.name}, {info.dtype}, on {info.device}; {calibration.source}",
        "",
        *(
            f"front end, a {name}: {_short(seconds)}"
            for name, seconds in zip(
                ("request", "step's report", "token", "request, besides"),
                calibration.front_end,
                strict=True,
            )
        ),
        *([f"drafts: {calibration.drafts}"] if calibration.drafts else []),
        "",
    ]
    for title, units, seconds in (
        ("device", DEVICE_UNITS, model.device),
        ("host", HOST_UNITS, model.host),
    ):
        lines += [
            f"{title}, a {unit.replace('_', ' ')}: {_short(value)}"
            for unit, value in zip(units, seconds, strict=True)
            if value
        ]
    lines += ["", f"{'class':<10}{'steps':>7}{'error':>8}{'bias':>8}{'p50':>8}{'p99':>8}  tokens"]
    for kind, error in model.errors.items():
        tokens = model.covered[kind]["tokens"]
        lines.append(
            f"{kind:<10}{error.num_steps:>7}{error.mape:>8.1%}{error.bias:>8.1%}"
            f"{error.ratio_at(0.5):>8.3f}{error.ratio_at(0.99):>8.3f}"
            f"  {tokens.low:,.0f} to {tokens.high:,.0f}"
        )
    return "\n".join(lines)


def _short(seconds: float) -> str:
    for unit, factor in (("ms", 1e3), ("us", 1e6), ("ns", 1e9), ("ps", 1e12)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e15:.3g} fs"
