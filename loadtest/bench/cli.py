"""`penstock bench` measures any OpenAI-compatible server, with the flags of `vllm bench serve`.

Owns the order of a run, and writes what was requested: text, JSON, an HTML report and plots.
"""

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.bench.config import (
    BenchConfig,
    bench_config,
    endpoint,
    extra_body,
    ignores_eos,
    parse_pairs,
)
from penstock.loadtest.bench.flags import MAX_SERVER_COUNTS, make_parser, refuse_unsupported
from penstock.loadtest.bench.http1 import HttpFailed
from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.progress import Progress
from penstock.loadtest.bench.readiness import Model, TargetUnusable, wait_until_ready, warm_up
from penstock.loadtest.bench.replay import raise_open_file_limit, replay, run
from penstock.loadtest.bench.sweep import SweepConfig, caveats, sweep, sweep_summary, sweep_table
from penstock.loadtest.report.figures import Run, figures
from penstock.loadtest.report.html import html_report
from penstock.loadtest.report.plots import save_plots
from penstock.loadtest.report.report import (
    Replay,
    Summary,
    details,
    render,
    report_warnings,
    summarize,
)
from penstock.loadtest.workload.token_counter import estimate_tokens
from penstock.loadtest.workload.workload import TimedRequest, Workload, make_workload
from penstock.scheduler.errors import InvalidConfig, PenstockError

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended, in a shell


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 if all requests succeeded, 1 if one did not, 2 for wrong flags.

    With --sweep, 0 if a rate met the SLO.
    """
    parser = make_parser()
    if argv[:1] == ["serve"]:  # as `vllm bench serve` is typed
        argv = argv[1:]
    try:
        refuse_unsupported(argv)
        config = bench_config(parser.parse_args(argv), os.environ.get("OPENAI_API_KEY"))
        # A bad file is reported before waiting for a server.
        workload = make_workload(config.workload, config.count or estimate_tokens)
    except InvalidConfig as error:
        _say(str(error))
        return 2
    except SystemExit as ended:  # argparse has printed the error, or the help
        return int(ended.code or 0)
    try:
        return run(_bench(config, workload))
    except InvalidConfig as error:
        _say(str(error))
        return 2
    except PenstockError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted before anything was measured")
        return INTERRUPTED


async def _bench(config: BenchConfig, workload: Workload) -> int:
    args = config.args
    target_config, model = await _find_target(config)
    if model.max_model_len is not None:
        limited = replace(config.workload, max_model_len=model.max_model_len)
        config = replace(config, workload=limited)
    raise_open_file_limit()
    async with HttpTarget(target_config, config.count) as target:
        workload, counted_by = await _workload_for_model(config, workload, target)
        requests = workload.requests
        settings = _settings(config, target_config) | {
            "token_lengths": counted_by,
            "num_too_long": workload.num_too_long,
        }
        _log_left_out(config, workload)
        await warm_up(target, config.workload, args.num_warmups, args.max_concurrency)
        if config.sweep is not None:
            return await _sweep(config, config.sweep, target, settings)
        settings["num_prompts"] = len(requests)
        observed = await replay(
            target,
            requests,
            max_concurrency=args.max_concurrency,
            progress=None if args.disable_tqdm else Progress(len(requests)),
        )
    return _report(config, requests, observed, settings)


async def _workload_for_model(
    config: BenchConfig, made: Workload, target: HttpTarget
) -> tuple[Workload, str | None]:
    """The workload without requests too long for the model, and what counted its tokens.

    The server counts them if the prompts are a few texts and there is no --tokenizer.
    """
    workload = config.workload
    if not workload.dataset.is_file or workload.dataset.is_trace:
        again = workload.max_model_len is not None
        return (make_workload(workload) if again else made), None
    if config.count is not None:
        return make_workload(workload, config.count), "tokenizer"
    num_texts = len(made.requests) * (2 if workload.needs_answers_counted else 1)
    if config.sweep is None and num_texts <= MAX_SERVER_COUNTS:
        loop, num_counted = asyncio.get_running_loop(), 0

        def count(texts: Sequence[str]) -> list[int]:
            nonlocal num_counted
            num_counted += len(texts)
            if num_counted > 2 * MAX_SERVER_COUNTS:  # most of the file is too long or too short
                raise HttpFailed(
                    f"selecting {workload.num_prompts} requests takes more than "
                    f"{2 * MAX_SERVER_COUNTS} texts"
                )
            return asyncio.run_coroutine_threadsafe(target.count_tokens(texts), loop).result()

        try:
            return await asyncio.to_thread(make_workload, workload, count), "server"
        except HttpFailed as error:
            _say(f"the server does not count tokens, so lengths are estimated: {error}")
    return make_workload(workload), "estimated"


def _log_left_out(config: BenchConfig, workload: Workload) -> None:
    if workload.num_too_long:
        _say(
            f"{workload.num_too_long} requests are left out: prompt and output are longer than the "
            f"model's limit of {config.workload.max_model_len} tokens"
        )
    num, wanted = len(workload.requests), config.workload.num_prompts
    if num < wanted and config.workload.dataset.is_file and config.sweep is None:
        _say(f"the file has {num} requests, and --num-prompts is {wanted}")


def _report(
    config: BenchConfig, requests: list[TimedRequest], observed: Replay, settings: Summary
) -> int:
    if observed.is_interrupted:
        _say(f"interrupted: {len(observed.results)} of {len(requests)} requests had ended")
    has_due_times = config.args.max_concurrency is None and requests[-1].arrival_s > 0
    for line in report_warnings(observed, has_due_times=has_due_times):
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
    return 1 if summary["failed"] else 0


async def _sweep(
    config: BenchConfig, sweep_settings: SweepConfig, target: HttpTarget, settings: Summary
) -> int:
    """Plots and the report show the requests of the best rate that met the SLO."""
    result = await sweep(
        target,
        config.workload,
        sweep_settings,
        config.report,
        count=config.count or estimate_tokens,
        shows_progress=not config.args.disable_tqdm,
        say=_say,
    )
    settings |= {"num_prompts": None, "request_rate": None}
    summary = settings | sweep_summary(result, sweep_settings)
    text = sweep_table(result)
    for line in caveats(result, config.workload):
        _say(line)
    if result.rates:
        shown = result.best or result.rates
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
    """Writes the files that the flags name. rates: a sweep's, in the order of measurement."""
    if args.save_result or args.append_result:
        _say(f"saved as {_save(args, document)}")
    drawn = figures(shown, rates) if args.report or args.plot_dir else []
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(html_report(shown.summary, drawn, text), encoding="utf-8")
        _say(f"report written to {args.report}")
    if args.plot_dir:
        for path in save_plots(drawn, args.plot_dir):
            _say(f"plot written to {path}")


