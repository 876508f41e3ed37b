"""The flags of `penstock bench`, which are those of `vllm bench serve`: parser and help.

Flags of vLLM that are not supported are refused by name, each with an alternative.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.workload.arrivals import RampStrategy
from penstock.loadtest.workload.config import (
    DEFAULT_VOCAB_SIZE,
    FIRST_TOKEN_ID,
    Dataset,
    PromptFormat,
)
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
# More would take the server longer than a person waits.
MAX_SERVER_COUNTS = 400

# Flags of `vllm bench serve` that would change the measurement, and what to do instead.
_LORA = "each adapter is a model; measure one with --model"
_PLOT = "use --report FILE or --plot-dir DIR, which draw the timeline and more"
_UNSUPPORTED = {
    "--use-beam-search": "beam search is not measured; leave it out",
    "--profile": "start the profiler on the server",
    "--tokenizer-mode": "give --tokenizer a directory with a tokenizer.json",
    "--trust-remote-code": "--tokenizer reads a tokenizer.json and runs no code of it",
    "--skip-tokenizer-init": "leave out --tokenizer; then none is read",
    "--self-timed": "a trace is replayed at its own times unless --request-rate is given",
    "--no-self-timed": "give --request-rate, which replaces a trace's times",
    "--probe-request-rate": "run a second penstock bench at the same time, with --request-rate",
    "--no-oversample": "leave it out: no request is sent twice",
    "--no-stream": "leave it out: files are read from disk",
    "--disable-shuffle": "--seed draws the conversations; use a custom file to fix their order",
    "--skip-chat-template": "use --backend openai for bare texts, or openai-chat for conversations",
    "--chat-template-kwargs": "use --extra-body '{\"chat_template_kwargs\": {...}}'",
    "--enable-multimodal-chat": "prompts are text",
    "--no-reranker": "only completions and chat are measured",
}
_UNSUPPORTED_PREFIXES = {
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
    """Shows the default of each flag that has one."""

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
        "--served-model-name", metavar="ID", help="the model's name in requests; default: --model"
    )
    server.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a model's directory or a tokenizer.json, to count the tokens of texts; default: "
        f"the server's /tokenize for at most {MAX_SERVER_COUNTS} texts, else an estimate",
    )
    server.add_argument(
        "--backend",
        "--endpoint-type",
        choices=[*BACKENDS],
        help="the API: completions (openai, the default), or chat, with text prompts",
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
        help="how long to wait for the server",
    )
    server.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit of one whole response",
    )
    server.add_argument(
        "--header", nargs="+", metavar="NAME=VALUE", help="HTTP headers of every request"
    )
    server.add_argument(
        "--request-id-prefix", metavar="TEXT", help="send an x-request-id: this and a number"
    )
    server.add_argument(
        "--insecure",
        action="store_true",
        help="accept any TLS certificate, such as a self-signed one",
    )

    load = parser.add_argument_group("workload")
    load.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="the same seed gives the same requests; default: drawn anew, so that no prompt is in "
        "the server's prefix cache",
    )
    load.add_argument("--num-prompts", type=int, metavar="N", default=1000, help="requests")
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        default=math.inf,
        help="requests per second; inf sends all at once, or at a trace's own times",
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
        choices=[each.value for each in RampStrategy],
        help="raise the rate from --ramp-up-start-rps to --ramp-up-end-rps",
    )
    load.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="rate at the beginning")
    load.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="rate at the end")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="at most N in flight")
    load.add_argument(
        "--dataset-name",
        choices=[each.value for each in Dataset],
        default=Dataset.RANDOM,
        help="synthetic prompts that share nothing or a prefix, or a file's",
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
        help="max_tokens; default: the length of the file's response",
    )
    load.add_argument("--input-len", type=int, metavar="N", help="the same as --random-input-len")
    load.add_argument(
        "--output-len", type=int, metavar="N", help="overrides the output length of every dataset"
    )
    load.add_argument(
        "--custom-output-len",
        type=int,
        metavar="N",
        default=256,
        help="max_tokens of lines that have none",
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
        help="lengths vary by this share in both directions",
    )
    load.add_argument(
        "--random-prefix-len",
        type=int,
        metavar="N",
        default=0,
        help="start every random prompt with the same N additional tokens",
    )
    load.add_argument(
        "--shared-prefix-len",
        type=int,
        metavar="N",
        default=256,
        help="tokens of a shared prefix, before --random-input-len more",
    )
    load.add_argument(
        "--num-prefixes",
        type=int,
        metavar="N",
        default=8,
        help="number of different shared prefixes",
    )
    load.add_argument(
        "--prompt-format",
        choices=[each.value for each in PromptFormat],
        help="default: ids, if the endpoint accepts them",
    )
    load.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        default=DEFAULT_VOCAB_SIZE,
        help=f"random ids are drawn from [{FIRST_TOKEN_ID}, this); the default suits every model",
    )
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate the full output length; default: for synthetic prompts",
    )
    load.add_argument(
        "--extra-body",
        type=_json_object,
        metavar="JSON",
        default={},
        help="additional fields of every request, such as response_format",
    )
    load.add_argument("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy")
    for name, kind in SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        load.add_argument(flag, type=kind, metavar="X", help="sent if it is given")
    load.add_argument("--logprobs", type=int, metavar="N", help="request this many for each token")
    load.add_argument(
        "--num-warmups",
        type=int,
        metavar="N",
        default=1,
        help="requests before the measurement starts; they must succeed",
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
        help="shown besides mean and median",
    )
    report.add_argument(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="limits of a good request, such as ttft:200 tpot:50 e2el:5000",
    )
    report.add_argument(
        "--report", type=Path, metavar="FILE", help="write a self-contained HTML report"
    )
    report.add_argument(
        "--plot-dir",
        type=Path,
        metavar="DIR",
        help="write the figures as PNG; requires penstock[plot]",
    )
    report.add_argument("--json", action="store_true", help="print only the JSON line")
    report.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    report.add_argument("--label", metavar="NAME", help="of the result; default: the backend")
    report.add_argument(
        "--metadata", nargs="+", metavar="KEY=VALUE", help="additional fields of the JSON"
    )
    report.add_argument("--save-result", action="store_true", help="write the JSON to a file")
    report.add_argument(
        "--append-result", action="store_true", help="append it to that file as a line"
    )
    report.add_argument("--save-detailed", action="store_true", help="include every request")
    report.add_argument(
        "--result-dir", metavar="DIR", help="of the file; default: the current directory"
    )
    report.add_argument(
        "--result-filename", metavar="NAME", help="default: made from label, rate, model and date"
    )
    _add_sweep(parser)
    return parser


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    sweep = parser.add_argument_group(
        "sweep",
        "The highest request rate that meets --goodput; the rate sets the number of prompts.",
    )
    sweep.add_argument(
        "--sweep",
        action="store_true",
        help="search from --request-rate, or 1, by doubling, then by bisection",
    )
    sweep.add_argument(
        "--sweep-goodput-ratio",
        type=float,
        metavar="R",
        default=0.99,
        help="share of good requests that a rate requires",
    )
    sweep.add_argument(
        "--sweep-seconds",
        type=float,
        metavar="S",
        default=20.0,
        help="duration of each rate; up to three times that to reach 100 requests",
    )
    sweep.add_argument(
        "--sweep-precision",
        type=float,
        metavar="R",
        default=0.05,
        help="stop when the limit is known to this relative precision",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"it must be a JSON object ({error})") from error


def refuse_unsupported(argv: list[str]) -> None:
    """Raises InvalidConfig for a flag of `vllm bench serve` that is not supported."""
    for argument in argv:
        flag = argument.partition("=")[0]
        advice = _UNSUPPORTED.get(flag) or next(
            (text for start, text in _UNSUPPORTED_PREFIXES.items() if flag.startswith(start)), None
        )
        if advice is not None:
            raise InvalidConfig(f"{flag} of vllm bench serve is not supported: {advice}")
