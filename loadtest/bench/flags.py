"""The flags of `penstock bench`, which are those of `vllm bench serve`, and their help."""

import argparse
import math
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.loadtest.parser import BenchParser
from penstock.loadtest.workload.arrivals import RampStrategy
from penstock.loadtest.workload.config import (
    DEFAULT_CUSTOM_OUTPUT_LEN,
    DEFAULT_VOCAB_SIZE,
    FIRST_TOKEN_ID,
    Dataset,
    PromptFormat,
)

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
# Of prompts and of outputs.
RangeRatio: TypeAlias = tuple[float, float]
# More would take the server longer than a person waits.
MAX_SERVER_COUNTS = 400
# vLLM's defaults.
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
# What --help shows; --help-all shows all.
_COMMON = frozenset(
    {
        *("--base-url", "--model", "--backend", "--num-prompts", "--request-rate"),
        *("--max-concurrency", "--dataset-name", "--dataset-path", "--random-input-len"),
        *("--random-output-len", "--seed", "--goodput", "--save-result", "--result-filename"),
        *("--report", "--json", "--sweep"),
    }
)
_USAGE = """\
penstock bench [flags]
       penstock bench compare FILE FILE [...] [--html FILE]"""
_DESCRIPTION = """\
Measure any OpenAI-compatible server, with the flags of vllm bench serve.
OPENAI_API_KEY is sent to it if that is set.

  penstock bench --num-prompts 64 --max-concurrency 16
  penstock bench --request-rate 4 --goodput ttft:200 tpot:50 --report out.html
  penstock bench compare before.json after.json"""


def make_parser() -> BenchParser:
    parser = BenchParser(
        _COMMON,
        prog="penstock bench",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog="penstock bench --help-all describes every flag.",
    )
    _add_server(parser)
    add_load(parser)
    add_dataset(parser)
    _add_request(parser)
    add_result(parser)
    _add_sweep(parser)
    _add_check(parser)
    parser.hide_uncommon()
    return parser


def _add_server(parser: BenchParser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--base-url", metavar="URL", help=f"default: http://{DEFAULT_HOST}:{DEFAULT_PORT}")
    add("--host", metavar="HOST", help=f"default: {DEFAULT_HOST}")
    add("--port", type=int, metavar="N", help=f"default: {DEFAULT_PORT}")
    add("--model", metavar="ID", help="default: the first that GET /v1/models lists")
    add("--served-model-name", metavar="ID", help="the model's name in requests; default: --model")
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a model's directory, a tokenizer.json or a hub id, to count the tokens of texts; "
        f"default: the server's /tokenize for at most {MAX_SERVER_COUNTS} texts, else an estimate",
    )
    add(
        "--backend",
        "--endpoint-type",
        choices=[*BACKENDS],
        metavar="NAME",
        help=f"the default, openai, is {COMPLETIONS}, and openai-chat {CHAT}; other names: "
        f"{', '.join(each for each in BACKENDS if 'openai' not in each)}",
    )
    add("--endpoint", metavar="PATH", help=f"default: {COMPLETIONS}, or {CHAT} for chat")
    add(
        "--ready-check-timeout-sec",
        "--ready-timeout",
        dest="ready_timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="how long to wait for the server",
    )
    add(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit of one whole response",
    )
    add(
        "--num-warmups",
        type=int,
        metavar="N",
        default=1,
        help="requests before the measurement starts; they must succeed",
    )
    add("--header", nargs="+", metavar="NAME=VALUE", help="HTTP headers of every request")
    add("--request-id-prefix", metavar="TEXT", help="send an x-request-id: this and a number")
    add(
        "--insecure",
        action="store_true",
        help="accept any TLS certificate, such as a self-signed one",
    )


def add_load(parser: BenchParser) -> None:
    group = parser.add_argument_group("load")
    add = group.add_argument
    add("--num-prompts", type=int, metavar="N", default=1000, help="number of requests")
    add(
        "--request-rate",
        type=float,
        metavar="R",
        default=math.inf,
        help="requests per second; inf sends all at once, or at a trace's own times",
    )
    add("--max-concurrency", type=int, metavar="N", help="at most N in flight")
    add(
        "--burstiness",
        type=float,
        metavar="B",
        default=1.0,
        help="1 is a Poisson process, less comes in bursts, more comes evenly",
    )
    add(
        "--ramp-up-strategy",
        choices=[each.value for each in RampStrategy],
        help="raise the rate from --ramp-up-start-rps to --ramp-up-end-rps",
    )
    add("--ramp-up-start-rps", type=float, metavar="R", help="rate at the beginning")
    add("--ramp-up-end-rps", type=float, metavar="R", help="rate at the end")


