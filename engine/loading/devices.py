"""A start decides device, types and formats, measures the device, and divides a GPU's memory; or
says which flag to change.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import Device as DeviceKind
from penstock.engine.config import Dtype, EngineConfig, Quantization
from penstock.engine.executors.cuda.device import CudaGpu, Device, Processor
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.json_file import Fields
from penstock.engine.memory.dtypes import TORCH_DTYPES
from penstock.engine.memory.gpu_budget import MemoryBudget, pool_advice, pool_bytes
from penstock.engine.memory.hardware import computes_bfloat16
from penstock.engine.memory.measured_rates import RateMeter, rates_file
from penstock.engine.memory.pool.kv_layout import GroupPool
from penstock.engine.memory.pool.kv_pool import LayerPools, PoolSize, size_pool
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import Model
from penstock.engine.models.families.families import FAMILIES
from penstock.engine.models.formats.kept import AsStored, CodePolicy, OnGpu
from penstock.engine.models.formats.parse import quantization_name
from penstock.engine.process.phases import Phases
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

# The scheduler's lists of them cost the host some 50 bytes each; no useful model needs more.
_MAX_BLOCKS = 2**20


def choose_device(wanted: DeviceKind) -> Device:
    """Raises InvalidConfig where there is no such device."""
    has_cuda = torch.cuda.is_available()
    if wanted is DeviceKind.CUDA and not has_cuda:
        raise InvalidConfig("--device is cuda, but torch finds no GPU here; use --device cpu")
    on_cuda = has_cuda if wanted is DeviceKind.AUTO else wanted is DeviceKind.CUDA
    return CudaGpu(torch.device("cuda", torch.cuda.current_device())) if on_cuda else Processor()


def choose_dtype(wanted: Dtype, device: torch.device) -> torch.dtype:
    if wanted is Dtype.AUTO:
        return torch.bfloat16 if computes_bfloat16(device) else torch.float32
    return TORCH_DTYPES[wanted]


def check_dtype(wanted: Dtype, model: ModelConfig) -> None:
    """Raises InvalidConfig where the model's activations do not fit the type."""
    is_float16 = TORCH_DTYPES.get(wanted) is torch.float16
    if is_float16 and FAMILIES[model.family].exceeds_float16:
        raise InvalidConfig(
            f"--dtype is {wanted}, and models of the family {model.family} have activations above "
            "65504, which float16 does not hold; use --dtype bfloat16 or --dtype float32"
        )


def check_quantization(config: EngineConfig, model_dir: Path) -> None:
    """Raises InvalidConfig where --quantization is given and cannot be done."""
    if config.quantization is None:
        return
    if is_gguf(model_dir):
        raise InvalidConfig(
            f"--quantization {config.quantization} rounds the float weights of a Hugging Face "
            f"directory, and {model_dir} is a GGUF file; leave it out, or take a file that is "
            "quantized already"
        )
    fields = Fields.read(model_dir / "config.json")
    if name := quantization_name(fields):
        raise InvalidConfig(
            f"--quantization {config.quantization} rounds float weights, and {fields.path} says "
            f"that these are quantized already, in the format {name}; leave it out, or use the "
            "float32, float16 or bfloat16 version of the model"
        )


def kept_on_gpu(model: ModelConfig, device: torch.device) -> CodePolicy:
    """Keeps nothing of a mixture, because no kernel of experts reads codes."""
    return OnGpu(device) if model.experts is None else AsStored()


def check_rounding_on_gpu(model: ModelConfig, quantization: Quantization | None) -> None:
    """Raises InvalidConfig for a mixture, or delta nets, that --quantization is to round."""
    lacking = "the experts of a mixture" if model.experts is not None else "gated delta nets"
    if quantization is not None and (model.experts is not None or any(model.recurrent)):
        raise InvalidConfig(
            f"--quantization is {quantization}, and a GPU computes {lacking} from plain weights "
            "alone; leave it out, or use --device cpu"
        )


def log_text_only(config: EngineConfig, model: ModelConfig) -> None:
    """Says that images are refused, to those who may expect otherwise."""
    if model.is_wrapped and not config.language_model_only:
        logger.warning(
            "%s is a model of text and images, of which the text model alone is served: its "
            "encoders are not loaded, and requests with images get 400; --language-model-only says "
            "that this is wanted",
            config.model,
        )


def measure_rates(
    device: Device, dtype: torch.dtype, phases: Phases, *, is_shared: bool = False
) -> dict[str, Any]:
    """Returns the fields of `ModelInfo`; None where one is not measured. is_shared: with other
    ranks, which measure too."""
    with phases.timed("bandwidth", f"measuring how fast memory is {device.moves_memory}"):
        bandwidth = device.bandwidth()
    with phases.timed("flops", "measuring how fast matrices are multiplied"):
        flops = device.matmul_flops(dtype)
    if bandwidth and flops and not device.has_kernels and not is_shared:
        measured = bandwidth, flops
        return RateMeter(dtype, lambda: measured, rates_file()).rates()._asdict()
    return {"measured_bandwidth_bytes_per_s": bandwidth, "measured_flops_per_s": flops}


def run_largest_step(
    model: Model,
    pool: LayerPools,
    scheduler: SchedulerConfig,
    longest: int,
    block_size: int,
    num_groups: int = 1,
) -> None:
    """The most tokens that a step may have, at the end of the longest sequence, where the host
    makes the steps. pool: of one block, in each group of layers."""
    count = min(scheduler.max_step_tokens, longest)
    at = torch.arange(count)
    kv_slots = (at % block_size).repeat(num_groups, 1)
    tables = torch.zeros(num_groups, 1, -(-longest // block_size), dtype=torch.int32)
    model(
        ModelInput(
            token_ids=torch.zeros_like(at),
            positions=at + longest - count,
            kv_slots=kv_slots if num_groups > 1 else kv_slots[0],
            block_tables=tables if num_groups > 1 else tables[0],
            query_starts=[0, count],
            context_lens=[longest],
            num_decodes=0,
            sample_rows=at[-scheduler.max_num_seqs :],
        ),
        pool,
    )


def size_gpu_pool(
    config: EngineConfig,
    pools: Sequence[GroupPool],
    budget: MemoryBudget,
    longest: int,
    padding_bytes: int = 0,
) -> PoolSize:
    """longest: sequence, in tokens. padding_bytes: of blocks that hold no sequence. Raises
    InvalidConfig where one sequence does not fit."""
    advice = pool_advice(config, budget)
    return size_pool(
        pools,
        config.scheduler,
        budget=pool_bytes(config, budget) - padding_bytes,
        max_blocks=_MAX_BLOCKS,
        max_len=longest,
        may_shorten=config.max_model_len is None,
        advice=lambda needed: advice(needed + padding_bytes),
    )
