"""The flags of `penstock bench`, which are those of `vllm bench serve`, and what they configure."""

import argparse
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from loadtest.arrivals import Ramp, RampStrategy
from loadtest.config import (
    DEFAULT_VOCAB_SIZE,
    FIRST_TOKEN_ID,
    Dataset,
    PromptFormat,
    ReportConfig,
    WorkloadConfig,
)
from loadtest.report import METRIC_TITLES
from loadtest.sweep import SweepConfig
from scheduler.errors import InvalidConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# vLLM's names for the APIs, and plain ones.
BACKENDS = {
    "openai": COMPLETIONS,
    "completions": COMPLETIONS,
    "vllm": COMPLETIONS,
    "openai-chat": CHAT,
    "chat": CHAT,
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


def make_parser() -> argparse.ArgumentParser:
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
        "--backend",
        "--endpoint-type",
        choices=[*BACKENDS],
        help="which API: completions (openai, the default), or chat, with text prompts",
    )
    server.add_argument(
        "--endpoint", metavar="PATH", help=f"default: {COMPLETIONS}, or {CHAT} for chat"
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
        help="requests per second; inf sends all at once, or when the trace says",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        default=1.0,
        help="1 is a Poisson process, less comes in bursts, more comes evenly",
    )
    load.add_argument(
        "--ramp-up-strategy",
        choices=[*RampStrategy],
        help="let the rate go from --ramp-up-start-rps to --ramp-up-end-rps",
    )
    load.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="rate at the beginning")
    load.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="rate at the end")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="at most N in flight")
    load.add_argument(
        "--dataset-name",
        choices=[*Dataset],
        default=Dataset.RANDOM,
        help="made-up prompts that share nothing or a prefix, or what a file says",
    )
    load.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="ShareGPT JSON, Azure or BurstGPT CSV, Mooncake JSONL, or custom JSONL with prompt or "
        "messages, and max_tokens, in each line",
    )
    load.add_argument(
        "--trace-speedup",
        type=float,
        metavar="X",
        default=1.0,
        help="replay a trace's arrivals X times as fast; inf sends all at once",
    )
    load.add_argument(
        "--sharegpt-output-len",
        type=int,
        metavar="N",
        help="max_tokens; default: what the answer in the file has",
    )
    load.add_argument(
        "--custom-output-len",
        type=int,
        metavar="N",
        default=256,
        help="max_tokens of lines without any",
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
    report.add_argument(
        "--report", type=Path, metavar="FILE", help="write an HTML report that needs nothing else"
    )
    report.add_argument(
        "--plot-dir", type=Path, metavar="DIR", help="write its figures as PNG (penstock[plot])"
    )
    report.add_argument("--json", action="store_true", help="print the JSON line alone")
    report.add_argument("--save-result", action="store_true", help="write the JSON to a file")
    report.add_argument("--save-detailed", action="store_true", help="with every request in it")
    report.add_argument("--result-dir", metavar="DIR", default=".", help="for --save-result")
    report.add_argument(
        "--result-filename", metavar="NAME", help="default: made from rate, model and date"
    )
    _add_sweep(parser)
    return parser


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    sweep = parser.add_argument_group(
        "sweep", "The highest request rate that meets --goodput; --num-prompts follows the rate."
    )
    sweep.add_argument(
        "--sweep",
        action="store_true",
        help="find it, from --request-rate or 1 on, by doubling, then by bisection",
    )
    sweep.add_argument(
        "--sweep-goodput-ratio",
        type=float,
        metavar="R",
        default=0.99,
        help="share of good requests that a rate needs",
    )
    sweep.add_argument(
        "--sweep-seconds",
        type=float,
        metavar="S",
        default=20.0,
        help="for which each rate is asked; up to thrice that where it is fewer than 100 requests",
    )
    sweep.add_argument(
        "--sweep-precision",
        type=float,
        metavar="R",
        default=0.05,
        help="stop when the limit is known to this share of it",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"it must be a JSON object ({error})") from error


def workload_config(args: argparse.Namespace) -> WorkloadConfig:
    is_chat = endpoint(args).endswith("/chat/completions")
    if is_chat and args.prompt_format == PromptFormat.IDS:
        raise InvalidConfig(f"{endpoint(args)} takes no token ids; use --prompt-format text")
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
        burstiness=args.burstiness,
        ramp=_ramp(args),
        vocab_size=args.vocab_size,
        dataset_path=args.dataset_path,
        sharegpt_output_len=args.sharegpt_output_len,
        custom_output_len=args.custom_output_len,
        trace_speedup=args.trace_speedup,
        is_chat=is_chat,
    )


def endpoint(args: argparse.Namespace) -> str:
    """The path that --backend and --endpoint name together."""
    path: str | None = args.endpoint
    if path is None:
        return BACKENDS[args.backend or "openai"]
    is_chat = path.endswith("/chat/completions")
    if args.backend and is_chat != (BACKENDS[args.backend] == CHAT):
        raise InvalidConfig(
            f"--backend {args.backend} and --endpoint {path} name two APIs; give one of the flags"
        )
    return path


def _ramp(args: argparse.Namespace) -> Ramp | None:
    given = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    if given == (None, None, None):
        return None
    if None in given:
        raise InvalidConfig(
            "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps together"
        )
    return Ramp(strategy=RampStrategy(given[0]), start_rps=given[1], end_rps=given[2])


def sweep_config(
    args: argparse.Namespace, workload: WorkloadConfig, report: ReportConfig
) -> SweepConfig | None:
    """None without --sweep. Raises InvalidConfig."""
    if not args.sweep:
        return None
    if report.goodput_ms is None:
        raise InvalidConfig("--sweep needs the SLO: give --goodput, as --goodput ttft:200 tpot:50")
    if workload.ramp is not None:
        raise InvalidConfig("--sweep sets the rates itself; leave out --ramp-up-strategy")
    if args.save_detailed:
        raise InvalidConfig(
            "--sweep saves a summary of each rate; leave out --save-detailed, or measure one rate"
        )
    return SweepConfig(
        goodput_ms=report.goodput_ms,
        start_rate=1.0 if math.isinf(workload.request_rate) else workload.request_rate,
        min_ratio=args.sweep_goodput_ratio,
        seconds=args.sweep_seconds,
        precision=args.sweep_precision,
    )


def report_config(args: argparse.Namespace) -> ReportConfig:
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
