"""The engine's settings: which model, on what, and with how much memory."""

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.config import SchedulerConfig


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"  # CUDA where there is one, else CPU
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """What weights, activations and the KV cache are held in."""

    AUTO = "auto"  # bfloat16 where the device computes it, else float32
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class LoadFormat(StrEnum):
    """Where the weights come from."""

    AUTO = "auto"  # the safetensors beside config.json
    DUMMY = "dummy"  # random, in the shape of config.json: for speed work without a download


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine process is told at its start.

    model: a directory in Hugging Face's layout. None stands for "choose by the model and device":
    max_model_len from config.json, block_size 16 on CPU and 64 on CUDA, kv_cache_memory_bytes a
    quarter of the free memory on CPU, num_threads all cores but the one that the server needs.
    scripted: run `ScriptedExecutor` in place of the model's weights (tests, front-end benchmarks),
    one step every scripted_step_s at most.
    """

    model: str
    device: Device = Device.AUTO
    dtype: Dtype = Dtype.AUTO
    load_format: LoadFormat = LoadFormat.AUTO
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_threads: int | None = None
    max_num_queued_reqs: int = 1024
    scripted: bool = False
    scripted_step_s: float = 0.0
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
