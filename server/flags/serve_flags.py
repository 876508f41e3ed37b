"""What `penstock serve` takes: its flags, their help and their defaults.

It knows no value that was given: `serve_config` makes a config of them.
"""

import argparse
import contextlib
import json
from enum import StrEnum
from pathlib import Path

from penstock.engine.client import (
    AttentionBackend,
    Device,
    Dtype,
    KVCacheDtype,
    LoadFormat,
    LogFormat,
    ModelImpl,
    Quantization,
)
from penstock.scheduler.config import Batching, Policy
from penstock.scheduler.types import Pooling
from penstock.server.config import MIB, DuringRestart, PoolerConfig
from penstock.server.flags.flag_values import (
    Extend,
    kv_cache_dtype,
    kv_events_config,
    lora_module,
    size,
)
from penstock.server.observability.metrics_alias import MetricsAlias
from penstock.server.output.reasoning import ReasoningFormat
from penstock.server.tools.chat_format import NO_PARSER
from penstock.server.tools.parsers import ToolFormat

TOOL_PARSERS = tuple(form.value for form in ToolFormat)
REASONING_PARSERS = tuple(form.value for form in ReasoningFormat)
# The demo uses the second name for itself in its training examples.
DEMO_NAMES = ("penstock-demo", "demo")
_GROUPS = "int8 has a scale for each 32 weights"
_INSTEAD = "use " + " or ".join(Quantization)
# Values of vLLM's --quantization, by what vLLM does with them.
_VLLM_AT_LOAD = {
    "int8_per_channel_weight_only": f"{_GROUPS}, not one a channel: use int8, which loses less",
    "fp8_per_channel": "use fp8, which has a scale for each row",
    **dict.fromkeys(
        (
            "fp8_per_tensor",
            "fp8_per_block",
            "nvfp4_per_token",
            "mxfp8",
            "online",
        ),
        _INSTEAD,
    ),
}
_VLLM_STORED = (
    *("awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "modelopt"),
    *("modelopt_fp4", "bitsandbytes", "mxfp4", "gguf", "torchao", "quark", "auto-round"),
)
_LOG_LEVELS = ("debug", "info", "warning", "error")


def add_serve_flags(serve: argparse.ArgumentParser) -> None:
    """What `penstock serve` takes; each flag's help ends with its default, for docs/flags.md."""
    model = serve.add_mutually_exclusive_group()
    model.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a directory in Hugging Face's layout, a GGUF file, or a hub id, with OWNER/NAME:Q8_0 "
        "for one of its GGUF files (default: the bundled demo model)",
    )
    model.add_argument(
        "--model",
        dest="model_flag",
        metavar="MODEL",
        help="the same as a flag, as in vLLM (default: MODEL)",
    )
    serve.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a YAML or JSON file of flags, as `max-model-len: 4096`; the command line and "
        "PENSTOCK_* variables override it (default: none)",
    )
    _add_listening_flags(serve.add_argument_group("listening"))
    _add_model_flags(serve.add_argument_group("model"))
    _add_lora_flags(serve.add_argument_group("LoRA adapters"))
    _add_memory_flags(serve.add_argument_group("memory"))
    _add_scheduling_flags(serve.add_argument_group("scheduling"))
    _add_api_flags(serve.add_argument_group("API"))
    _add_security_flags(serve.add_argument_group("security"))
    _add_cors_flags(serve.add_argument_group("pages of other origins (CORS)"))
    _add_log_flags(serve.add_argument_group("logs, metrics and traces"))
    _add_development_flags(serve.add_argument_group("development"))


def _add_listening_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 accepts other machines (default: %(default)s)",
    )
    flag(
        "--port",
        type=int,
        metavar="N",
        default=8000,
        help="port to listen on (default: %(default)s)",
    )
    flag("--no-ui", action="store_true", help="no page at / (default: the page is served)")
    flag(
        "--root-path",
        default="",
        metavar="PATH",
        help="path under which a proxy publishes this server, such as /llm (default: none)",
    )
    flag(
        "--ssl-certfile",
        type=Path,
        metavar="FILE",
        help="serve HTTPS with this certificate and its chain, PEM (default: no TLS)",
    )
    flag(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="the certificate's private key, PEM (default: in the file of the certificate)",
    )
    flag(
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        default=30.0,
        help="how long running requests may take to finish after SIGTERM; a container's own grace "
        "period must be longer (default: %(default)s)",
    )
    flag(
        "--sse-ping-interval",
        type=float,
        metavar="SECONDS",
        default=15.0,
        help="a stream without output for this long gets a comment; lower it if a proxy closes "
        "idle connections sooner (default: %(default)s)",
    )


