"""The engine's settings: which model, on what, and with how much memory."""

from dataclasses import dataclass, field
from enum import StrEnum

from penstock.scheduler.config import Batching, SchedulerConfig
from penstock.scheduler.errors import InvalidConfig


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"  # CUDA where there is one, else CPU
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """The number format of weights, activations and, by default, the KV cache."""

    AUTO = "auto"  # bfloat16 where the device computes it, else float32
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    HALF = "half"  # vLLM's other name of float16
    FLOAT = "float"  # vLLM's other name of float32


class KVCacheDtype(StrEnum):
    """The number format of keys and values in the KV cache."""

    AUTO = "auto"  # that of the model
    INT8 = "int8"  # codes from -127 to 127, and a scale for each token and head
    FP8 = "fp8"  # float8_e4m3fn, likewise


class LogFormat(StrEnum):
    """How a line of the log is written."""

    TEXT = "text"  # time, level, message
    JSON = "json"  # one object a line, for log collectors


class LoadFormat(StrEnum):
    """Where the weights come from."""

    AUTO = "auto"  # the safetensors beside config.json
    DUMMY = "dummy"  # random, in the shape of config.json: for speed work without a download


class Quantization(StrEnum):
    """To what the weights of linear layers are rounded at load."""

    INT8 = "int8"  # codes of 8 bits, with a scale for each 32 of them
    INT4 = "int4"  # of 4 bits, but for the few layers that need 8
    FP8 = "fp8"  # e4m3, with a scale for each row

    @property
    def bits(self) -> int:
        """The width of a weight in most layers."""
        return 4 if self is Quantization.INT4 else 8


class ModelImpl(StrEnum):
    """Whose implementation of a family computes the model."""

    AUTO = "auto"  # our own; for a family that has none, transformers'
    PENSTOCK = "penstock"
    TRANSFORMERS = "transformers"  # slow, and the reference of our own


class AttentionBackend(StrEnum):
    """Implementations of attention on a GPU; on CPU there is one."""

    AUTO = "auto"  # TRITON, and for chunks penstock.engine.loading.prefill
    TRITON = "triton"  # our own kernels
    FLASH_ATTN = "flash_attn"  # FlashAttention 2, of the package flash-attn
    TORCH = "torch"  # slow and simple, to distinguish errors of a kernel from those of a model


class GpuWay(StrEnum):
    """How a GPU computes a model of ours, the fastest first and the simplest last."""

    PDL = "pdl"  # our kernels, most of which start before the one before them has ended
    GRAPHS = "graphs"  # our kernels, of which a CUDA graph launches those of a step
    EAGER = "eager"  # our kernels, which are launched one by one
    TORCH = "torch"  # torch's operators alone

    @property
    def or_slower(self) -> "tuple[GpuWay, ...]":
        """Itself and those after it."""
        ways = tuple(GpuWay)
        return ways[ways.index(self) :]


