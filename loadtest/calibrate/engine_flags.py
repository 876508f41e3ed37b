"""The flags of `penstock serve` that calibration and simulation take too, under the same names."""

import argparse
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.engine.config import (
    Device,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    Quantization,
)
from penstock.loadtest.command_line import add_flags
from penstock.scheduler.config import Batching, Policy, SchedulerConfig

DEMO_MODEL = Path(str(files("penstock.engine.hub") / "demo_model"))


_SCHEDULER = {
    "--max-num-seqs N": "most sequences that run together",
    "--max-num-batched-tokens TOKENS": "most tokens of one step",
    "--[no-]enable-prefix-caching": "share the KV blocks of prompts that begin alike",
    "--scheduling-policy": "which request is next",
    "--batching": "when waiting requests may join",
    "--itl-target-ms MS": "most time of a step with decodes",
    "--ttft-target-ms MS": "refuse what would start later",
}
_MEMORY = {
    "--max-model-len TOKENS": "tokens of the longest sequence",
    "--kv-cache-memory-bytes BYTES": "memory of the KV cache",
    "--block-size TOKENS": "tokens of a KV block",
}
_MODEL = {
    "--dtype": "type of weights",
    "--kv-cache-dtype": "type of keys and values",
}
_LOADING = {
    "--device": "where the model runs",
    "--load-format": "dummy: random weights",
    "--quantization": "round weights at load",
    "--gpu-memory-utilization SHARE = 0.9": "share of the GPU's memory",
    "--enforce-eager": "no CUDA graphs",
    "--num-threads N": "CPU threads; default: all cores",
}
# Settings of the engine that are called as their flags, and read as they are.
_AS_GIVEN = (
    *("max_model_len", "block_size", "kv_cache_memory_bytes", "gpu_memory_utilization"),
    *("enforce_eager", "num_threads"),
)
_GROUPS = {"scheduling": _SCHEDULER, "memory": _MEMORY, "model": _MODEL, "loading": _LOADING}
_CHOICES: dict[str, dict[str, Any]] = {
    "scheduling_policy": {"dest": "policy", "choices": [each.value for each in Policy]},
    "batching": {"choices": [each.value for each in Batching]},
    "dtype": {"choices": [*Dtype], "default": Dtype.AUTO},
    "kv_cache_dtype": {"choices": [*KVCacheDtype], "default": KVCacheDtype.AUTO},
    "device": {"choices": [*Device], "default": Device.AUTO},
    "load_format": {"choices": [*LoadFormat], "default": LoadFormat.AUTO},
    "quantization": {"choices": [*Quantization]},
}


def add_engine_flags(parser: argparse.ArgumentParser, *groups: str) -> None:
    """groups: names of _GROUPS. Those of scheduling have no defaults, so that what was not given
    can come from a calibration."""
    for name in groups:
        group = parser.add_argument_group(f"{name}, as penstock serve")
        add_flags(group, _GROUPS[name], **_CHOICES)


def scheduler_config(args: argparse.Namespace, default: SchedulerConfig) -> SchedulerConfig:
    """The default with what was given. Raises InvalidConfig."""
    changes: dict[str, Any] = {
        name: value
        for name in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
        if (value := getattr(args, name)) is not None
    }
    for name, kind in (("policy", Policy), ("batching", Batching)):
        if (value := getattr(args, name)) is not None:
            changes[name] = kind(value)
    for name in ("itl", "ttft"):
        if (milliseconds := getattr(args, f"{name}_target_ms")) is not None:
            changes[f"{name}_target_s"] = milliseconds / 1e3
    return replace(default, **changes)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """args: with all of these flags, and a positional `model`. Raises InvalidConfig."""
    return EngineConfig(
        model=args.model or str(DEMO_MODEL),
        device=Device(args.device),
        dtype=Dtype(args.dtype),
        kv_cache_dtype=KVCacheDtype(args.kv_cache_dtype),
        load_format=LoadFormat(args.load_format),
        quantization=Quantization(args.quantization) if args.quantization else None,
        scheduler=scheduler_config(args, SchedulerConfig()),
        **{name: getattr(args, name) for name in _AS_GIVEN},
    )
