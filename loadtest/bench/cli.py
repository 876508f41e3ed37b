"""`penstock bench` measures any OpenAI-compatible server, with the flags of `vllm bench serve`.

Owns the order of a run.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from penstock.loadtest.bench.config import BenchConfig, bench_config, check_writable
from penstock.loadtest.bench.flags import MAX_SERVER_COUNTS, compare_parser, make_parser
from penstock.loadtest.bench.forecast import UNTESTABLE, check, check_summary, check_table
from penstock.loadtest.bench.http1 import HttpFailed
from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import Model, TargetUnusable, wait_until_ready, warm_up
from penstock.loadtest.bench.replay import raise_open_file_limit, replay, run
from penstock.loadtest.bench.results import say, settings_of, show, show_text, write, write_file
from penstock.loadtest.bench.sweep import SweepConfig, caveats, sweep, sweep_summary, sweep_table
from penstock.loadtest.bench.vllm_flags import refusal
from penstock.loadtest.command_line import FAILED, INTERRUPTED, exit_status
from penstock.loadtest.report.comparison import compare, comparison_text, read_sides
from penstock.loadtest.report.comparison_html import comparison_html
from penstock.loadtest.report.figures import Measurement
from penstock.loadtest.report.report import (
    Replay,
    Summary,
    details,
    render,
    report_warnings,
    summarize,
)
from penstock.loadtest.workload.config import cache_advice
from penstock.loadtest.workload.token_counter import estimate_tokens
from penstock.loadtest.workload.workload import TimedRequest, Workload, make_workload
from penstock.scheduler.errors import InvalidConfig


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 if all requests succeeded, 1 if one did not, 2 for wrong flags.

    With --sweep, 0 if a rate met the SLO. With --check, 1 if the plan is refuted, and 3 if its
    error bars are too wide for that. `compare`: 2 for files that cannot be compared.
    """
    command = _compare if argv[:1] == ["compare"] else _run
    if argv[:1] in (["compare"], ["serve"]):  # as `vllm bench serve` is typed
        argv = argv[1:]
    return exit_status(lambda: command(argv), "penstock bench")


def _compare(argv: list[str]) -> int:
    args = compare_parser().parse_args(argv)
    if args.html is not None:
        check_writable("--html", args.html)
    comparison = compare(read_sides(args.results))
    for note in comparison.notes:
        say(note)
    show_text(comparison_text(comparison))
    if args.html is not None:
        write_file(args.html, comparison_html(comparison).encode())
        say(f"comparison written to {args.html}")
    return 0


def _run(argv: list[str]) -> int:
    if refused := refusal(argv):
        raise InvalidConfig(refused)
    config = bench_config(make_parser().parse_args(argv), os.environ.get("OPENAI_API_KEY"))
    # A bad file is reported before waiting for a server.
    workload = make_workload(config.workload, config.count or estimate_tokens)
    try:
        return run(_bench(config, workload))
    except KeyboardInterrupt:
        say("interrupted before anything was measured")
        return INTERRUPTED


async def _bench(config: BenchConfig, workload: Workload) -> int:
    args = config.args
    target_config, model, others = await _find_target(config)
    if model.max_model_len is not None:
        limited = replace(config.workload, max_model_len=model.max_model_len)
        config = replace(config, workload=limited)
    raise_open_file_limit()
    async with HttpTarget(target_config, config.count) as target:
        workload, counted_by = await _workload_for_model(config, workload, target)
        requests = workload.requests
        settings = settings_of(config, target_config) | {
            "token_lengths": counted_by,
            "num_too_long": workload.num_too_long,
        }
        _log_left_out(config, workload)
        if config.args.seed is None:
            say(f"seed {config.workload.seed}; --seed with it sends the same requests again")
        await _warm_up(config, target, model, others)
        if config.sweep is not None:
            return await _sweep(config, config.sweep, target, settings)
        settings["num_prompts"] = len(requests)
        observed = await replay(
            target,
            requests,
            max_concurrency=args.max_concurrency,
            shows_progress=not args.disable_tqdm,
        )
    return _report(config, requests, observed, settings)


