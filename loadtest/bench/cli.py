"""`penstock bench` measures any OpenAI-compatible server. Flags are those of `vllm bench serve`."""

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
    pairs,
)
from penstock.loadtest.bench.flags import MAX_ASKED_COUNTS, make_parser, refuse_unserved
from penstock.loadtest.bench.http1 import HttpFailed
from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.progress import Progress
from penstock.loadtest.bench.readiness import Model, TargetUnusable, wait_until_ready, warm_up
from penstock.loadtest.bench.replay import raise_open_file_limit, replay, run
from penstock.loadtest.bench.sweep import SweepConfig, doubts, sweep, sweep_summary, sweep_table
from penstock.loadtest.report.figures import Run, figures
from penstock.loadtest.report.html import html_report
from penstock.loadtest.report.plots import save_plots
from penstock.loadtest.report.report import (
    Replay,
    Summary,
    complaints,
    details,
    render,
    summarize,
)
from penstock.loadtest.workload.lengths import estimate
from penstock.loadtest.workload.workload import TimedRequest, Workload, make_workload
from penstock.scheduler.errors import InvalidConfig, PenstockError

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 if all requests succeeded, 1 if one did not, 2 for wrong flags.

    With --sweep, 0 if a rate met the SLO.
    """
    parser = make_parser()
    try:
        refuse_unserved(argv)
        config = bench_config(parser.parse_args(argv), os.environ.get("OPENAI_API_KEY"))
        # A bad file is told before a server is sought.
        made = make_workload(config.workload, config.count or estimate)
    except InvalidConfig as error:
        _say(str(error))
        return 2
    except SystemExit as ended:  # argparse has said what was wrong, or given the help
        return int(ended.code or 0)
    try:
        return run(_bench(config, made))
    except InvalidConfig as error:
        _say(str(error))
        return 2
    except PenstockError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted before anything was measured")
        return INTERRUPTED


async def _bench(config: BenchConfig, made: Workload) -> int:
    args = config.args
    target_config, model = await _find_target(config)
    if model.max_model_len is not None:
        workload = replace(config.workload, max_model_len=model.max_model_len)
        config = replace(config, workload=workload)
    raise_open_file_limit()
    async with HttpTarget(target_config, config.count) as target:
        made, counted_by = await _fitted(config, made, target)
        requests = made.requests
        settings = _settings(config, target_config) | {
            "token_lengths": counted_by,
            "num_too_long": made.num_too_long,
        }
        _say_what_is_left_out(config, made)
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


async def _fitted(
    config: BenchConfig, made: Workload, target: HttpTarget
) -> tuple[Workload, str | None]:
    """The workload without what is too long for the model, and who counted its tokens.

    The server is asked where the prompts are texts, few, and nobody else can count them.
    """
    workload = config.workload
    if not workload.dataset.is_file or workload.dataset.is_trace:
        again = workload.max_model_len is not None
        return (make_workload(workload) if again else made), None
    if config.count is not None:
        return make_workload(workload, config.count), "tokenizer"
    num_texts = len(made.requests) * (2 if workload.needs_answers_counted else 1)
    if config.sweep is None and num_texts <= MAX_ASKED_COUNTS:
        loop, num_asked = asyncio.get_running_loop(), 0

        def ask(texts: Sequence[str]) -> list[int]:
            nonlocal num_asked
            num_asked += len(texts)
            if num_asked > 2 * MAX_ASKED_COUNTS:  # most of the file is left out
                raise HttpFailed(f"more than {2 * MAX_ASKED_COUNTS} texts to find those to ask")
            return asyncio.run_coroutine_threadsafe(target.count_tokens(texts), loop).result()

        try:
            return await asyncio.to_thread(make_workload, workload, ask), "server"
        except HttpFailed as error:
            _say(f"the server does not count tokens, so lengths are guessed: {error}")
    return make_workload(workload), "estimated"


def _say_what_is_left_out(config: BenchConfig, made: Workload) -> None:
    if made.num_too_long:
        _say(
            f"{made.num_too_long} requests are left out: with prompt and answer they are longer "
            f"than the {config.workload.max_model_len} tokens that the model takes"
        )
    num, asked = len(made.requests), config.workload.num_prompts
    if num < asked and config.workload.dataset.is_file and config.sweep is None:
        _say(f"the file has {num} requests, and --num-prompts is {asked}")


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
    return 1 if summary["failed"] else 0


async def _sweep(
    config: BenchConfig, sweep_settings: SweepConfig, target: HttpTarget, settings: Summary
) -> int:
    """The figures of single requests in its report are those of the best rate that met the SLO."""
    result = await sweep(
        target,
        config.workload,
        sweep_settings,
        config.report,
        count=config.count or estimate,
        shows_progress=not config.args.disable_tqdm,
        say=_say,
    )
    settings |= {"num_prompts": None, "request_rate": None}
    summary = settings | sweep_summary(result, sweep_settings)
    text = sweep_table(result)
    for line in doubts(result, config.workload):
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
    """What was asked for as files. rates: a sweep's, in the order in which they were asked."""
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
    """Waits for the server, which may be asked for its model."""
    args = config.args
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    asked = args.served_model_name or args.model
    models = await wait_until_ready(
        base_url,
        timeout_s=args.ready_timeout,
        say=_say,
        headers=config.headers,
        is_insecure=args.insecure,
        needs_models=asked is None,
    )
    if not (asked or models):
        raise TargetUnusable(f"{base_url} lists no model; name one with --model")
    by_name = {model.id: model for model in models}
    model = by_name.get(asked, Model(asked)) if asked else models[0]
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
    """What was asked, under vLLM's keys, so that a result can be repeated from its file."""
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
        **pairs("--metadata", args.metadata),
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(value) else value


def _save(args: argparse.Namespace, document: Summary) -> Path:
    """Under vLLM's name, unless one is given."""
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
