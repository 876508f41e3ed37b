"""`penstock bench` measures any OpenAI-compatible server. Flags are those of `vllm bench serve`."""

import argparse
import math
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from loadtest.config import ReportConfig, TargetConfig, WorkloadConfig
from loadtest.figures import Run, figures
from loadtest.flags import endpoint, make_parser, report_config, sweep_config, workload_config
from loadtest.html_report import html_report
from loadtest.http_target import (
    HttpTarget,
    TargetUnusable,
    raise_open_file_limit,
    replay,
    run,
    wait_until_ready,
    warm_up,
)
from loadtest.plots import check_matplotlib, save_plots
from loadtest.progress import Progress
from loadtest.report import Replay, Summary, complaints, details, render, summarize
from loadtest.sweep import SweepConfig, sweep, sweep_summary, sweep_table
from loadtest.workload import TimedRequest, make_requests
from scheduler.errors import InvalidConfig, PenstockError

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What the flags say. sweep: None to measure one workload."""

    args: argparse.Namespace
    workload: WorkloadConfig
    report: ReportConfig
    sweep: SweepConfig | None


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 if a request succeeded, 1 if none did, 2 for wrong flags.

    With --sweep, 0 if a rate met the SLO.
    """
    parser = make_parser()
    try:
        config = _config(parser.parse_args(argv))
        requests = make_requests(config.workload)  # a bad file is told before a server is sought
    except InvalidConfig as error:
        _say(str(error))
        return 2
    except SystemExit as ended:  # argparse has said what was wrong, or given the help
        return int(ended.code or 0)
    try:
        return run(_bench(config, requests))
    except PenstockError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted before anything was measured")
        return INTERRUPTED


def _config(args: argparse.Namespace) -> BenchConfig:
    workload, report = workload_config(args), report_config(args)
    sweep = sweep_config(args, workload, report)
    if args.plot_dir is not None:
        check_matplotlib()
    return BenchConfig(args=args, workload=workload, report=report, sweep=sweep)


async def _bench(config: BenchConfig, requests: list[TimedRequest]) -> int:
    args = config.args
    target_config = await _target_config(args)
    raise_open_file_limit()
    async with HttpTarget(target_config) as target:
        await warm_up(target, config.workload, args.num_warmups, args.max_concurrency)
        settings = _settings(config, target_config)
        if config.sweep is not None:
            return await _sweep(config, config.sweep, target, settings)
        if len(requests) < args.num_prompts:
            _say(f"the file has {len(requests)} requests, and --num-prompts is {args.num_prompts}")
            settings["num_prompts"] = len(requests)
        observed = await replay(
            target, requests, max_concurrency=args.max_concurrency, progress=Progress(len(requests))
        )
    return _report(config, requests, observed, settings)


def _report(
    config: BenchConfig, requests: list[TimedRequest], observed: Replay, settings: Summary
) -> int:
    if observed.is_interrupted:
        _say(f"interrupted: {len(observed.results)} of {len(requests)} requests had ended")
    has_due_times = config.args.max_concurrency is None and requests[-1].arrival_s > 0
    for line in complaints(observed, has_due_times=has_due_times):
        _say(line)
    summary = settings | summarize(observed, config.report)
    document = summary | details(observed) if config.args.save_detailed else summary
    text = render(summary, config.report)
    _write(config.args, document, Run(summary=summary, observed=observed), [], text)
    if not config.args.json:
        print(text)
    print(msgspec.json.encode(summary).decode(), flush=True)
    if observed.is_interrupted:
        return INTERRUPTED
    return 0 if summary["completed"] else 1


async def _sweep(
    config: BenchConfig, sweep_settings: SweepConfig, target: HttpTarget, settings: Summary
) -> int:
    """The figures of single requests in its report are those of the best rate that met the SLO."""
    result = await sweep(
        target,
        config.workload,
        sweep_settings,
        config.report,
        max_concurrency=config.args.max_concurrency,
        say=_say,
    )
    settings |= {"num_prompts": None, "request_rate": None}
    summary = settings | sweep_summary(result, sweep_settings)
    text = sweep_table(result)
    if result.rates:
        shown = [rate for rate in result.rates if rate.rate == result.met] or result.rates
        best = Run(summary=settings | shown[-1].summary, observed=shown[-1].observed)
        rates = [Run(summary=rate.summary, observed=rate.observed) for rate in result.rates]
        _write(config.args, summary, best, rates, text)
    if not config.args.json:
        print(text)
    print(msgspec.json.encode(summary).decode(), flush=True)
    if result.is_interrupted:
        return INTERRUPTED
    return 0 if result.met is not None else 1


def _write(
    args: argparse.Namespace, document: Summary, shown: Run, rates: list[Run], text: str
) -> None:
    """What was asked for as files. rates: a sweep's, in the order in which they were asked."""
    if args.save_result:
        _say(f"saved as {_save(args, document)}")
    drawn = figures(shown, rates) if args.report or args.plot_dir else []
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(html_report(shown.summary, drawn, text), encoding="utf-8")
        _say(f"report written to {args.report}")
    if args.plot_dir:
        for path in save_plots(drawn, args.plot_dir):
            _say(f"plot written to {path}")


async def _target_config(args: argparse.Namespace) -> TargetConfig:
    """Waits for the server, which may be asked for its model."""
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    api_key = os.environ.get("OPENAI_API_KEY")
    models = await wait_until_ready(
        base_url, api_key=api_key, timeout_s=args.ready_timeout, say=_say
    )
    if not (args.model or models):
        raise TargetUnusable(f"{base_url} lists no model; name one with --model")
    return TargetConfig(
        base_url=base_url,
        model=args.model or models[0],
        endpoint=endpoint(args),
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        extra_body=args.extra_body,
        api_key=api_key,
        request_timeout_s=args.request_timeout,
    )


def _settings(config: BenchConfig, target: TargetConfig) -> Summary:
    """What was asked, under vLLM's keys, so that a result can be repeated from its file."""
    workload, args = config.workload, config.args
    backend = "openai-chat" if target.endpoint.endswith("/chat/completions") else "openai"
    settings: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "endpoint_type": backend,
        "model_id": target.model,
        "tokenizer_id": None,
        "num_prompts": workload.num_prompts,
        "request_rate": _number(workload.request_rate),
        "burstiness": workload.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": workload.seed,
        "dataset_name": workload.dataset,
    }
    if workload.ramp is not None:
        settings |= {
            "ramp_up_strategy": workload.ramp.strategy,
            "ramp_up_start_rps": workload.ramp.start_rps,
            "ramp_up_end_rps": workload.ramp.end_rps,
        }
    if workload.dataset.is_file:
        settings |= {
            "dataset_path": str(workload.dataset_path),
            "trace_speedup": _number(workload.trace_speedup),
        }
    return settings | {
        "random_input_len": workload.input_len,
        "random_output_len": workload.output_len,
        "random_range_ratio": workload.range_ratio,
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
        "goodput": config.report.goodput_ms,
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(value) else value


def _save(args: argparse.Namespace, document: Summary) -> Path:
    model = str(document["model_id"]).rpartition("/")[2]
    rate = "sweep-" if args.sweep else f"{document['request_rate']}qps-"
    name = f"{document['backend']}-{rate}{model}-{document['date']}.json"
    path = Path(args.result_dir, args.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(document))
    return path


def _say(text: str) -> None:
    print(f"penstock bench: {text}", file=sys.stderr, flush=True)
