"""A start decides device, types and formats, or refuses them, before anything is loaded."""

import logging
from pathlib import Path

import torch

from penstock.engine.config import Device as DeviceKind
from penstock.engine.config import Dtype, EngineConfig
from penstock.engine.executors.cuda.device import CudaGpu, Device, Processor
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.json_file import Fields
from penstock.engine.memory.dtypes import TORCH_DTYPES
from penstock.engine.memory.hardware import computes_bfloat16
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.families import FAMILIES
from penstock.engine.models.formats.parse import quantization_name
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)


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


def log_text_only(config: EngineConfig, model: ModelConfig) -> None:
    """Says that images are refused, to those who may expect otherwise."""
    if model.is_wrapped and not config.language_model_only:
        logger.warning(
            "%s is a model of text and images, of which the text model alone is served: its "
            "encoders are not loaded, and requests with images get 400; --language-model-only says "
            "that this is wanted",
            config.model,
        )
