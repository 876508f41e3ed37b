"""The flags of `penstock serve`: of each its usage, its help, and what else `Flag` has for it.

It knows no value that was given: `serve_config` makes a config of them.
"""

import argparse
from pathlib import Path
from typing import Any

from penstock.engine.client import EngineConfig, LoraConfig, Quantization
from penstock.scheduler.config import SchedulerConfig
from penstock.server.config import CorsConfig, ServerConfig
from penstock.server.flags.flag import add_flags, flag_table
from penstock.server.flags.flag_values import (
    gib,
    json_list,
    json_object,
    kv_cache_dtype,
    kv_events_config,
    lora_module,
    max_images,
    only_key,
    pooler_config,
    quantization,
    size,
    speculative_config,
)
from penstock.server.output.reasoning import ReasoningFormat
from penstock.server.tools.chat_format import NO_PARSER
from penstock.server.tools.parsers import ToolFormat

# The demo uses the second name for itself in its training examples.
DEMO_NAMES = ("penstock-demo", "demo")
# A flag of log lines sets a field of two of them.
_CONFIGS = (ServerConfig, EngineConfig, SchedulerConfig, LoraConfig, CorsConfig)


def _seconds(milliseconds: float, _: str) -> float:
    return milliseconds / 1e3


_HELP = {
    "listening": {
        "--host ADDRESS": "address to listen on; 0.0.0.0 accepts other machines",
        "--port N": "port to listen on",
        "--no-ui": "no page at / (default: the page is served)",
        "--root-path PATH": "path under which a proxy publishes this server, such as /llm "
        "(default: none)",
        "--ssl-certfile FILE": "serve HTTPS with this certificate and its chain, PEM; one that is "
        "renewed is used for new connections (default: no TLS)",
        "--ssl-keyfile FILE": "the certificate's private key, PEM (default: in the file of the "
        "certificate)",
        "--shutdown-timeout SECONDS": "how long running requests may take to finish after SIGTERM; "
        "a container's own grace period must be longer",
        "--sse-ping-interval SECONDS": "a stream without output for this long gets a comment; "
        "lower it if a proxy closes idle connections sooner",
    },
    "model": {
        "--served-model-name NAME ...": "names that clients may use for the model; answers contain "
        f"the first (default: MODEL as given, {DEMO_NAMES[0]} for the demo)",
        "--device": "where the model runs; auto is CUDA if there is a GPU, else CPU",
        "--dtype": "type of weights, and of the KV cache unless --kv-cache-dtype says otherwise; "
        "auto is bfloat16 if the device computes it, else float32; half is float16 and float is "
        "float32, as in vLLM",
        "--load-format": "auto reads the weights; dummy makes random ones in the shape of "
        "config.json, to measure speed",
        f"-q --quantization {'|'.join(Quantization)}": "round the weights of linear layers at "
        "load: int8 takes half of bfloat16's memory and changes next to nothing, int4 a third and "
        "changes a little, fp8 half and changes more than int8; the log says how much. The result "
        "is kept in ~/.cache/penstock/quantized (default: weights as they are)",
        "--quantization-report": "with --quantization: compare the quantized model with the "
        "unquantized one at this start, and log the figures; else those of the start that rounded "
        "the weights count",
        "--language-model-only": "of a model of text and images, serve the text model alone, as in "
        "vLLM",
        "--model-impl": "whose implementation of the model's family is used: penstock is our own, "
        "transformers is the class of that library, over the same KV cache, which is slow; auto is "
        "ours where there is one. vLLM's flag, whose vllm is penstock here",
        "--attention-backend": "what computes attention on a GPU; auto is triton, our own kernels, "
        "and on Hopper FlashAttention 3 for long prefill chunks where it is installed; flash_attn "
        "is version 2, must be installed, and requires --block-size 256; torch is slow, and shows "
        "whether a kernel or the model is at fault",
        "--gpu-way": "the fastest way in which a GPU may compute: pdl, CUDA graphs of kernels that "
        "start before others have ended, where the GPU can; graphs, without that; eager, kernels "
        "one by one; torch, torch's operators alone, which is slow",
        "--enforce-eager": "no CUDA graphs: slower steps, a faster start, less memory",
        "--num-threads N": "CPU threads that compute; lower it if other programs need the cores "
        "(default: all cores)",
        "-tp --tensor-parallel-size N": "split each layer over N processes, each with a GPU of its "
        "own or a share of the cores; --kv-cache-memory-bytes and --num-threads are of each",
        "-pp --pipeline-parallel-size N": "cut the layers into N stages, each in processes of its "
        "own that compute different steps at the same time, on GPUs of their own or on a CPU",
    },
    "LoRA adapters": {
        "--enable-lora": "serve LoRA adapters of the model, each as a model of its own name",
        "--lora-modules NAME=PATH ...": "adapters to load at the start, from directories as PEFT "
        "saves them or repositories of Hugging Face's hub; or vLLM's JSON, "
        '{"name": NAME, "path": PATH, "base_model_name": PARENT} (default: none)',
        "--max-loras N": "how many adapters may be loaded at a time; all of them stay in memory, "
        "and may be in one step; a GPU takes the memory of so many at the start",
        "--max-lora-rank RANK": "the highest rank of an adapter; one with a higher one is refused; "
        "a GPU takes memory for it at the start, whatever the adapters' own",
        "--lora-root DIRECTORY": "below which adapters may be loaded while the server runs, on "
        "/v1/load_lora_adapter; links out of it are refused (default: none, and the routes load "
        "nothing)",
        "--admin-key-file FILE": "a file with the key that loading and unloading adapters needs, "
        "in the header x-penstock-admin-key (default: none, and nobody may)",
    },
    "memory": {
        "--max-model-len TOKENS": "tokens of the longest sequence, prompt and answer together; "
        "lower it if one full sequence does not fit in the KV cache (default: the model's)",
        "--gpu-memory-utilization SHARE": "share of the GPU's memory that may be used, other "
        "programs included; the KV cache gets what weights, graphs and activations leave of it; "
        "lower it if another program shares the GPU",
        "--kv-cache-memory-bytes BYTES": "memory of the KV cache; more of it holds more or longer "
        "sequences (default: on CPU a quarter of the free memory, on CUDA what "
        "--gpu-memory-utilization leaves)",
        "--kv-cache-dtype auto|int8|fp8": "type of keys and values in the KV cache; int8 and fp8 "
        "(e4m3) hold nearly twice as many tokens as bfloat16, and outputs differ a little "
        "(default: auto, the type of --dtype)",
        "--block-size TOKENS": "tokens of a KV block; smaller blocks waste less memory at the end "
        "of a sequence and share shorter beginnings of prompts (default: 16 on CPU, 64 on CUDA)",
        "--enable-prefix-caching": "share the KV blocks of prompts that begin alike",
        "--kv-events-config JSON": "send events of KV blocks by ZeroMQ, as vLLM does, for routers "
        'that go by prefixes: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", '
        '"replay_endpoint": "tcp://*:5558", "topic": "", "buffer_steps": 10000, "hwm": 100000, '
        '"max_queue_size": 100000}. They have the token ids of prompts: let only those connect who '
        "may read them (default: none are sent)",
        "--kv-offload-dir DIR": "write KV blocks to files in this directory when no sequence uses "
        "them any more, and read them when a prompt begins with them and that is quicker than "
        "computing it, after a restart too; several servers and models may share it. They are what "
        "prompts said: keep the directory private (default: blocks end with their memory)",
        "--kv-offload-gb GIB": "on a GPU: GiB of this machine's memory, pinned, to which KV blocks "
        "go when no sequence uses them any more, before they go to --kv-offload-dir, and from "
        "which they come back. On a CPU, whose memory --kv-cache-memory-bytes limits: the same as "
        "--kv-offload-disk-gb (default: none; with --kv-offload-dir 10, or a quarter of what is "
        "free)",
        "--kv-offload-disk-gb GIB": "most GiB that all files in --kv-offload-dir may take, of "
        "every server and model that uses it; those that were used least recently are removed "
        "(default: 10)",
    },
    "scheduling": {
        "--max-num-seqs N": "most sequences that run together; raise it for throughput, lower it "
        "for TPOT",
        "--max-num-batched-tokens TOKENS": "most tokens of one step, prefill chunks and decodes; "
        "fewer make TTFT and ITL shorter under load, until steps are too small to be computed at "
        "the full rate (default: 2048 on a GPU; on a CPU what the server finds best, from 128 to "
        "2048)",
        "--max-num-queued-reqs N": "most answers that may wait; further ones get status 429",
        "--max-engine-restarts N": "how often within ten minutes an engine process that ended or "
        "stalled is replaced, so that open requests go on; after that the server ends with exit "
        "code 1 (default: %(default)s; 0: never)",
        "--engine-stall-timeout SECONDS": "the engine process is replaced when it has done nothing "
        "for this long although there is work, or for ten times the longest step that the "
        "hardware's speed explains, whichever is longer",
        "--during-engine-restart": "what becomes of new requests meanwhile: refuse answers 503 "
        "with Retry-After, wait lets them wait",
        "--request-timeout SECONDS": "an answer that takes longer, queueing included, ends with an "
        "error; status 504 if nothing was sent yet (default: none)",
        "--scheduling-policy": "which request is next: the first to arrive; the one with the "
        "lowest `priority` field, and of every 8 one that has waited longest; or the one of the "
        "API key, or without keys of the address, for which least was computed",
        "--itl-target-ms MS": "a step runs no more of prompts than lets it end within this time, "
        "but 64 tokens at least; a request's header x-slo-tpot-ms asks for slower steps (default: "
        "none)",
        "--ttft-target-ms MS": "a request whose first token is expected later than this after its "
        "arrival gets status 429; its own header x-slo-ttft-ms overrides it (default: none)",
        "--speculative-config JSON": "drafts of next tokens that steps verify, as many as are "
        'worth their time: {"method": "ngram", "num_speculative_tokens": 8} looks them up in the '
        "prompt and the answer so far, suffix in finished answers of the same API key too; "
        '{"model": "Qwen/Qwen3-0.6B"} has a smaller model with the same tokenizer propose some as '
        "well, and mtp the head of a checkpoint of Qwen3.5, 3.6 or 3.8, both on a CPU; 0 tokens "
        "for none. On a CPU answers are the same to the last bit (default: on a CPU mtp where "
        "there is such a head, else suffix, 8; on a GPU none)",
        "--calibration FILE": "of penstock calibrate: how long steps take, until enough of this "
        "server have run (default: by the device's peaks)",
        "--batching": "when waiting requests may join: at every step, or only when the previous "
        "batch has ended, which is slower and exists for comparison",
    },
    "API": {
        "--chat-template FILE": "a Jinja chat template (default: the model's own)",
        "--tool-call-parser": "how the model writes tool calls (default: detected from its chat "
        "template)",
        "--reasoning-parser": "how the model marks its reasoning (default: detected from its chat "
        "template)",
        "--pooler-config JSON": 'how embeddings are made, such as {"pooling_type": "MEAN", '
        '"normalize": true}; pooling_type is LAST, CLS or MEAN (default: as '
        "the model's directory says, else the last token's state, or an encoder's first, "
        "normalized)",
        "--limit-mm-per-prompt JSON": 'the most images of a prompt, such as {"image": 4}, as in '
        "vLLM; with 0 the model is served as by --language-model-only",
        "--mm-processor-kwargs JSON": "how large images become, such as "
        '{"max_pixels": 2097152}, as in vLLM: min_pixels and max_pixels, or max_soft_tokens of '
        "Gemma 4; requests may have their own (default: as the model's directory says, but on a "
        "CPU at most 1048576 pixels)",
        "--allowed-media-domains HOST ...": "hosts from which images are fetched that a client "
        "names by an https:// URL, with a port where it is not 443; redirects are not followed, "
        "and private addresses are refused (default: none, so that images come as data: URLs)",
        "--max-stored-responses N": "most responses that /v1/responses keeps for "
        "previous_response_id; 0 keeps none",
        "--max-stored-response-bytes BYTES": "most memory that these responses take (default: "
        "%(default)s, 256 MiB)",
    },
    "security": {
        "--api-key KEY ...": "accept only requests with one of these keys, on every route except "
        "/health, /ping, /ready and the page at / (default: $PENSTOCK_API_KEY, else no key is "
        "needed)",
        "--api-key-file FILE": "more such keys, one per line; unlike those of --api-key, other "
        "users of the machine cannot see them in the list of processes (default: none)",
        "--handover-key-file FILE": "a file with the key with which a router may resume, on "
        "/internal/resume, streams that another server began (default: none, and nobody may)",
        "--allowed-hosts NAME ...": "more names in the Host header by which clients may call this "
        "server, besides those of this machine and --host; * allows any (default: none where "
        "--host is an address of this machine alone, else any)",
        "--forwarded-allow-ips ADDRESS ...": "addresses and networks of reverse proxies, whose "
        "header X-Forwarded-For says who the client is; any client can send it, so it is not read "
        "from others (default: none)",
        "--strict-fields": "refuse requests with fields that have no effect, as misspelt ones; "
        "else the header x-ignored-fields of the response lists them",
        "--max-body-bytes BYTES": "the largest request body; a larger one gets status 413. All "
        "streams wait while it is parsed, for 3 ms per MiB at worst (default: %(default)s, 16 MiB)",
        "--trust-request-chat-template": "accept chat templates in requests; each runs in a "
        "process of its own, with little time and memory",
    },
    "pages of other origins (CORS)": {
        "--allowed-origins JSON": "origins whose pages may call this server, such as "
        '["https://a.example"] or ["*"] (default: none)',
        "--allowed-methods JSON": 'methods that these pages may use (default: ["*"])',
        "--allowed-headers JSON": 'headers that these pages may use (default: ["*"])',
        "--allow-credentials": "these pages may send cookies",
    },
    "logs, metrics and traces": {
        "--log-level": "log messages of this level and above",
        "--log-format": "format of the log; json is one object per line, for log collectors",
        "--log-requests --enable-log-requests": "log a line for each request, without any of its "
        "text: ids, status, tokens and times (default: only at --log-level debug)",
        "--metrics-alias": "export the metrics under this server's names too, for dashboards and "
        "autoscalers made for it (default: only our names)",
        "--record-traffic FILE": "keep the arrivals and lengths of the last hour, and hashes of "
        "the prompts' blocks but no text, for penstock simulate --dataset-name traffic (default: "
        "none)",
        "--otlp-traces-endpoint URL": "send a trace of each request to this URL by OTLP over HTTP, "
        "such as http://localhost:4318/v1/traces; needs penstock[otel] (default: no traces)",
    },
    "development": {
        "--scripted": "generate made-up tokens without a model, to test the server or a client",
        "--scripted-step-ms MS": "with --scripted: the least time of a step",
    },
}
# The fields of `Flag` that a flag has besides.
_SETTINGS: dict[str, dict[str, Any]] = {
    "no_ui": {"field": "has_page", "parse": bool, "convert": lambda is_hidden, _: not is_hidden},
    "shutdown_timeout": {"field": "shutdown_timeout_s"},
    "sse_ping_interval": {"field": "sse_ping_interval_s"},
    "served_model_name": {"action": "store"},
    "quantization": {"parse": quantization},
    "enable_lora": {"parse": bool},
    "lora_modules": {"field": "adapters", "parse": lora_module},
    "max_lora_rank": {"field": "max_rank"},
    "lora_root": {"parse": Path, "convert": lambda path, _: path.resolve()},
    "admin_key_file": {"field": "admin_key", "parse": Path, "convert": only_key},
    "max_model_len": {"parse": size},
    "kv_cache_memory_bytes": {"parse": size},
    "kv_cache_dtype": {"parse": kv_cache_dtype},
    "kv_events_config": {"field": "kv_events", "parse": kv_events_config},
    "kv_offload_gb": {"field": "kv_offload_bytes", "parse": float, "convert": gib},
    "kv_offload_disk_gb": {"field": "kv_offload_disk_bytes", "parse": float, "convert": gib},
    "max_num_batched_tokens": {"parse": size},
    "engine_stall_timeout": {"field": "stall_timeout_s"},
    "during_engine_restart": {"field": "during_restart"},
    "request_timeout": {"field": "request_timeout_s"},
    "scheduling_policy": {"field": "policy"},
    "itl_target_ms": {"field": "itl_target_s", "parse": float, "convert": _seconds},
    "ttft_target_ms": {"field": "ttft_target_s", "parse": float, "convert": _seconds},
    "speculative_config": {"field": "speculative", "parse": speculative_config},
    "tool_call_parser": {"choices": [*ToolFormat, NO_PARSER]},
    "reasoning_parser": {"choices": [*ReasoningFormat, NO_PARSER]},
    "pooler_config": {"field": "pooler", "parse": pooler_config},
    "limit_mm_per_prompt": {"field": "max_images", "parse": max_images},
    "mm_processor_kwargs": {"field": "image_options", "parse": json_object},
    "max_stored_response_bytes": {"parse": size},
    "api_key_file": {"parse": Path},
    "handover_key_file": {"field": "handover_key", "parse": Path, "convert": only_key},
    "max_body_bytes": {"parse": size},
    "allowed_origins": {"parse": json_list},
    "allowed_methods": {"parse": json_list},
    "allowed_headers": {"parse": json_list},
    "log_level": {"choices": ("debug", "info", "warning", "error")},
    "scripted_step_ms": {
        "field": "scripted_step_s",
        "parse": float,
        "convert": _seconds,
        "default": 0.0,
    },
}
_GROUPS = {title: flag_table(rows, _SETTINGS) for title, rows in _HELP.items()}
FLAGS = tuple(flag for flags in _GROUPS.values() for flag in flags)


def add_serve_flags(serve: argparse.ArgumentParser) -> None:
    """Adds all of them; each flag's help ends with its default, for docs/flags.md."""
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
    for title, flags in _GROUPS.items():
        add_flags(serve.add_argument_group(title), flags, _CONFIGS)