def _add_model_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that clients may use for the model; answers contain the first "
        f"(default: MODEL as given, {DEMO_NAMES[0]} for the demo)",
    )
    _add_choice(
        group, "--device", Device, "where the model runs; auto is CUDA if there is a GPU, else CPU"
    )
    _add_choice(
        group,
        "--dtype",
        Dtype,
        "type of weights, and of the KV cache unless --kv-cache-dtype says otherwise; auto is "
        "bfloat16 if the device computes it, else float32; "
        "half is float16 and float is float32, as in vLLM",
    )
    _add_choice(
        group,
        "--load-format",
        LoadFormat,
        "auto reads the weights; dummy makes random ones in the shape of config.json, to measure "
        "speed",
    )
    flag(
        "-q",
        "--quantization",
        type=_quantization,
        metavar="|".join(Quantization),
        help="round the weights of linear layers at load: int8 takes half of bfloat16's memory and "
        "changes next to nothing, int4 a third and changes a little, fp8 half and changes "
        "more than int8; the log says how much. The result is kept in "
        "~/.cache/penstock/quantized (default: weights as they are)",
    )
    flag(
        "--quantization-report",
        action="store_true",
        help="with --quantization: compare the quantized model with the unquantized one at this "
        "start, and log the figures; else those of the start that rounded the weights count "
        "(default: off)",
    )
    flag(
        "--language-model-only",
        action="store_true",
        help="of a model of text and images, serve the text model, as in vLLM; without it the same "
        "is done with a warning, as encoders of images are not supported (default: off)",
    )
    _add_choice(
        group,
        "--model-impl",
        ModelImpl,
        "whose implementation of the model's family is used: penstock is our own, transformers is "
        "the class of that library, over the same KV cache, which is slow; auto is ours where "
        "there is one. vLLM's flag, whose vllm is penstock here",
    )
    _add_choice(
        group,
        "--attention-backend",
        AttentionBackend,
        "what computes attention on a GPU; auto is triton, our own kernels; flash_attn must be "
        "installed, and requires --block-size 256; torch is slow, and shows whether a "
        "kernel or the model is at fault",
    )
    flag(
        "--enforce-eager",
        action="store_true",
        help="no CUDA graphs: slower steps, a faster start, less memory (default: off)",
    )
    flag(
        "--num-threads",
        type=int,
        metavar="N",
        help="CPU threads that compute; lower it if other programs need the cores "
        "(default: all cores)",
    )
    flag(
        "-tp",
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        default=1,
        help="split each layer over N processes, each with a GPU of its own or a share of the "
        "cores; --kv-cache-memory-bytes and --num-threads are of each (default: %(default)s)",
    )
    flag(
        "-pp",
        "--pipeline-parallel-size",
        type=int,
        metavar="N",
        default=1,
        help="cut the layers into N stages, each in processes of its own that compute different "
        "steps at the same time, on GPUs of their own or on a CPU (default: %(default)s)",
    )


