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
from penstock.scheduler.config import Batching, Policy, SchedulerConfig

DEMO_MODEL = Path(str(files("penstock.engine") / "demo_model"))


def add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    """Without defaults, so that what was not given can come from a calibration."""
    add = parser.add_argument_group("scheduling, as penstock serve").add_argument
    add("--max-num-seqs", type=int, metavar="N", help="most sequences that run together")
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="most tokens of one step")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share the KV blocks of prompts that begin alike",
    )
    add(
        "--scheduling-policy",
        dest="policy",
        choices=[each.value for each in Policy],
        help="which request is next",
    )
    add(
        "--batching",
        choices=[each.value for each in Batching],
        help="when waiting requests may join",
    )
    add("--itl-target-ms", type=float, metavar="MS", help="most time of a step with decodes")
    add("--ttft-target-ms", type=float, metavar="MS", help="refuse what would start later")


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("memory, as penstock serve").add_argument
    add("--max-model-len", type=int, metavar="TOKENS", help="tokens of the longest sequence")
    add("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="memory of the KV cache")
    add("--block-size", type=int, metavar="TOKENS", help="tokens of a KV block")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model, as penstock serve").add_argument
    add("--dtype", choices=[*Dtype], default=Dtype.AUTO, help="type of weights")
    add("--kv-cache-dtype", choices=[*KVCacheDtype], default=KVCacheDtype.AUTO,
        help="type of keys and values")  # fmt: skip


def add_loading_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("loading, as penstock serve").add_argument
    add("--device", choices=[*Device], default=Device.AUTO, help="where the model runs")
    add("--load-format", choices=[*LoadFormat], default=LoadFormat.AUTO,
        help="dummy: random weights")  # fmt: skip
    add("--quantization", choices=[*Quantization], help="round weights at load")
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
        help="share of the GPU's memory")  # fmt: skip
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--num-threads", type=int, metavar="N", help="CPU threads; default: all cores")


def scheduler_config(args: argparse.Namespace, default: SchedulerConfig) -> SchedulerConfig:
    """The default with what was given. Raises InvalidConfig."""
    changes: dict[str, Any] = {
        name: value
        for name in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
        if (value := getattr(args, name)) is not None
    }
    if args.policy is not None:
        changes["policy"] = Policy(args.policy)
    if args.batching is not None:
        changes["batching"] = Batching(args.batching)
    for name in ("itl", "ttft"):
        if (milliseconds := getattr(args, f"{name}_target_ms")) is not None:
            changes[f"{name}_target_s"] = milliseconds / 1e3
    return replace(default, **changes)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Of a parser with all of these flags and a positional `model`. Raises InvalidConfig."""
    return EngineConfig(
        model=args.model or str(DEMO_MODEL),
        device=Device(args.device),
        dtype=Dtype(args.dtype),
        kv_cache_dtype=KVCacheDtype(args.kv_cache_dtype),
        load_format=LoadFormat(args.load_format),
        quantization=Quantization(args.quantization) if args.quantization else None,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        num_threads=args.num_threads,
        scheduler=scheduler_config(args, SchedulerConfig()),
    )
