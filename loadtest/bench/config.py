"""From parsed flags to the settings of a benchmark. Refuses combinations that cannot work."""

import argparse
import math
import re
import secrets
from dataclasses import dataclass
from typing import Any

from penstock.loadtest.bench.flags import BACKENDS, CHAT, SAMPLING
from penstock.loadtest.bench.sweep import SweepConfig
from penstock.loadtest.report.plots import check_matplotlib
from penstock.loadtest.report.report import METRIC_TITLES, ReportConfig
from penstock.loadtest.workload.arrivals import Ramp, RampStrategy
from penstock.loadtest.workload.config import Dataset, PromptFormat, WorkloadConfig
from penstock.loadtest.workload.token_counter import TokenCounter, tokenizer_counter
from penstock.scheduler.errors import InvalidConfig

_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"  # a header's name: RFC 9110, 5.6.2


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The settings of one run. sweep: None to measure one workload. count: --tokenizer's."""

    args: argparse.Namespace
    headers: dict[str, str]
    count: TokenCounter | None
    workload: WorkloadConfig
    report: ReportConfig
    sweep: SweepConfig | None


def bench_config(args: argparse.Namespace, api_key: str | None) -> BenchConfig:
    """Raises InvalidConfig."""
    workload, report = workload_config(args), report_config(args)
    sweep = sweep_config(args, workload, report)
    check_result_flags(args)
    parse_pairs("--metadata", args.metadata)
    if args.plot_dir is not None:
        check_matplotlib()
    return BenchConfig(
        args=args,
        headers=headers(args, api_key),
        count=None if args.tokenizer is None else tokenizer_counter(args.tokenizer),
        workload=workload,
        report=report,
        sweep=sweep,
    )


def parse_pairs(flag: str, texts: list[str] | None) -> dict[str, str]:
    """The names and values of --header or --metadata. Raises InvalidConfig."""
    parsed = {}
    for text in texts or []:
        name, is_pair, value = text.partition("=")
        if not (is_pair and name.strip()):
            raise InvalidConfig(f"{flag} {text!r} is not valid; write NAME=VALUE")
        parsed[name.strip()] = value.strip()
    return parsed


def headers(args: argparse.Namespace, api_key: str | None) -> dict[str, str]:
    """Headers of every request; --header overrides the key. Raises InvalidConfig."""
    given = parse_pairs("--header", args.header)
    for name, value in given.items():
        if not (re.fullmatch(_TOKEN, name) and value.isprintable() and value.isascii()):
            raise InvalidConfig(
                f"--header {name}={value!r} is not an HTTP header; use letters, digits and - in "
                "the name and printable ASCII in the value"
            )
    has_own_key = any(name.lower() == "authorization" for name in given)
    return given if has_own_key or not api_key else {"Authorization": f"Bearer {api_key}"} | given


def extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, and --extra-body, which overrides them."""
    sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    return {**sampling, **args.extra_body}


def ignores_eos(args: argparse.Namespace) -> bool:
    """By default, outputs of synthetic prompts have their full length, as in vLLM."""
    if args.ignore_eos is not None:
        return bool(args.ignore_eos)
    dataset = Dataset(args.dataset_name)
    return dataset.is_trace or not dataset.is_file


def check_result_flags(args: argparse.Namespace) -> None:
    """Raises InvalidConfig for a flag that would have no effect."""
    if args.save_result and args.append_result:
        raise InvalidConfig("--save-result and --append-result cannot be combined; give one")
    if args.save_result or args.append_result:
        return
    for flag in ("--save-detailed", "--result-dir", "--result-filename"):
        if getattr(args, flag[2:].replace("-", "_")):
            raise InvalidConfig(f"{flag} requires --save-result or --append-result")


def workload_config(args: argparse.Namespace) -> WorkloadConfig:
    is_chat = endpoint(args).endswith("/chat/completions")
    if is_chat and args.prompt_format == PromptFormat.IDS:
        raise InvalidConfig(f"{endpoint(args)} does not accept token ids; use --prompt-format text")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise InvalidConfig(f"--max-concurrency is {args.max_concurrency}; it must be at least 1")
    default_format = PromptFormat.TEXT if is_chat else PromptFormat.IDS
    return WorkloadConfig(
        seed=secrets.randbits(31) if args.seed is None else args.seed,
        num_prompts=args.num_prompts,
        dataset=Dataset(args.dataset_name),
        prompt_format=PromptFormat(args.prompt_format or default_format),
        input_len=_general_or_own(args.input_len, args.random_input_len),
        output_len=_general_or_own(args.output_len, args.random_output_len),
        range_ratio=args.random_range_ratio,
        random_prefix_len=args.random_prefix_len,
        shared_prefix_len=args.shared_prefix_len,
        num_prefixes=args.num_prefixes,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        ramp=_ramp(args),
        vocab_size=args.vocab_size,
        dataset_path=args.dataset_path,
        sharegpt_output_len=_general_or_own(args.output_len, args.sharegpt_output_len),
        custom_output_len=_general_or_own(args.output_len, args.custom_output_len),
        trace_speedup=args.trace_speedup,
        is_chat=is_chat,
    )


def _general_or_own(general: int | None, own: Any) -> Any:
    """vLLM's --input-len and --output-len override a dataset's own flag."""
    return own if general is None else general


def endpoint(args: argparse.Namespace) -> str:
    """The path that --backend and --endpoint select."""
    path: str | None = args.endpoint
    if path is None:
        return BACKENDS[args.backend or "openai"]
    is_chat = path.endswith("/chat/completions")
    if args.backend and is_chat != (BACKENDS[args.backend] == CHAT):
        raise InvalidConfig(
            f"--backend {args.backend} and --endpoint {path} are different APIs; "
            "give one of the flags"
        )
    return path


def _ramp(args: argparse.Namespace) -> Ramp | None:
    given = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    if given == (None, None, None):
        return None
    if None in given:
        raise InvalidConfig(
            "a ramp requires all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
        )
    return Ramp(strategy=RampStrategy(given[0]), start_rps=given[1], end_rps=given[2])


def sweep_config(
    args: argparse.Namespace, workload: WorkloadConfig, report: ReportConfig
) -> SweepConfig | None:
    """None without --sweep. Raises InvalidConfig."""
    if not args.sweep:
        return None
    if report.goodput_ms is None:
        raise InvalidConfig(
            "--sweep requires the SLO; give --goodput, such as --goodput ttft:200 tpot:50"
        )
    if workload.ramp is not None:
        raise InvalidConfig("--sweep cannot be combined with a ramp; remove --ramp-up-strategy")
    if args.max_concurrency is not None:
        raise InvalidConfig(
            "--sweep cannot be combined with --max-concurrency, which delays requests before their "
            "latency is measured; remove it"
        )
    if args.save_detailed:
        raise InvalidConfig(
            "--sweep saves a summary of each rate; remove --save-detailed, or measure one rate"
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
                f"--percentile-metrics: unknown metric {metric!r}; "
                f"choose from {', '.join(METRIC_TITLES)}"
            )
    try:
        percentiles = tuple(float(text) for text in args.metric_percentiles.split(","))
    except ValueError:
        percentiles = (-1.0,)
    if not all(0 <= percent <= 100 for percent in percentiles):
        raise InvalidConfig(
            f"--metric-percentiles is {args.metric_percentiles!r}; it must be numbers "
            "from 0 to 100, such as 50,90,99"
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
                f"--goodput {limit!r} is not valid; write ttft, tpot or e2el, a colon and "
                "milliseconds, such as ttft:200"
            )
        parsed[match[1]] = float(match[2])
    return parsed