def _add_lora_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--enable-lora",
        action="store_true",
        help="serve LoRA adapters of the model, each as a model of its own name (default: off)",
    )
    flag(
        "--lora-modules",
        nargs="+",
        action=Extend,
        default=[],
        type=lora_module,
        metavar="NAME=PATH",
        help="adapters to load at the start, from directories as PEFT saves them; or vLLM's JSON, "
        '{"name": NAME, "path": PATH, "base_model_name": PARENT} (default: none)',
    )
    flag(
        "--max-loras",
        type=int,
        metavar="N",
        default=8,
        help="how many adapters may be loaded at a time; all of them stay in memory, and may be in "
        "one step; a GPU takes the memory of so many at the start (default: %(default)s)",
    )
    flag(
        "--max-lora-rank",
        type=int,
        metavar="RANK",
        default=16,
        help="the highest rank of an adapter; one with a higher one is refused; a GPU takes memory "
        "for it at the start, whatever the adapters' own (default: %(default)s)",
    )
    flag(
        "--lora-root",
        type=Path,
        metavar="DIRECTORY",
        help="below which adapters may be loaded while the server runs, on /v1/load_lora_adapter; "
        "links out of it are refused (default: none, and the routes load nothing)",
    )
    flag(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="a file with the key that loading and unloading adapters needs, in the header "
        "x-penstock-admin-key (default: none, and nobody may)",
    )


def _add_memory_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--max-model-len",
        type=size,
        metavar="TOKENS",
        help="tokens of the longest sequence, prompt and answer together; lower it if one full "
        "sequence does not fit in the KV cache (default: the model's)",
    )
    flag(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        default=0.9,
        help="share of the GPU's memory that may be used, other programs included; the KV cache "
        "gets what weights, graphs and activations leave of it; lower it if another program shares "
        "the GPU (default: %(default)s)",
    )
    flag(
        "--kv-cache-memory-bytes",
        type=size,
        metavar="BYTES",
        help="memory of the KV cache; more of it holds more or longer sequences (default: on CPU a "
        "quarter of the free memory, on CUDA what --gpu-memory-utilization leaves)",
    )
    flag(
        "--kv-cache-dtype",
        type=kv_cache_dtype,
        metavar="auto|int8|fp8",
        default=KVCacheDtype.AUTO,
        help="type of keys and values in the KV cache; int8 and fp8 (e4m3) hold nearly twice as "
        "many tokens as bfloat16, and outputs differ a little (default: auto, the type of --dtype)",
    )
    flag(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help="tokens of a KV block; smaller blocks waste less memory at the end of a sequence and "
        "share shorter beginnings of prompts (default: 16 on CPU, 64 on CUDA)",
    )
    flag(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the KV blocks of prompts that begin alike (default: on)",
    )
    flag(
        "--kv-events-config",
        type=kv_events_config,
        metavar="JSON",
        help="send events of KV blocks by ZeroMQ, as vLLM does, for routers that go by prefixes: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": '
        '"tcp://*:5558", "topic": "", "buffer_steps": 10000, "hwm": 100000, "max_queue_size": '
        "100000}. They have the token ids of prompts: let only those connect who may read them "
        "(default: none are sent)",
    )
    flag(
        "--kv-offload-dir",
        type=Path,
        metavar="DIR",
        help="write KV blocks to files in this directory when no sequence uses them any more, and "
        "read them when a prompt begins with them and that is quicker than computing it, after a "
        "restart too; several servers and models may share it. They are what prompts said: keep "
        "the directory private (default: blocks end with their memory)",
    )
    flag(
        "--kv-offload-gb",
        type=float,
        metavar="GIB",
        help="on a GPU: GiB of this machine's memory, pinned, to which KV blocks go when no "
        "sequence uses them any more, before they go to --kv-offload-dir, and from which they come "
        "back. On a CPU, whose memory --kv-cache-memory-bytes limits: the same as "
        "--kv-offload-disk-gb (default: none; with --kv-offload-dir 10, or a quarter of what is "
        "free)",
    )
    flag(
        "--kv-offload-disk-gb",
        type=float,
        metavar="GIB",
        help="most GiB that all files in --kv-offload-dir may take, of every server and model "
        "that uses it; those that were used least recently are removed (default: 10)",
    )


