"""The `CudaExecutor` that is measured, built as the server builds it."""

from pathlib import Path

from penstock.engine.config import Device, Dtype, EngineConfig, LoadFormat, Quantization
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.cuda.setup import build_cuda_executor
from penstock.engine.models.config import ModelConfig
from penstock.scheduler.config import SchedulerConfig
from tests.bench.engine.timing import compute_dtype, the_device

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
) -> CudaExecutor:
    """With random weights; on the GPU, or without one in Triton's interpreter.

    quantization: of the weights. kv_cache_memory_bytes: on a GPU; None means all that is left.
    """
    device = the_device()
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    if device.type == "cuda":
        config = EngineConfig(
            model=str(model_dir),
            device=Device.CUDA,
            dtype=Dtype.BFLOAT16,
            load_format=LoadFormat.DUMMY,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enforce_eager=enforce_eager,
            quantization=quantization,
            scheduler=scheduler,
        )
        return build_cuda_executor(config, model_dir)
    model = ModelConfig.from_dir(model_dir)
    token_bytes = model.kv_shape.bytes_per_token(compute_dtype(device).itemsize)
    config = EngineConfig(
        model=str(model_dir),
        dtype=Dtype.FLOAT32,
        load_format=LoadFormat.DUMMY,
        max_model_len=max_model_len,
        block_size=_INTERPRETED_BLOCK_SIZE,
        kv_cache_memory_bytes=(_INTERPRETED_BLOCKS + 1) * _INTERPRETED_BLOCK_SIZE * token_bytes,
        enforce_eager=enforce_eager,
        quantization=quantization,
        scheduler=scheduler,
    )
    return build_cuda_executor(config, model_dir, Interpreter())
