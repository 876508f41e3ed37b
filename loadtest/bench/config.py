"""From parsed flags to the settings of a benchmark. Refuses combinations that cannot work."""

import argparse
import math
import os
import re
import secrets
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from penstock.loadtest.bench.flags import (
    BACKENDS,
    CHAT,
    COMPLETIONS,
    DEFAULT_HOST,
    DEFAULT_PORT,
    SAMPLING,
)
from penstock.loadtest.bench.forecast import Forecast, read_forecast
from penstock.loadtest.bench.http_target import TargetConfig
from penstock.loadtest.bench.sweep import SweepConfig
from penstock.loadtest.command_line import require
from penstock.loadtest.report.plots import check_matplotlib
from penstock.loadtest.report.report import METRIC_TITLES, ReportConfig
from penstock.loadtest.workload.config import (
    Dataset,
    PromptFormat,
    Ramp,
    RampStrategy,
    WorkloadConfig,
)
from penstock.loadtest.workload.token_counter import TokenCounter, tokenizer_counter
from penstock.scheduler.errors import InvalidConfig

_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"  # a header's name: RFC 9110, 5.6.2


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The settings of one run. sweep: None to measure one workload. count: --tokenizer's. target:
    without its model, if the server has to name it. forecast: the figures of the plan that --check
    names."""

    args: argparse.Namespace
    count: TokenCounter | None
    workload: WorkloadConfig
    report: ReportConfig
    target: TargetConfig = field(default_factory=TargetConfig)
    sweep: SweepConfig | None = None
    forecast: Forecast | None = None


def bench_config(args: argparse.Namespace, api_key: str | None) -> BenchConfig:
    """Raises InvalidConfig."""
    target = TargetConfig(
        base_url=_base_url(args),
        endpoint=_endpoint(args),
        temperature=args.temperature,
        ignore_eos=_ignores_eos(args),
        extra_body=_extra_body(args),
        headers=_headers(args, api_key),
        logprobs=args.logprobs,
        request_id_prefix=args.request_id_prefix,
        is_insecure=args.insecure,
        request_timeout_s=args.request_timeout,
    )
    config = measured_config(args)
    return replace(config, target=target, forecast=_forecast(args, config.workload))


def measured_config(args: argparse.Namespace) -> BenchConfig:
    """The settings of a load and its report, whatever it is sent to. Raises InvalidConfig."""
    workload, report = workload_config(args), report_config(args)
    sweep = sweep_config(args, workload, report)
    _check_result_flags(args)
    parse_pairs("--metadata", args.metadata)
    for flag, path in _output_paths(args).items():
        check_writable(flag, path)
    if args.plot_dir is not None:
        check_matplotlib()
    count = None if args.tokenizer is None else tokenizer_counter(args.tokenizer)
    return BenchConfig(args=args, count=count, workload=workload, report=report, sweep=sweep)


def _forecast(args: argparse.Namespace, workload: WorkloadConfig) -> Forecast | None:
    """Raises InvalidConfig where the plan is of another load."""
    if args.check is None:
        return None
    if args.sweep or args.max_concurrency is not None:
        flag = "--sweep" if args.sweep else "--max-concurrency"
        raise InvalidConfig(f"--check cannot be combined with {flag}: a plan is of one load")
    return read_forecast(args.check, workload)


def parse_pairs(flag: str, texts: list[str] | None) -> dict[str, str]:
    """The names and values of --header or --metadata. Raises InvalidConfig."""
    parsed = {}
    for text in texts or []:
        name, is_pair, value = text.partition("=")
        if not (is_pair and name.strip()):
            raise InvalidConfig(f"{flag} {text!r} is not valid; write NAME=VALUE")
        parsed[name.strip()] = value.strip()
    return parsed


def _headers(args: argparse.Namespace, api_key: str | None) -> dict[str, str]:
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


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, and --extra-body, which overrides them."""
    sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    return {**sampling, **(args.extra_body or {})}


def _ignores_eos(args: argparse.Namespace) -> bool:
    """By default, outputs of synthetic prompts have their full length, as in vLLM."""
    if args.ignore_eos is not None:
        return bool(args.ignore_eos)
    return not Dataset(args.dataset_name).has_texts


def _check_result_flags(args: argparse.Namespace) -> None:
    """Raises InvalidConfig for a flag that would have no effect."""
    if args.save_result and args.append_result:
        raise InvalidConfig("--save-result and --append-result cannot be combined; give one")
    if args.save_result or args.append_result:
        return
    for flag in ("--save-detailed", "--result-dir", "--result-filename"):
        if getattr(args, flag[2:].replace("-", "_")):
            raise InvalidConfig(f"{flag} requires --save-result or --append-result")