def _add_scheduling_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--max-num-seqs",
        type=int,
        metavar="N",
        default=256,
        help="most sequences that run together; raise it for throughput, lower it for TPOT "
        "(default: %(default)s)",
    )
    flag(
        "--max-num-batched-tokens",
        type=size,
        metavar="TOKENS",
        default=2048,
        help="most tokens of one step, prefill chunks and decodes; raise it for a shorter TTFT, "
        "lower it for a shorter ITL of running streams (default: %(default)s)",
    )
    flag(
        "--max-num-queued-reqs",
        type=int,
        metavar="N",
        default=1024,
        help="most answers that may wait; further ones get status 429 (default: %(default)s)",
    )
    flag(
        "--max-engine-restarts",
        type=int,
        metavar="N",
        default=10,
        help="how often within ten minutes an engine process that ended or stalled is replaced, so "
        "that open requests go on; after that the server ends with exit code 1 (default: "
        "%(default)s; 0: never)",
    )
    flag(
        "--engine-stall-timeout",
        type=float,
        metavar="SECONDS",
        default=120.0,
        help="the engine process is replaced when it has done nothing for this long although there "
        "is work, or for ten times the longest step that the hardware's speed explains, whichever "
        "is longer (default: %(default)s)",
    )
    _add_choice(
        group,
        "--during-engine-restart",
        DuringRestart,
        "what becomes of new requests meanwhile: refuse answers 503 with Retry-After, wait lets "
        "them wait",
    )
    flag(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="an answer that takes longer, queueing included, ends with an error; status 504 if "
        "nothing was sent yet (default: none)",
    )
    _add_choice(
        group,
        "--scheduling-policy",
        Policy,
        "which request is next: the first to arrive; the one with the lowest `priority` field, and "
        "of every 8 one that has waited longest; or the one of the API key, or without keys of the "
        "address, for which least was computed",
    )
    flag(
        "--itl-target-ms",
        type=float,
        metavar="MS",
        help="a step runs no more of prompts than lets it end within this time, but 64 tokens at "
        "least; a request's header x-slo-tpot-ms asks for slower steps (default: none)",
    )
    flag(
        "--ttft-target-ms",
        type=float,
        metavar="MS",
        help="a request whose first token is expected later than this after its arrival gets "
        "status 429; its own header x-slo-ttft-ms overrides it (default: none)",
    )
    flag(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="of penstock calibrate: how long steps take, until enough of this server have run "
        "(default: by the device's peaks)",
    )
    _add_choice(
        group,
        "--batching",
        Batching,
        "when waiting requests may join: at every step, or only when the previous batch has ended, "
        "which is slower and exists for comparison",
    )


def _add_api_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja chat template (default: the model's own)",
    )
    flag(
        "--tool-call-parser",
        choices=[*TOOL_PARSERS, NO_PARSER],
        help="how the model writes tool calls (default: detected from its chat template)",
    )
    flag(
        "--reasoning-parser",
        choices=[*REASONING_PARSERS, NO_PARSER],
        help="how the model marks its reasoning (default: detected from its chat template)",
    )
    flag(
        "--pooler-config",
        type=_pooler_config,
        default=PoolerConfig(),
        metavar="JSON",
        help='how embeddings are made, such as {"pooling_type": "MEAN", "normalize": true}; '
        "pooling_type is LAST or MEAN (default: as the model's directory says, else the last "
        "token's state, normalized)",
    )
    flag(
        "--max-stored-responses",
        type=int,
        metavar="N",
        default=4096,
        help="most responses that /v1/responses keeps for previous_response_id; 0 keeps none "
        "(default: %(default)s)",
    )
    flag(
        "--max-stored-response-bytes",
        type=size,
        metavar="BYTES",
        default=256 * MIB,
        help="most memory that these responses take (default: %(default)s, 256 MiB)",
    )


def _add_security_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--api-key",
        nargs="+",
        action=Extend,
        metavar="KEY",
        help="accept only requests with one of these keys, on every route except /health, /ping, "
        "/ready and the page at / (default: $PENSTOCK_API_KEY, else no key is needed)",
    )
    flag(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="more such keys, one per line; unlike those of --api-key, other users of the machine "
        "cannot see them in the list of processes (default: none)",
    )
    flag(
        "--handover-key-file",
        type=Path,
        metavar="FILE",
        help="a file with the key with which a router may resume, on /internal/resume, streams "
        "that another server began (default: none, and nobody may)",
    )
    flag(
        "--allowed-hosts",
        nargs="+",
        action=Extend,
        default=[],
        metavar="NAME",
        help="more names in the Host header by which clients may call this server, besides those "
        "of this machine and --host; * allows any (default: none where --host is an address of "
        "this machine alone, else any)",
    )
    flag(
        "--max-body-bytes",
        type=size,
        metavar="BYTES",
        default=16 * MIB,
        help="the largest request body; a larger one gets status 413. All streams wait while it is "
        "parsed, for 3 ms per MiB at worst (default: %(default)s, 16 MiB)",
    )
    flag(
        "--trust-request-chat-template",
        action="store_true",
        help="accept chat templates in requests; each runs in a process of its own, with little "
        "time and memory (default: off)",
    )


