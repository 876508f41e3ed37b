"""Which weights of a model stay codes on a GPU."""

import torch

from penstock.engine.config import Quantization
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.formats.kept import AsStored, CodePolicy, OnGpu
from penstock.scheduler.errors import InvalidConfig


def kept_on_gpu(model: ModelConfig, device: torch.device) -> CodePolicy:
    """Keeps nothing of a mixture, because no kernel of experts reads codes."""
    return OnGpu(device) if model.experts is None else AsStored()


def check_experts_on_gpu(model: ModelConfig, quantization: Quantization | None) -> None:
    """Raises InvalidConfig for a mixture that --quantization is to round."""
    if model.experts is not None and quantization is not None:
        raise InvalidConfig(
            f"--quantization is {quantization}, and a GPU computes the experts of a mixture from "
            "plain weights alone; leave it out, or use --device cpu"
        )