async def _warm_up(
    config: BenchConfig, target: HttpTarget, model: Model, others: list[str]
) -> None:
    """others: the models that the server lists, if `model` is none of them: it may serve it yet."""
    args = config.args
    try:
        await warm_up(target, config.workload, args.num_warmups, args.max_concurrency)
    except TargetUnusable as error:
        if not others:
            raise
        raise TargetUnusable(f"{error}; the server lists {', '.join(others)}") from error
    if others:
        say(f"the server lists no model {model.id!r}; it lists {', '.join(others)}")


async def _workload_for_model(
    config: BenchConfig, made: Workload, target: HttpTarget
) -> tuple[Workload, str | None]:
    """The workload without requests too long for the model, and what counted its tokens. The server
    counts them if the prompts are a few texts and there is no --tokenizer."""
    workload = config.workload
    if not workload.dataset.has_texts:
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
            say(f"the server does not count tokens, so lengths are estimated: {error}")
    return make_workload(workload), "estimated"


def _log_left_out(config: BenchConfig, workload: Workload) -> None:
    if workload.num_too_long:
        say(
            f"{workload.num_too_long} requests are left out: prompt and output are longer than the "
            f"model's limit of {config.workload.max_model_len} tokens"
        )
    num, wanted = len(workload.requests), config.workload.num_prompts
    if num < wanted and config.workload.dataset.is_file and config.sweep is None:
        say(f"the file has {num} requests, and --num-prompts is {wanted}")


def _report(
    config: BenchConfig, requests: list[TimedRequest], observed: Replay, settings: Summary
) -> int:
    has_due_times = config.args.max_concurrency is None and requests[-1].arrival_s > 0
    notes = report_warnings(
        observed, has_due_times=has_due_times, cache_advice=cache_advice(config.workload)
    )
    if observed.is_interrupted:
        notes.insert(
            0, f"interrupted: {len(observed.results)} of {len(requests)} requests had ended"
        )
    for line in notes:
        say(line)
    summary = settings | summarize(observed, config.report)
    forecast = config.forecast
    checked = check(forecast, observed) if forecast else []
    if forecast:
        summary |= check_summary(forecast, checked)
    document = summary | details(observed) if config.args.save_detailed else summary
    text = render(summary, config.report)
    if forecast:
        text += f"\n{check_table(forecast, checked)}"
    show(config.args, summary, text)
    write(config.args, document, Measurement(summary=summary, observed=observed), [], text, notes)
    if observed.is_interrupted:
        return INTERRUPTED
    if summary["failed"] or summary.get("is_refuted"):
        return FAILED
    return 0 if summary.get("is_testable", True) else UNTESTABLE


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
        say=say,
    )
    settings |= {"num_prompts": None, "request_rate": None}
    summary = settings | sweep_summary(result, sweep_settings)
    text = sweep_table(result)
    notes = caveats(result, config.workload)
    for line in notes:
        say(line)
    show(config.args, summary, text)
    if result.rates:
        shown = result.best or result.rates
        best = Measurement(summary=settings | shown[-1].summary, observed=shown[-1].observed)
        write(config.args, summary, best, result.rates, text, notes)
    if result.is_interrupted:
        return INTERRUPTED
    return 0 if result.met is not None else 1


async def _find_target(config: BenchConfig) -> tuple[TargetConfig, Model, list[str]]:
    """Waits for the server; the model is --model, or the first that the server lists. Also returns
    the models that the server lists, if --model is none of them."""
    args = config.args
    name = args.served_model_name or args.model
    models = await wait_until_ready(
        config.target.base_url,
        timeout_s=args.ready_timeout,
        say=say,
        headers=config.target.headers,
        is_insecure=args.insecure,
        needs_models=name is None,
    )
    if not (name or models):
        raise TargetUnusable(f"{config.target.base_url} lists no model; name one with --model")
    by_name = {model.id: model for model in models}
    model = by_name.get(name, Model(name)) if name else models[0]
    others = [] if model.id in by_name else list(by_name)
    return replace(config.target, model=model.id), model, others
