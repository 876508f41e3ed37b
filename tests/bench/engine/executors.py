"""The `CudaExecutor` that is measured, or the `FirstRank` of several, as the server builds it."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from penstock.engine.config import (
    AttentionBackend,
    Device,
    Dtype,
    EngineConfig,
    LoadFormat,
    Quantization,
    SpeculativeConfig,
)
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.first_rank import FirstRank
from penstock.engine.executors.followers import Followers
from penstock.engine.loading.gpu_ranks import SHARED_DEVICE
from penstock.engine.loading.ranks import build_ranks as build_all_ranks
from penstock.engine.models.config import ModelConfig
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.layout import RankLayout
from penstock.scheduler.config import SchedulerConfig
from tests.bench.engine.timing import compute_dtype, the_device
from tests.support.executors import cuda_executor

# In Triton's interpreter: few enough that the last point of a sweep does not fit.
_INTERPRETED_BLOCK_SIZE, _INTERPRETED_BLOCKS = 16, 40


def build_executor(
    model_dir: Path,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    enforce_eager: bool = False,
    kv_cache_memory_bytes: int | None = None,
    quantization: Quantization | None = None,
    kv_offload_bytes: int | None = None,
    attention_backend: AttentionBackend = AttentionBackend.AUTO,
    speculative: SpeculativeConfig | None = None,
) -> CudaExecutor:
    """With random weights; on the GPU, or without one in Triton's interpreter.

    quantization: of the weights. kv_cache_memory_bytes: on a GPU; None means all that is left.
    """
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    config = _config(model_dir, max_model_len, scheduler, enforce_eager)
    config = replace(
        config,
        quantization=quantization,
        kv_offload_bytes=kv_offload_bytes,
        attention_backend=attention_backend,
        speculative=speculative,
    )
    if kv_cache_memory_bytes is not None and the_device().type == "cuda":
        config = replace(config, kv_cache_memory_bytes=kv_cache_memory_bytes)
    gpu = None if the_device().type == "cuda" else Interpreter()
    return cuda_executor(config, model_dir, gpu)


def build_ranks(
    model_dir: Path,
    layout: RankLayout,
    *,
    max_model_len: int,
    scheduler: SchedulerConfig,
    enforce_eager: bool = False,
) -> FirstRank[CudaExecutor]:
    """As `build_executor`, by as many processes as the layout has ranks. Each has a GPU; where
    there are too few, all share one, or Triton's interpreter."""
    if torch.cuda.device_count() < layout.size:
        os.environ[SHARED_DEVICE] = "1"
    config = replace(
        _config(model_dir, max_model_len, scheduler, enforce_eager),
        tensor_parallel_size=layout.tensor_size,
        pipeline_parallel_size=layout.num_stages,
    )
    followers = Followers(layout)
    try:
        return build_all_ranks(config, Phases(), followers, on_gpus=True)
    except BaseException:
        followers.close()
        raise


def _config(
    model_dir: Path, max_model_len: int, scheduler: SchedulerConfig, enforce_eager: bool
) -> EngineConfig:
    device = the_device()
    if device.type == "cuda":
        return EngineConfig(
            model=str(model_dir),
            device=Device.CUDA,
            dtype=Dtype.BFLOAT16,
            load_format=LoadFormat.DUMMY,
            max_model_len=max_model_len,
            enforce_eager=enforce_eager,
            scheduler=scheduler,
        )
    model = ModelConfig.from_dir(model_dir)
    token_bytes = model.kv_shape.bytes_per_token(compute_dtype(device).itemsize)
    return EngineConfig(
        model=str(model_dir),
        dtype=Dtype.FLOAT32,
        load_format=LoadFormat.DUMMY,
        max_model_len=max_model_len,
        block_size=_INTERPRETED_BLOCK_SIZE,
        kv_cache_memory_bytes=(_INTERPRETED_BLOCKS + 1) * _INTERPRETED_BLOCK_SIZE * token_bytes,
        enforce_eager=enforce_eager,
        scheduler=scheduler,
    )
