"""`penstock bench` measures any OpenAI-compatible server. Flags are those of `vllm bench serve`."""

import argparse
import math
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from loadtest.config import (
    DEFAULT_VOCAB_SIZE,
    FIRST_TOKEN_ID,
    Dataset,
    PromptFormat,
    ReportConfig,
    TargetConfig,
    WorkloadConfig,
)
from loadtest.http_target import (
    HttpTarget,
    TargetUnusable,
    raise_open_file_limit,
    replay,
    run,
    wait_until_ready,
    warm_up,
)
from loadtest.progress import Progress
from loadtest.report import METRIC_TITLES, Replay, Summary, complaints, details, render, summarize
from loadtest.workload import make_requests
from scheduler.errors import InvalidConfig, PenstockError

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 if a request succeeded, 1 if none did, 2 for wrong flags."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
        workload, report = _workload_config(args), _report_config(args)
    except InvalidConfig as error:
        _say(str(error))
        return 2
    except SystemExit as ended:  # argparse has said what was wrong, or given the help
        return int(ended.code or 0)
    try:
        return run(_bench(args, workload, report))
    except PenstockError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted before anything was measured")
        return INTERRUPTED


async def _bench(args: argparse.Namespace, workload: WorkloadConfig, report: ReportConfig) -> int:
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    api_key = os.environ.get("OPENAI_API_KEY")
    models = await wait_until_ready(
        base_url, api_key=api_key, timeout_s=args.ready_timeout, say=_say
    )
    if not (args.model or models):
        raise TargetUnusable(f"{base_url} lists no model; name one with --model")
    target_config = TargetConfig(
        base_url=base_url,
        model=args.model or models[0],
        endpoint=args.endpoint,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        extra_body=args.extra_body,
        api_key=api_key,
        request_timeout_s=args.request_timeout,
    )
    requests = make_requests(workload)
    raise_open_file_limit()
    async with HttpTarget(target_config) as target:
        await warm_up(target, workload, args.num_warmups, args.max_concurrency)
        observed = await replay(
            target, requests, max_concurrency=args.max_concurrency, progress=Progress(len(requests))
        )
    if observed.is_interrupted:
        _say(f"interrupted: {len(observed.results)} of {len(requests)} requests had ended")
    has_due_times = args.max_concurrency is None and not math.isinf(workload.request_rate)
    for line in complaints(observed, has_due_times=has_due_times):
        _say(line)
    summary = _settings(args, workload, target_config) | summarize(observed, report)
    if args.save_result:
        _say(f"saved as {_save(args, summary, observed)}")
    if not args.json:
        print(render(summary, report))
    print(msgspec.json.encode(summary).decode(), flush=True)
    if observed.is_interrupted:
        return INTERRUPTED
    return 0 if summary["completed"] else 1


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock bench",
        description="Measure any OpenAI-compatible server. The last line on stdout is JSON.",
        formatter_class=HelpFormatter,
    )
    server = parser.add_argument_group("server (OPENAI_API_KEY is sent if it is set)")
    server.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1", help="of the server")
    server.add_argument("--port", type=int, metavar="N", default=8000, help="of the server")
    server.add_argument(
        "--model", metavar="ID", help="default: the first that GET /v1/models lists"
    )
    server.add_argument(
        "--endpoint",
        metavar="PATH",
        default="/v1/completions",
        help="or /v1/chat/completions, with text prompts",
    )
    server.add_argument(
        "--ready-timeout", type=float, default=60.0, metavar="S", help="to wait for the server"
    )
    server.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="S", help="for one whole answer"
    )

    load = parser.add_argument_group("workload")
    load.add_argument(
        "--seed", type=int, metavar="N", default=0, help="the same seed gives the same requests"
    )
    load.add_argument("--num-prompts", type=int, metavar="N", default=1000, help="requests")
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        default=math.inf,
        help="requests per second, Poisson arrivals; inf sends all at once",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="at most N in flight")
    load.add_argument(
        "--dataset-name",
        choices=[*Dataset],
        default=Dataset.RANDOM,
        help="prompts that share nothing, or a prefix",
    )
    load.add_argument(
        "--random-input-len", type=int, metavar="N", default=1024, help="tokens of a prompt"
    )
    load.add_argument("--random-output-len", type=int, metavar="N", default=128, help="max_tokens")
    load.add_argument(
        "--random-range-ratio",
        type=float,
        metavar="R",
        default=0.0,
        help="lengths vary by this share each way",
    )
    load.add_argument(
        "--shared-prefix-len",
        type=int,
        metavar="N",
        default=256,
        help="comes before --random-input-len more",
    )
    load.add_argument(
        "--num-prefixes", type=int, metavar="N", default=8, help="different shared prefixes"
    )
    load.add_argument(
        "--prompt-format",
        choices=[*PromptFormat],
        help="default: ids, where the endpoint takes them",
    )
    load.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        default=DEFAULT_VOCAB_SIZE,
        help=f"random ids are drawn from [{FIRST_TOKEN_ID}, this); every model has the default",
    )
    load.add_argument("--ignore-eos", action="store_true", help="answers get their full length")
    load.add_argument(
        "--extra-body",
        type=_json_object,
        metavar="JSON",
        default={},
        help="fields that every request has besides, such as response_format",
    )
    load.add_argument("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy")
    load.add_argument(
        "--num-warmups",
        type=int,
        metavar="N",
        default=1,
        help="requests before the clock starts; must succeed",
    )

    report = parser.add_argument_group("report")
    report.add_argument(
        "--percentile-metrics",
        metavar="LIST",
        default="ttft,tpot,itl,e2el",
        help="sections to show",
    )
    report.add_argument(
        "--metric-percentiles",
        metavar="LIST",
        default="90,99",
        help="to show besides mean and median",
    )
    report.add_argument(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="limits for a good request, as ttft:200 tpot:50 e2el:5000",
    )
    report.add_argument("--json", action="store_true", help="print the JSON line alone")
    report.add_argument("--save-result", action="store_true", help="write the JSON to a file")
    report.add_argument("--save-detailed", action="store_true", help="with every request in it")
    report.add_argument("--result-dir", metavar="DIR", default=".", help="for --save-result")
    report.add_argument(
        "--result-filename", metavar="NAME", help="default: made from rate, model and date"
    )
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"it must be a JSON object ({error})") from error