def _base_url(args: argparse.Namespace) -> str:
    if args.base_url is None:
        return f"http://{args.host or DEFAULT_HOST}:{args.port or DEFAULT_PORT}"
    if args.host is not None or args.port is not None:
        raise InvalidConfig("--base-url cannot be combined with --host or --port; give one of them")
    return str(args.base_url)


def _output_paths(args: argparse.Namespace) -> dict[str, Path]:
    """The files that are written, by flag; without the one whose name is not known yet."""
    paths = {} if args.report is None else {"--report": args.report}
    if args.result_filename is not None:
        paths["--result-filename"] = Path(args.result_dir or ".", args.result_filename)
    elif args.result_dir is not None:
        paths["--result-dir"] = Path(args.result_dir, "result.json")
    return paths if args.plot_dir is None else paths | {"--plot-dir": args.plot_dir / "any.png"}


def check_writable(flag: str, path: Path) -> None:
    """Before the load runs, not after it. Raises InvalidConfig."""
    if path.is_dir():
        raise InvalidConfig(f"{flag} {path} is a directory; give a file's name")
    folder = next(each for each in path.absolute().parents if each.exists())
    if not folder.is_dir():
        raise InvalidConfig(f"{flag} {path} cannot be written: {folder} is not a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidConfig(f"{flag} {path} cannot be written: permission denied")


def workload_config(args: argparse.Namespace) -> WorkloadConfig:
    path = _endpoint(args)
    is_chat = path.endswith("/chat/completions")
    if is_chat and args.prompt_format == PromptFormat.IDS:
        raise InvalidConfig(f"{path} does not accept token ids; use --prompt-format text")
    if (most := args.max_concurrency) is not None:
        require(most >= 1, "--max-concurrency", most, "at least 1")
    default_format = PromptFormat.TEXT if is_chat else PromptFormat.IDS
    dataset = Dataset(args.dataset_name)
    custom_output_len = None if args.custom_output_len == -1 else args.custom_output_len
    input_ratio, output_ratio = args.random_range_ratio or (0.0, None)
    # Settings that are called as their flag are read as they are.
    names = {each.name for each in fields(WorkloadConfig)} & vars(args).keys()
    settings: dict[str, Any] = {name: getattr(args, name) for name in names} | {
        "seed": secrets.randbits(31) if args.seed is None else args.seed,
        "dataset": dataset,
        "prompt_format": PromptFormat(args.prompt_format or default_format),
        "range_ratio": input_ratio,
        "output_range_ratio": output_ratio,
        "ramp": _ramp(args),
        "sharegpt_output_len": _general_or_own(args.output_len, args.sharegpt_output_len),
        "custom_output_len": _general_or_own(args.output_len, custom_output_len),
        "is_shuffled": not args.disable_shuffle,
        "is_chat": is_chat,
    }
    # The model's limit comes later: the flag of this name is that of a simulated server.
    return WorkloadConfig(**(settings | _lengths(args, dataset) | {"max_model_len": None}))


def _lengths(args: argparse.Namespace, dataset: Dataset) -> dict[str, int]:
    """The settings of synthetic prompts; prefix_repetition has vLLM's own flags for them."""
    if dataset.is_trace and args.output_len is not None:
        raise InvalidConfig(f"--output-len does not change the lengths of {dataset}; remove it")
    if dataset.is_file and args.input_len is not None:
        raise InvalidConfig(f"--input-len does not change the prompts of {dataset}; remove it")
    if dataset is Dataset.PREFIX_REPETITION:
        return {
            "input_len": _general_or_own(args.input_len, args.prefix_repetition_suffix_len),
            "output_len": _general_or_own(args.output_len, args.prefix_repetition_output_len),
            "shared_prefix_len": args.prefix_repetition_prefix_len,
            "num_prefixes": args.prefix_repetition_num_prefixes,
        }
    return {
        "input_len": _general_or_own(args.input_len, args.random_input_len),
        "output_len": _general_or_own(args.output_len, args.random_output_len),
    }


def _general_or_own(general: int | None, own: Any) -> Any:
    """vLLM's --input-len and --output-len override a dataset's own flag."""
    return own if general is None else general


def _endpoint(args: argparse.Namespace) -> str:
    """The path that --backend and --endpoint select."""
    path: str | None = args.endpoint
    if path is None:
        return BACKENDS[args.backend or "openai"]
    if not path.startswith("/"):
        raise InvalidConfig(f"--endpoint {path} must start with /, as in {COMPLETIONS}")
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
