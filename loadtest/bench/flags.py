"""The flags of `penstock bench`, which are those of `vllm bench serve`, and their help."""

import argparse
from typing import Any, Literal

import msgspec

from penstock.loadtest.command_line import BenchParser, add_flags
from penstock.loadtest.workload.config import (
    DEFAULT_CUSTOM_OUTPUT_LEN,
    DEFAULT_VOCAB_SIZE,
    FIRST_TOKEN_ID,
    Dataset,
    PromptFormat,
    RampStrategy,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# vLLM's names for the APIs, and plain ones.
BACKENDS = dict.fromkeys(
    ("openai", "completions", "vllm", "sglang", "lmdeploy", "llama.cpp"), COMPLETIONS
) | dict.fromkeys(("openai-chat", "chat"), CHAT)

SAMPLING = (
    *("top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
# More would take the server longer than a person waits.
MAX_SERVER_COUNTS = 400
# vLLM's defaults.
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
# --help shows these; --help-all shows all.
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
_COMPARE_DESCRIPTION = """\
Show results of penstock bench or vllm bench serve side by side: their values,
the ratio to the first, and which of the two is better. With repeated runs, a
value is their median, and a difference counts only where the ranges of the
runs do not overlap.

  penstock bench compare before.json after.json --html compared.html
  penstock bench compare before1.json,before2.json after1.json,after2.json"""


def make_parser() -> BenchParser:
    parser = BenchParser(
        _COMMON,
        prog="penstock bench",
        usage=_USAGE,
        description=_DESCRIPTION,
    )
    add_groups(parser, *_GROUPS)
    return parser


def compare_parser() -> BenchParser:
    parser = BenchParser(prog="penstock bench compare", description=_COMPARE_DESCRIPTION)
    add_flags(parser, _COMPARE, results={"type": str})
    return parser


def add_groups(parser: BenchParser, *titles: str) -> None:
    """titles: keys of _GROUPS."""
    for title in titles:
        add_flags(parser.add_argument_group(title), _GROUPS[title], **_SETTINGS)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"it must be a JSON object ({error})") from error


def _range_ratio(text: str) -> tuple[float, float]:
    """The ratios of prompts and of outputs: a number for both, or vLLM's JSON for the two."""
    try:
        if not text.startswith("{"):
            return float(text), float(text)
        ratios = msgspec.json.decode(text, type=dict[Literal["input", "output"], float])
    except (ValueError, msgspec.MsgspecError) as error:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not valid; write 0.3 or {{"input": 0.3, "output": 0.5}}'
        ) from error
    return ratios.get("input", 0.0), ratios.get("output", 0.0)


_SERVER = {
    "--base-url URL": f"default: http://{DEFAULT_HOST}:{DEFAULT_PORT}",
    "--host HOST": f"default: {DEFAULT_HOST}",
    "--port N": f"default: {DEFAULT_PORT}",
    "--model ID": "default: the first that GET /v1/models lists",
    "--served-model-name ID": "the model's name in requests; default: --model",
    "--tokenizer PATH": "a model's directory, a tokenizer.json or a hub id, to count the tokens of "
    f"texts; default: the server's /tokenize for at most {MAX_SERVER_COUNTS} texts, else an "
    "estimate",
    "--backend, --endpoint-type NAME": f"the default, openai, is {COMPLETIONS}, and openai-chat "
    f"{CHAT}; other names: {', '.join(each for each in BACKENDS if 'openai' not in each)}",
    "--endpoint PATH": f"default: {COMPLETIONS}, or {CHAT} for chat",
    "--ready-check-timeout-sec, --ready-timeout S = 60": "how long to wait for the server",
    "--request-timeout S = 600": "time limit of one whole response",
    "--num-warmups N = 1": "requests before the measurement starts; they must succeed",
    "--header NAME=VALUE ...": "HTTP headers of every request",
    "--request-id-prefix TEXT": "send an x-request-id: this and a number",
    "--insecure": "accept any TLS certificate, such as a self-signed one",
}
_LOAD = {
    "--num-prompts N = 1000": "number of requests",
    "--request-rate R = inf": "requests per second; inf sends all at once, or at a trace's own "
    "times",
    "--max-concurrency N": "at most N in flight",
    "--burstiness B = 1": "1 is a Poisson process, less comes in bursts, more comes evenly",
    "--ramp-up-strategy": "raise the rate from --ramp-up-start-rps to --ramp-up-end-rps",
    "--ramp-up-start-rps R": "rate at the beginning",
    "--ramp-up-end-rps R": "rate at the end",
}
_PROMPTS = {
    "--seed N": "the same seed sends the same prompts; default: drawn anew, so that no prompt is "
    "in the server's prefix cache",
    f"--dataset-name NAME = {Dataset.RANDOM}": "random, shared-prefix, prefix_repetition; a "
    f"file's: {', '.join(each.value for each in Dataset if each.is_file)}",
    "--dataset-path FILE": "ShareGPT JSON, Azure or BurstGPT CSV, Mooncake JSONL, a saved result, "
    "or JSONL with prompt or messages, and perhaps max_tokens",
    "--random-input-len N = 1024": "tokens of a prompt",
    "--random-output-len N = 128": "max_tokens",
    "--random-range-ratio R": "lengths vary by this share in both directions, as 0.3 or "
    '{"input": 0.3, "output": 0.5}; default: not at all',
    "--random-prefix-len N = 0": "start every random prompt with the same N additional tokens",
    "--input-len N": "the same as --random-input-len",
    "--output-len N": "the same as --random-, --sharegpt-, --custom- or "
    "--prefix-repetition-output-len",
    "--shared-prefix-len N = 256": "tokens of a shared prefix, before --random-input-len more",
    "--num-prefixes N = 8": "different shared prefixes",
    "--prefix-repetition-prefix-len N = 256": "tokens of a shared prefix",
    "--prefix-repetition-suffix-len N = 256": "tokens of a prompt after its prefix",
    "--prefix-repetition-num-prefixes N = 10": "different shared prefixes",
    "--prefix-repetition-output-len N = 128": "max_tokens",
    "--sharegpt-output-len N": "max_tokens; default: the length of the file's response",
    "--custom-output-len N": "max_tokens of every line; default, or -1: the line's own, or "
    f"{DEFAULT_CUSTOM_OUTPUT_LEN} where a line has none",
    "--disable-shuffle": "take ShareGPT's conversations in the file's order, not drawn by --seed",
    "--trace-speedup X = 1": "replay a trace's arrivals X times as fast; inf sends all at once",
    "--prompt-format": "default: ids, if the endpoint accepts them",
    f"--vocab-size N = {DEFAULT_VOCAB_SIZE}": f"random ids are drawn from [{FIRST_TOKEN_ID}, "
    "this); the default suits every model",
}
_REQUEST = {
    "--[no-]ignore-eos": "generate the full output length; default: for synthetic prompts",
    "--temperature T = 0": "0 is greedy",
    **{f"--{name.replace('_', '-')} X": "sent if it is given" for name in SAMPLING},
    "--logprobs N": "request this many for each token",
    "--extra-body JSON": "additional fields, such as response_format; null leaves out one of ours",
}
_RESULT = {
    "--goodput METRIC:MS ...": "limits of a good request, such as ttft:200 tpot:50 e2el:5000",
    "--report FILE": "write a self-contained HTML report",
    "--plot-dir DIR": "write the figures as PNG; requires penstock[plot]",
    "--save-result": "write the result as JSON to a file",
    "--append-result": "append it to that file as a line",
    "--save-detailed": "include every request",
    "--result-filename NAME": "of that file; default: made from label, rate, model and date",
    "--result-dir DIR": "of that file; default: the current directory",
    "--json": "print the result as one line of JSON, not as text",
    "--label NAME": "of the result; default: the backend",
    "--metadata KEY=VALUE ...": "additional fields of the JSON",
    "--percentile-metrics LIST = ttft,tpot,itl,e2el": "sections to show",
    "--metric-percentiles LIST = 90,95,99": "shown besides mean and median",
    "--disable-tqdm": "no progress bar",
}
_SWEEP = {
    "--sweep": "search for the highest request rate that meets --goodput, from --request-rate, "
    "or 1",
    "--sweep-goodput-ratio R = 0.99": "share of good requests that a rate requires",
    "--sweep-seconds S = 20": "duration of each rate; up to three times that to reach 100 requests",
    "--sweep-precision R = 0.05": "stop when the limit is known to this relative precision",
}
_CHECK = {
    "--check FILE": "a plan of penstock plan: compare what it expects with what happened, and exit "
    "with 1 where a figure is outside of its error bar, with 3 where the bars are too wide to test",
}
_COMPARE = {
    "results FILE ...": "of --save-result, or of --append-result for repeated runs; commas join "
    "the files of repeated runs",
    "--html FILE": "write a page too",
}
_GROUPS = {
    "server": _SERVER,
    "load": _LOAD,
    "prompts": _PROMPTS,
    "other fields of every request": _REQUEST,
    "results": _RESULT,
    "sweep": _SWEEP,
    "check": _CHECK,
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "backend": {"choices": [*BACKENDS]},
    "ready_check_timeout_sec": {"dest": "ready_timeout"},
    "endpoint": {"type": str},
    "ramp_up_strategy": {"choices": [each.value for each in RampStrategy]},
    "dataset_name": {"choices": [each.value for each in Dataset]},
    "random_range_ratio": {"type": _range_ratio},
    "prompt_format": {"choices": [each.value for each in PromptFormat]},
    "top_k": {"type": int},
    "extra_body": {"type": _json_object},
}
