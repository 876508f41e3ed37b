"""From the flags that were given to a `ServeConfig`. What they are is in `serve_flags`."""

import argparse
import math
import os
from collections import Counter
from importlib.resources import files
from pathlib import Path

from penstock.engine.client import (
    AttentionBackend,
    Device,
    Dtype,
    EngineConfig,
    LoadFormat,
    LogFormat,
    LoraConfig,
    ModelImpl,
    model_name,
)
from penstock.scheduler.config import Batching, Policy, SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.server.config import CorsConfig, ServeConfig, ServerConfig
from penstock.server.flags.flag_values import ENVIRONMENT_PREFIX, FlagParser
from penstock.server.flags.serve_flags import DEMO_NAMES
from penstock.server.observability.metrics_alias import MetricsAlias


def serve_config(options: argparse.Namespace) -> ServeConfig:
    """Raises InvalidConfig."""
    model = options.model or options.model_flag
    own_names = (_served_name(model),) if model else DEMO_NAMES
    return ServeConfig(
        server=ServerConfig(
            host=options.host,
            port=options.port,
            served_model_names=tuple(options.served_model_name or own_names),
            api_keys=_api_keys(options.api_key, options.api_key_file),
            handover_key=_own_key(options.handover_key_file, "--handover-key-file"),
            admin_key=_own_key(options.admin_key_file, "--admin-key-file"),
            lora_root=options.lora_root.resolve() if options.lora_root else None,
            cors=CorsConfig(
                allowed_origins=tuple(options.allowed_origins),
                allowed_methods=tuple(options.allowed_methods),
                allowed_headers=tuple(options.allowed_headers),
                allow_credentials=options.allow_credentials,
            ),
            allowed_hosts=tuple(options.allowed_hosts),
            root_path=options.root_path,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            request_timeout_s=options.request_timeout,
            max_body_bytes=options.max_body_bytes,
            shutdown_timeout_s=options.shutdown_timeout,
            during_restart=options.during_engine_restart,
            sse_ping_interval_s=options.sse_ping_interval,
            max_stored_responses=options.max_stored_responses,
            max_stored_response_bytes=options.max_stored_response_bytes,
            chat_template=options.chat_template,
            trust_request_chat_template=options.trust_request_chat_template,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            pooler=options.pooler_config,
            has_page=not options.no_ui,
            log_level=options.log_level,
            log_format=LogFormat(options.log_format),
            log_requests=options.log_requests,
            metrics_alias=MetricsAlias(options.metrics_alias) if options.metrics_alias else None,
            otlp_traces_endpoint=options.otlp_traces_endpoint,
            record_traffic=options.record_traffic,
        ),
        engine=EngineConfig(
            model=model or str(files("penstock.engine") / "demo_model"),
            device=Device(options.device),
            dtype=Dtype(options.dtype),
            kv_cache_dtype=options.kv_cache_dtype,
            load_format=LoadFormat(options.load_format),
            quantization=options.quantization,
            quantization_report=options.quantization_report,
            language_model_only=options.language_model_only,
            attention_backend=AttentionBackend(options.attention_backend),
            model_impl=ModelImpl(options.model_impl),
            max_model_len=options.max_model_len,
            block_size=options.block_size,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enforce_eager=options.enforce_eager,
            num_threads=options.num_threads,
            kv_offload_dir=str(options.kv_offload_dir) if options.kv_offload_dir else None,
            kv_events=options.kv_events_config,
            kv_offload_bytes=_gib("--kv-offload-gb", options.kv_offload_gb),
            kv_offload_disk_bytes=_gib("--kv-offload-disk-gb", options.kv_offload_disk_gb),
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
            calibration=str(options.calibration) if options.calibration else None,
            max_num_queued_reqs=options.max_num_queued_reqs,
            max_engine_restarts=options.max_engine_restarts,
            stall_timeout_s=options.engine_stall_timeout,
            scripted=options.scripted,
            scripted_step_s=options.scripted_step_ms / 1e3,
            lora=_lora(options),
            log_level=options.log_level,
            log_format=LogFormat(options.log_format),
            scheduler=SchedulerConfig(
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                enable_prefix_caching=options.enable_prefix_caching,
                policy=Policy(options.scheduling_policy),
                batching=Batching(options.batching),
                itl_target_s=_seconds(options.itl_target_ms),
                ttft_target_s=_seconds(options.ttft_target_ms),
            ),
        ),
    )


def config_file(arguments: list[str]) -> Path | None:
    """Its values must be known before the other flags are parsed."""
    parser = FlagParser(prog="penstock serve", add_help=False)
    parser.add_argument("--config", default=os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG"))
    config, _ = parser.parse_known_args([each for each in arguments if each != "--"])
    return Path(config.config) if config.config else None


def _served_name(model: str) -> str:
    """As it was named, but of a GGUF file its name alone."""
    return model_name(Path(model)) if model.endswith(".gguf") else model


def _gib(flag: str, count: float | None) -> int | None:
    """Bytes. Raises InvalidConfig."""
    if count is not None and not 0 < count < math.inf:
        raise InvalidConfig(f"{flag} is {count:g}; it must be more than 0, and finite")
    return None if count is None else int(count * 2**30)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _own_key(file: Path | None, flag: str) -> str | None:
    """Of what asks for a key besides an API key. Raises InvalidConfig."""
    if file is None:
        return None
    keys = _keys_in(file, flag)
    if len(keys) > 1:
        raise InvalidConfig(f"{flag} {file} has {len(keys)} keys; write one")
    return keys[0]


def _lora(options: argparse.Namespace) -> LoraConfig | None:
    """Raises InvalidConfig."""
    if not options.enable_lora:
        if options.lora_modules:
            raise InvalidConfig("--lora-modules requires --enable-lora")
        return None
    if len(options.lora_modules) > options.max_loras:
        raise InvalidConfig(
            f"--lora-modules has {len(options.lora_modules)} adapters, which all stay in memory, "
            f"and --max-loras is {options.max_loras}; raise it"
        )
    counts = Counter(source.name for source in options.lora_modules)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InvalidConfig(f"--lora-modules has {twice[0]!r} twice; names must differ")
    return LoraConfig(
        max_loras=options.max_loras,
        max_rank=options.max_lora_rank,
        adapters=tuple(options.lora_modules),
    )


def _api_keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """Keys of the command line and the file, or else of the environment. Raises InvalidConfig."""
    keys = list(given or ())
    if file:
        keys += _keys_in(file, "--api-key-file")
    return tuple(keys)


def _keys_in(file: Path, flag: str) -> list[str]:
    """At least one. Raises InvalidConfig."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{flag} {file} cannot be read: {error}") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise InvalidConfig(f"{flag} {file} contains no key; write one per line")
    return keys