def _add_log_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--log-level",
        choices=_LOG_LEVELS,
        default="info",
        help="log messages of this level and above (default: %(default)s)",
    )
    _add_choice(
        group,
        "--log-format",
        LogFormat,
        "format of the log; json is one object per line, for log collectors",
    )
    flag(
        "--log-requests",
        "--enable-log-requests",
        action="store_true",
        help="log a line for each request, without any of its text: ids, status, tokens and times "
        "(default: only at --log-level debug)",
    )
    flag(
        "--metrics-alias",
        choices=[alias.value for alias in MetricsAlias],
        help="export the metrics under this server's names too, for dashboards and autoscalers "
        "made for it (default: only our names)",
    )
    flag(
        "--record-traffic",
        type=Path,
        metavar="FILE",
        help="keep the arrivals and lengths of the last hour, and hashes of the prompts' blocks "
        "but no text, for penstock simulate --dataset-name traffic (default: none)",
    )
    flag(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a trace of each request to this URL by OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces; needs penstock[otel] (default: no traces)",
    )


def _add_development_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--scripted",
        action="store_true",
        help="generate made-up tokens without a model, to test the server or a client "
        "(default: off)",
    )
    flag(
        "--scripted-step-ms",
        type=float,
        metavar="MS",
        default=0.0,
        help="with --scripted: the least time of a step (default: %(default)s)",
    )


def _add_cors_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--allowed-origins",
        type=_json_list,
        default=[],
        metavar="JSON",
        help='origins whose pages may call this server, such as ["https://a.example"] or ["*"] '
        "(default: none)",
    )
    for what in ("methods", "headers"):
        flag(
            f"--allowed-{what}",
            type=_json_list,
            default=["*"],
            metavar="JSON",
            help=f'{what} that these pages may use (default: ["*"])',
        )
    flag(
        "--allow-credentials",
        action="store_true",
        help="these pages may send cookies (default: off)",
    )


def _quantization(text: str) -> Quantization:
    with contextlib.suppress(ValueError):
        return Quantization(text)
    supported = " or ".join(Quantization)
    why = f"it must be {supported}"
    if text in _VLLM_AT_LOAD:
        why = f"of vLLM's formats at load none is supported; {_VLLM_AT_LOAD[text]}"
    elif text in _VLLM_STORED:
        why = (
            "it names how a checkpoint was quantized, which config.json says; leave it out, or "
            f"use {supported} with an unquantized checkpoint"
        )
    raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {why}")


def _json_list(text: str) -> list[str]:
    """vLLM's form of these flags."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(
            f'{text} is not a JSON list of strings; write it like ["*"]'
        )
    return values


def _pooler_config(text: str) -> PoolerConfig:
    """vLLM's form of this flag."""
    try:
        values = json.loads(text)
        pooling, normalize = values.pop("pooling_type", None), values.pop("normalize", None)
        if values or not (normalize is None or isinstance(normalize, bool)):
            raise ValueError
        return PoolerConfig(
            pooling=None if pooling is None else Pooling(pooling.lower()), normalize=normalize
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f'{text} must be like {{"pooling_type": "MEAN", "normalize": true}}; pooling_type is '
            "LAST or MEAN, and there are no other keys"
        ) from error


def _add_choice(
    group: "argparse._ArgumentGroup", flag: str, kind: type[StrEnum], help_text: str
) -> None:
    """A flag with the values of `kind`, the first of which is the default."""
    names = [choice.value for choice in kind]
    group.add_argument(
        flag,
        choices=names,
        default=names[0],
        metavar="|".join(names),
        help=f"{help_text} (default: {names[0]})",
    )