def add_dataset(parser: BenchParser) -> None:
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add(
        "--seed",
        type=int,
        metavar="N",
        help="the same seed sends the same prompts; default: drawn anew, so that no prompt is in "
        "the server's prefix cache",
    )
    add(
        "--dataset-name",
        choices=[each.value for each in Dataset],
        default=Dataset.RANDOM,
        metavar="NAME",
        help="random, shared-prefix, prefix_repetition; a file's: "
        f"{', '.join(each.value for each in Dataset if each.is_file)}",
    )
    add(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="ShareGPT JSON, Azure or BurstGPT CSV, Mooncake JSONL, a saved result, or JSONL with "
        "prompt or messages, and perhaps max_tokens",
    )
    add("--random-input-len", type=int, metavar="N", default=1024, help="tokens of a prompt")
    add("--random-output-len", type=int, metavar="N", default=128, help="max_tokens")
    add(
        "--random-range-ratio",
        type=_range_ratio,
        metavar="R",
        help="lengths vary by this share in both directions, as 0.3 or "
        '{"input": 0.3, "output": 0.5}; default: not at all',
    )
    add(
        "--random-prefix-len",
        type=int,
        metavar="N",
        default=0,
        help="start every random prompt with the same N additional tokens",
    )
    add("--input-len", type=int, metavar="N", help="the same as --random-input-len")
    add(
        "--output-len",
        type=int,
        metavar="N",
        help="the same as --random-, --sharegpt-, --custom- or --prefix-repetition-output-len",
    )
    add(
        "--shared-prefix-len",
        type=int,
        metavar="N",
        default=256,
        help="tokens of a shared prefix, before --random-input-len more",
    )
    add("--num-prefixes", type=int, metavar="N", default=8, help="different shared prefixes")
    for name, default, text in (
        ("prefix-len", 256, "tokens of a shared prefix"),
        ("suffix-len", 256, "tokens of a prompt after its prefix"),
        ("num-prefixes", 10, "different shared prefixes"),
        ("output-len", 128, "max_tokens"),
    ):
        add(f"--prefix-repetition-{name}", type=int, metavar="N", default=default, help=text)
    add(
        "--sharegpt-output-len",
        type=int,
        metavar="N",
        help="max_tokens; default: the length of the file's response",
    )
    add(
        "--custom-output-len",
        type=int,
        metavar="N",
        help="max_tokens of every line; default, or -1: the line's own, or "
        f"{DEFAULT_CUSTOM_OUTPUT_LEN} where a line has none",
    )
    add(
        "--disable-shuffle",
        action="store_true",
        help="take ShareGPT's conversations in the file's order, not drawn by --seed",
    )
    add(
        "--trace-speedup",
        type=float,
        metavar="X",
        default=1.0,
        help="replay a trace's arrivals X times as fast; inf sends all at once",
    )
    add(
        "--prompt-format",
        choices=[each.value for each in PromptFormat],
        help="default: ids, if the endpoint accepts them",
    )
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        default=DEFAULT_VOCAB_SIZE,
        help=f"random ids are drawn from [{FIRST_TOKEN_ID}, this); the default suits every model",
    )


def _add_request(parser: BenchParser) -> None:
    group = parser.add_argument_group("other fields of every request")
    add = group.add_argument
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate the full output length; default: for synthetic prompts",
    )
    add("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy")
    for name, kind in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="sent if it is given")
    add("--logprobs", type=int, metavar="N", help="request this many for each token")
    add(
        "--extra-body",
        type=_json_object,
        metavar="JSON",
        help="additional fields, such as response_format; null leaves out one of ours",
    )


def add_result(parser: BenchParser) -> None:
    group = parser.add_argument_group("results")
    add = group.add_argument
    add(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="limits of a good request, such as ttft:200 tpot:50 e2el:5000",
    )
    add("--report", type=Path, metavar="FILE", help="write a self-contained HTML report")
    add(
        "--plot-dir",
        type=Path,
        metavar="DIR",
        help="write the figures as PNG; requires penstock[plot]",
    )
    add("--save-result", action="store_true", help="write the result as JSON to a file")
    add("--append-result", action="store_true", help="append it to that file as a line")
    add("--save-detailed", action="store_true", help="include every request")
    add(
        "--result-filename",
        metavar="NAME",
        help="of that file; default: made from label, rate, model and date",
    )
    add("--result-dir", metavar="DIR", help="of that file; default: the current directory")
    add("--json", action="store_true", help="print the result as one line of JSON, not as text")
    add("--label", metavar="NAME", help="of the result; default: the backend")
    add("--metadata", nargs="+", metavar="KEY=VALUE", help="additional fields of the JSON")
    add(
        "--percentile-metrics",
        metavar="LIST",
        default="ttft,tpot,itl,e2el",
        help="sections to show",
    )
    add(
        "--metric-percentiles",
        metavar="LIST",
        default="90,95,99",
        help="shown besides mean and median",
    )
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _add_check(parser: BenchParser) -> None:
    parser.add_argument_group("check").add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="a plan of penstock plan: compare what it expects with what happened, and exit with 1 "
        "where a figure is outside of its error bar",
    )


def _add_sweep(parser: BenchParser) -> None:
    group = parser.add_argument_group("sweep")
    add = group.add_argument
    add(
        "--sweep",
        action="store_true",
        help="search for the highest request rate that meets --goodput, from --request-rate, or 1",
    )
    add(
        "--sweep-goodput-ratio",
        type=float,
        metavar="R",
        default=0.99,
        help="share of good requests that a rate requires",
    )
    add(
        "--sweep-seconds",
        type=float,
        metavar="S",
        default=20.0,
        help="duration of each rate; up to three times that to reach 100 requests",
    )
    add(
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


def _range_ratio(text: str) -> RangeRatio:
    """A number for both, or vLLM's JSON for the two."""
    try:
        if not text.startswith("{"):
            return float(text), float(text)
        ratios = msgspec.json.decode(text, type=dict[Literal["input", "output"], float])
    except (ValueError, msgspec.MsgspecError) as error:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not valid; write 0.3 or {{"input": 0.3, "output": 0.5}}'
        ) from error
    return ratios.get("input", 0.0), ratios.get("output", 0.0)