def _workload_config(args: argparse.Namespace) -> WorkloadConfig:
    is_chat = args.endpoint.endswith("/chat/completions")
    if is_chat and args.prompt_format == PromptFormat.IDS:
        raise InvalidConfig(f"{args.endpoint} takes no token ids; use --prompt-format text")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise InvalidConfig(f"--max-concurrency is {args.max_concurrency}; it must be at least 1")
    default_format = PromptFormat.TEXT if is_chat else PromptFormat.IDS
    return WorkloadConfig(
        seed=args.seed,
        num_prompts=args.num_prompts,
        dataset=Dataset(args.dataset_name),
        prompt_format=PromptFormat(args.prompt_format or default_format),
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        shared_prefix_len=args.shared_prefix_len,
        num_prefixes=args.num_prefixes,
        request_rate=args.request_rate,
        vocab_size=args.vocab_size,
    )


def _report_config(args: argparse.Namespace) -> ReportConfig:
    metrics = tuple(args.percentile_metrics.split(","))
    for metric in metrics:
        if metric not in METRIC_TITLES:
            raise InvalidConfig(
                f"--percentile-metrics knows no {metric!r}; choose from {', '.join(METRIC_TITLES)}"
            )
    try:
        percentiles = tuple(float(text) for text in args.metric_percentiles.split(","))
    except ValueError:
        percentiles = (-1.0,)
    if not all(0 <= percent <= 100 for percent in percentiles):
        raise InvalidConfig(
            f"--metric-percentiles is {args.metric_percentiles!r}; it must be numbers "
            "from 0 to 100, as 50,90,99"
        )
    return ReportConfig(metrics=metrics, percentiles=percentiles, goodput_ms=_goodput(args.goodput))


def _goodput(limits: list[str] | None) -> dict[str, float] | None:
    if limits is None:
        return None
    parsed = {}
    for limit in limits:
        match = re.fullmatch(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)", limit)
        if match is None:
            raise InvalidConfig(
                f"--goodput does not understand {limit!r}; write ttft, tpot or e2el, a colon and "
                "milliseconds, as ttft:200"
            )
        parsed[match[1]] = float(match[2])
    return parsed


def _settings(args: argparse.Namespace, workload: WorkloadConfig, target: TargetConfig) -> Summary:
    """What was asked, under vLLM's keys, so that a result can be repeated from its file."""
    rate = workload.request_rate
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if target.endpoint.endswith("/chat/completions") else "openai",
        "model_id": target.model,
        "tokenizer_id": None,
        "num_prompts": workload.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "max_concurrency": args.max_concurrency,
        "seed": workload.seed,
        "dataset_name": workload.dataset,
        "random_input_len": workload.input_len,
        "random_output_len": workload.output_len,
        "random_range_ratio": workload.range_ratio,
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
    }


def _save(args: argparse.Namespace, summary: Summary, observed: Replay) -> Path:
    model = str(summary["model_id"]).rpartition("/")[2]
    name = f"{summary['backend']}-{summary['request_rate']}qps-{model}-{summary['date']}.json"
    path = Path(args.result_dir, args.result_filename or name)
    document = summary | details(observed) if args.save_detailed else summary
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(document))
    return path


def _say(text: str) -> None:
    print(f"penstock bench: {text}", file=sys.stderr, flush=True)
