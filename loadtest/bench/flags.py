"""The flags of `penstock bench`, which are those of `vllm bench serve`, and what they configure."""

import argparse
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.bench.sweep import SweepConfig
from penstock.loadtest.config import (
    DEFAULT_VOCAB_SIZE,
    FIRST_TOKEN_ID,
    Dataset,
    PromptFormat,
    ReportConfig,
    WorkloadConfig,
)
from penstock.loadtest.report.report import METRIC_TITLES
from penstock.loadtest.workload.arrivals import Ramp, RampStrategy
from penstock.scheduler.errors import InvalidConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# vLLM's names for the APIs, and plain ones.
BACKENDS = {
    "openai": COMPLETIONS,
    "completions": COMPLETIONS,
    "vllm": COMPLETIONS,
    "sglang": COMPLETIONS,
    "lmdeploy": COMPLETIONS,
    "llama.cpp": COMPLETIONS,
    "openai-chat": CHAT,
    "chat": CHAT,
}


SAMPLING: dict[str, type[int] | type[float]] = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
# With more, the server would be asked for longer than a person waits, or measures.
MAX_ASKED_COUNTS = 400
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"  # a header's name, by RFC 9110

# Flags of `vllm bench serve` that would change what is measured, and what to do instead.
_LORA = "adapters are models of their own; measure one with --model"
_PLOT = "use --report FILE or --plot-dir DIR, which draw the timeline and more"
_UNSERVED = {
    "--use-beam-search": "the servers measured here sample; leave it out",
    "--profile": "start the profiler at the server",
    "--tokenizer-mode": "give --tokenizer a directory with a tokenizer.json",
    "--trust-remote-code": "no code of a tokenizer is run; --tokenizer reads a tokenizer.json",
    "--skip-tokenizer-init": "leave out --tokenizer, and none is read",
    "--self-timed": "a trace comes at its own times unless --request-rate is given",
    "--no-self-timed": "give --request-rate, and a trace's times are not followed",
    "--probe-request-rate": "run a second penstock bench beside it, with --request-rate",
    "--no-oversample": "leave it out: no request is asked twice",
    "--no-stream": "leave it out: files are read from disk",
    "--disable-shuffle": "conversations are drawn by --seed; make a custom file to fix their order",
    "--skip-chat-template": "use --backend openai for bare texts, or openai-chat for conversations",
    "--chat-template-kwargs": "use --extra-body '{\"chat_template_kwargs\": {...}}'",
    "--enable-multimodal-chat": "prompts are text",
    "--no-reranker": "only completions and chat are measured",
}
_UNSERVED_FAMILIES = {
    "--lora-": _LORA,
    "--max-loras": _LORA,
    "--plot-timeline": _PLOT,
    "--plot-dataset-stats": _PLOT,
    "--timeline-itl-": _PLOT,
    "--random-mm-": "prompts are text",
    "--random-batch-size": "only completions and chat are measured",
    "--hf-": "save the set as JSONL and use --dataset-name custom",
    "--sonnet-": "use --dataset-name shared-prefix, or a custom file",
    "--spec-bench-": "save its prompts as JSONL and use --dataset-name custom",
    "--blazedit-": "save its prompts as JSONL and use --dataset-name custom",
    "--prefix-repetition-": "use --dataset-name shared-prefix with --shared-prefix-len, "
    "--num-prefixes, --random-input-len and --random-output-len",
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
        "--served-model-name", metavar="ID", help="what requests call the model; default: --model"
    )
    server.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a model's directory or a tokenizer.json, to count the tokens of texts; default: "
        f"the server's /tokenize where at most {MAX_ASKED_COUNTS} texts need it, else a guess",
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
        "--ready-check-timeout-sec",
        "--ready-timeout",
        dest="ready_timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="to wait for the server",
    )
    server.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="S", help="for one whole answer"
    )
    server.add_argument(
        "--header", nargs="+", metavar="NAME=VALUE", help="HTTP headers of every request"
    )
    server.add_argument(
        "--request-id-prefix", metavar="TEXT", help="send x-request-id: this and a number"
    )
    server.add_argument(
        "--insecure", action="store_true", help="take any TLS certificate, as a self-signed one"
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
    load.add_argument("--input-len", type=int, metavar="N", help="the same as --random-input-len")
    load.add_argument(
        "--output-len", type=int, metavar="N", help="for every dataset whose flag sets a length"
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
        "--random-prefix-len",
        type=int,
        metavar="N",
        default=0,
        help="begin all random prompts with the same N tokens more",
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
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers get their full length; default: where prompts are made up",
    )
    load.add_argument(
        "--extra-body",
        type=_json_object,
        metavar="JSON",
        default={},
        help="fields that every request has besides, such as response_format",
    )
    load.add_argument("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy")
    for name, kind in SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        load.add_argument(flag, type=kind, metavar="X", help="sent if it is given")
    load.add_argument("--logprobs", type=int, metavar="N", help="ask for this many of each token")
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
    report.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    report.add_argument("--label", metavar="NAME", help="of the result; default: the backend")
    report.add_argument(
        "--metadata", nargs="+", metavar="KEY=VALUE", help="more fields of the JSON"
    )
    report.add_argument("--save-result", action="store_true", help="write the JSON to a file")
    report.add_argument(
        "--append-result", action="store_true", help="add it to that file, as a line of its own"
    )
    report.add_argument("--save-detailed", action="store_true", help="with every request in it")
    report.add_argument("--result-dir", metavar="DIR", help="for it; default: where you are")
    report.add_argument(
        "--result-filename", metavar="NAME", help="default: made from label, rate, model and date"
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


def refuse_unserved(argv: list[str]) -> None:
    """Raises InvalidConfig for a flag of `vllm bench serve` that we know and cannot follow."""
    for argument in argv:
        flag = argument.partition("=")[0]
        advice = _UNSERVED.get(flag) or next(
            (text for start, text in _UNSERVED_FAMILIES.items() if flag.startswith(start)), None
        )
        if advice is not None:
            raise InvalidConfig(f"{flag} of vllm bench serve is not served here: {advice}")


def pairs(flag: str, texts: list[str] | None) -> dict[str, str]:
    """What --header and --metadata say. Raises InvalidConfig."""
    parsed = {}
    for text in texts or []:
        name, is_pair, value = text.partition("=")
        if not (is_pair and name.strip()):
            raise InvalidConfig(f"{flag} does not understand {text!r}; write NAME=VALUE")
        parsed[name.strip()] = value.strip()
    return parsed


def headers(args: argparse.Namespace, api_key: str | None) -> dict[str, str]:
    """Of every request; --header wins over the key. Raises InvalidConfig."""
    given = pairs("--header", args.header)
    for name, value in given.items():
        if not (re.fullmatch(_TOKEN, name) and value.isprintable() and value.isascii()):
            raise InvalidConfig(
                f"--header {name}={value!r} is no HTTP header; use letters, digits and - in the "
                "name and printable ASCII in the value"
            )
    has_own_key = any(name.lower() == "authorization" for name in given)
    return given if has_own_key or not api_key else {"Authorization": f"Bearer {api_key}"} | given


def extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling flags that were given, and --extra-body, which wins."""
    sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    return {**sampling, **args.extra_body}


def ignores_eos(args: argparse.Namespace) -> bool:
    """Lengths that were asked for are meant where the prompts mean nothing, as in vLLM."""
    if args.ignore_eos is not None:
        return bool(args.ignore_eos)
    dataset = Dataset(args.dataset_name)
    return dataset.is_trace or not dataset.is_file


def check_files(args: argparse.Namespace) -> None:
    """Raises InvalidConfig for a flag that has nothing to act on."""
    if args.save_result and args.append_result:
        raise InvalidConfig("--save-result and --append-result exclude each other; give one")
    if args.save_result or args.append_result:
        return
    for flag in ("--save-detailed", "--result-dir", "--result-filename"):
        if getattr(args, flag[2:].replace("-", "_")):
            raise InvalidConfig(f"{flag} needs --save-result or --append-result")


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
        input_len=_either(args.input_len, args.random_input_len),
        output_len=_either(args.output_len, args.random_output_len),
        range_ratio=args.random_range_ratio,
        random_prefix_len=args.random_prefix_len,
        shared_prefix_len=args.shared_prefix_len,
        num_prefixes=args.num_prefixes,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        ramp=_ramp(args),
        vocab_size=args.vocab_size,
        dataset_path=args.dataset_path,
        sharegpt_output_len=_either(args.output_len, args.sharegpt_output_len),
        custom_output_len=_either(args.output_len, args.custom_output_len),
        trace_speedup=args.trace_speedup,
        is_chat=is_chat,
    )


def _either(general: int | None, own: Any) -> Any:
    """vLLM's --input-len and --output-len win over a dataset's own flag."""
    return own if general is None else general


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
    if args.max_concurrency is not None:
        raise InvalidConfig(
            "--sweep needs requests to come when they are due; leave out --max-concurrency, which "
            "makes them wait where no latency is measured"
        )
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