async def _find_target(config: BenchConfig) -> tuple[TargetConfig, Model]:
    """Waits for the server; the model is --model, or the first that the server lists."""
    args = config.args
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    name = args.served_model_name or args.model
    models = await wait_until_ready(
        base_url,
        timeout_s=args.ready_timeout,
        say=_say,
        headers=config.headers,
        is_insecure=args.insecure,
        needs_models=name is None,
    )
    if not (name or models):
        raise TargetUnusable(f"{base_url} lists no model; name one with --model")
    by_name = {model.id: model for model in models}
    model = by_name.get(name, Model(name)) if name else models[0]
    if models and model.id not in by_name:
        _say(f"{base_url} lists no model {model.id!r}; it has {', '.join(by_name)}")
    target = TargetConfig(
        base_url=base_url,
        model=model.id,
        endpoint=endpoint(args),
        temperature=args.temperature,
        ignore_eos=ignores_eos(args),
        extra_body=extra_body(args),
        headers=config.headers,
        logprobs=args.logprobs,
        request_id_prefix=args.request_id_prefix,
        is_insecure=args.insecure,
        request_timeout_s=args.request_timeout,
    )
    return target, model


def _settings(config: BenchConfig, target: TargetConfig) -> Summary:
    """The settings under vLLM's keys, so that a run can be repeated from its result file."""
    workload, args = config.workload, config.args
    is_chat = target.endpoint.endswith("/chat/completions")
    backend = args.backend or ("openai-chat" if is_chat else "openai")
    settings: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "endpoint_type": backend,
        "label": args.label,
        "model_id": args.model or target.model,
        "tokenizer_id": None if args.tokenizer is None else str(args.tokenizer),
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
        "random_prefix_len": workload.random_prefix_len,
        "random_input_len": workload.input_len,
        "random_output_len": workload.output_len,
        "random_range_ratio": workload.range_ratio,
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
        "goodput": config.report.goodput_ms,
        **parse_pairs("--metadata", args.metadata),
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(value) else value


def _save(args: argparse.Namespace, document: Summary) -> Path:
    """Writes to vLLM's file name, unless --result-filename is given."""
    path = Path(args.result_dir or ".", args.result_filename or _name(args, document))
    path.parent.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.encode(document)
    if args.append_result and path.exists() and path.stat().st_size:
        data = b"\n" + data
    with path.open("ab" if args.append_result else "wb") as file:
        file.write(data)
    return path


def _name(args: argparse.Namespace, document: Summary) -> str:
    if args.sweep:
        load = "sweep"
    elif args.ramp_up_strategy is not None:
        ends = f"{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
        load = f"ramp-up-{args.ramp_up_strategy}-{ends}"
    else:
        load = f"{document['request_rate']}qps"
    if args.max_concurrency is not None:
        load += f"-concurrency{args.max_concurrency}"
    model = str(document["model_id"]).rpartition("/")[2]
    return f"{args.label or document['backend']}-{load}-{model}-{document['date']}.json"


def _say(text: str) -> None:
    print(f"penstock bench: {text}", file=sys.stderr, flush=True)