# The files of a LoRA adapter's directory that are read.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """Where a LoRA adapter is: `path` is a directory as PEFT saves it.

    base_model_name: what /v1/models shows as its parent. id: of `LoadedAdapter`, where it was
    loaded before; it is then loaded only if its files are still the same.
    """

    name: str
    path: str
    base_model_name: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Which LoRA adapters may be loaded, all of which are in memory, and may be in one step.

    max_loras: how many at a time. max_rank: of any of their layers. adapters: those of the start.
    """

    max_loras: int = 8
    max_rank: int = 16
    adapters: tuple[AdapterSource, ...] = ()

    def __post_init__(self) -> None:
        if self.max_loras < 1 or self.max_rank < 1:
            raise InvalidConfig("--max-loras and --max-lora-rank must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """vLLM's, of --kv-events-config: where events of KV blocks are sent.

    endpoint: bound where it has a wildcard or is ipc, else connected to. replay_endpoint: where
    batches are asked for again, of which the last buffer_steps are kept. hwm: batches that wait for
    a subscriber, more are dropped. max_queue_size: batches that wait to be sent.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class DraftMethod(StrEnum):
    """Where drafts are looked up, under vLLM's names."""

    NGRAM = "ngram"  # in the prompt, and in the answer so far
    SUFFIX = "suffix"  # and in answers that have ended, of the same tenant
    DRAFT_MODEL = "draft_model"  # and what a smaller model proposes
    MTP = "mtp"  # and what a head of the checkpoint proposes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """vLLM's, of --speculative-config.

    num_speculative_tokens: the most drafts of a row; a step takes as many as are worth their time.
    0 for none. model: the directory of the model that proposes, with method DRAFT_MODEL.
    quantization: to what its weights are rounded at load.
    """

    method: DraftMethod = DraftMethod.SUFFIX
    num_speculative_tokens: int = 8
    model: str | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        has_model = self.model is not None
        if has_model is not (self.method is DraftMethod.DRAFT_MODEL):
            raise InvalidConfig('"model" and the method draft_model need each other')
        if self.quantization and not has_model:
            raise InvalidConfig('"quantization" is of a draft model, and needs "model"')

    @property
    def has_model(self) -> bool:
        return self.model is not None and self.num_speculative_tokens > 0

    @property
    def may_have_head(self) -> bool:
        """Whether the head of a checkpoint may propose, where it has one."""
        may = self.method in (DraftMethod.SUFFIX, DraftMethod.MTP)
        return may and self.num_speculative_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of the engine process, and of what watches it.

    model: a directory in Hugging Face's layout. None means a choice by model and device:
    max_model_len from config.json, block_size 16 on CPU and 64 on CUDA, kv_cache_memory_bytes a
    quarter of the free memory on CPU and what gpu_memory_utilization leaves on CUDA, num_threads
    all cores; and weights as they are stored for quantization. quantization_report: compare the
    quantized model with the unquantized one, and log the figures. language_model_only: it is known
    that of a model of text and images only the text model is served. takes_images: its encoder of
    images is loaded, where there is one. gpu_memory_utilization: the
    share of a GPU's memory that may be used, by other processes too. enforce_eager: no CUDA graphs;
    the kernels of a step are launched one by one. gpu_way: the fastest that may be used; the server
    names a slower one where that has failed. log_level, log_format: of the engine process.
    tensor_parallel_size: how many processes compute each layer together; pipeline_parallel_size:
    how many stages the layers are cut into, each of so many processes. num_threads and
    kv_cache_memory_bytes are of each process.
    calibration: a file of penstock calibrate, from which steps are predicted until enough have run.
    max_engine_restarts: how often within ten minutes a process that ended is replaced.
    stall_timeout_s: see `penstock.engine.ipc.stall`.
    kv_memory: the descriptor of memory for keys and values that outlives the engine process; the
    server sets it (see `penstock.engine.memory.pool.kv_memory`).
    kv_offload_bytes: on a GPU, of the host's memory for blocks of keys and values that no sequence
    uses; None for none, unless there is kv_offload_dir, the directory where they are written.
    kv_offload_disk_bytes: the most that all files there may take, None for 10 GiB; on a CPU
    kv_offload_bytes is the same.
    kv_events: None where no events of blocks are sent.
    scripted: run `ScriptedExecutor` in place of the model's weights (tests, front-end benchmarks),
    at most one step every scripted_step_s. lora: None where no adapters can be loaded.
    speculative: None for the default, where steps may have drafts.
    """

    model: str
    device: Device = Device.AUTO
    dtype: Dtype = Dtype.AUTO
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    load_format: LoadFormat = LoadFormat.AUTO
    quantization: Quantization | None = None
    quantization_report: bool = False
    language_model_only: bool = False
    takes_images: bool = False
    model_impl: ModelImpl = ModelImpl.AUTO
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    gpu_way: GpuWay = GpuWay.PDL
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    calibration: str | None = None
    max_num_queued_reqs: int = 1024
    max_engine_restarts: int = 10
    stall_timeout_s: float = 120.0
    kv_memory: int | None = None
    kv_offload_dir: str | None = None
    kv_offload_bytes: int | None = None
    kv_offload_disk_bytes: int | None = None
    kv_events: KVEventsConfig | None = None
    scripted: bool = False
    scripted_step_s: float = 0.0
    lora: LoraConfig | None = None
    speculative: SpeculativeConfig | None = None
    log_level: str = "info"
    log_format: LogFormat = LogFormat.TEXT
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def slower_way(self, way: GpuWay) -> GpuWay | None:
        """What may be tried where this way has failed: for several GPUs not torch."""
        num_ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        slower = (each for each in way.or_slower[1:] if each is not GpuWay.TORCH or num_ranks == 1)
        return next(slower, None)

    def __post_init__(self) -> None:
        for name in (
            *("max_model_len", "block_size", "kv_cache_memory_bytes", "num_threads"),
            *("tensor_parallel_size", "pipeline_parallel_size"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"--{name.replace('_', '-')} must be at least 1")
        if self.max_engine_restarts < 0:
            raise InvalidConfig("--max-engine-restarts must not be negative; 0 is never")
        if self.stall_timeout_s < 3:
            raise InvalidConfig(
                f"--engine-stall-timeout is {self.stall_timeout_s:g}; it must be at least 3 "
                "seconds, since an engine that is well may show no sign of life for one"
            )
        self._check_offload()
        if self.quantization_report and self.quantization is None:
            raise InvalidConfig(
                f"--quantization-report needs --quantization {'|'.join(Quantization)}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidConfig(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it is a share of the "
                "GPU's memory, more than 0 and at most 1"
            )

    def _check_offload(self) -> None:
        if self.kv_events is not None and not self.scheduler.enable_prefix_caching:
            raise InvalidConfig(
                "--kv-events-config cannot be combined with --no-enable-prefix-caching, without "
                "which there are no events; leave one of them out"
            )
        if self.kv_offload_dir is None and self.kv_offload_disk_bytes is not None:
            raise InvalidConfig(
                "--kv-offload-disk-gb is the limit of a directory: name it with --kv-offload-dir, "
                "or leave the flag out"
            )
        if self.kv_offload_dir is None and self.kv_offload_bytes is None:
            return
        flag = "--kv-offload-gb" if self.kv_offload_dir is None else "--kv-offload-dir"
        if not self.scheduler.enable_prefix_caching:
            raise InvalidConfig(
                f"{flag} cannot be combined with --no-enable-prefix-caching, without which no "
                "block is found again; leave one of them out"
            )
        if self.scheduler.batching is not Batching.CONTINUOUS:
            raise InvalidConfig(
                f"{flag} cannot be combined with --batching {self.scheduler.batching}: a prompt "
                "whose blocks are being read would miss its batch; leave one of them out"
            )
