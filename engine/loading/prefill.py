"""Whether FlashAttention 3 computes the prefill chunks of a GPU."""

import logging

import torch

from penstock.engine.config import AttentionBackend, EngineConfig, GpuWay
from penstock.engine.executors.cuda.device import Device
from penstock.engine.kernels.attention.flash_prefill import FlashPrefill, library
from penstock.engine.loading.self_check import DEVICE_S, deadline
from penstock.engine.models.config import ModelConfig
from penstock.engine.step.gpu_fault import first_line, is_gpu_fault

logger = logging.getLogger(__name__)

# Rounding to bfloat16 gives less than 0.004, a window of 4,096 that is wrong by one key 0.013.
_TOLERANCE = 0.01


def flash_prefill(
    config: EngineConfig, device: Device, model: ModelConfig, block_size: int,
    dtypes: set[torch.dtype],
) -> FlashPrefill | None:  # fmt: skip
    """None where our kernels are to compute them. dtypes: of queries, and of the pool.

    It has to give what torch gives for every head size and window of the model. After a fault of
    the GPU, whichever caused it, the next process goes on without it.
    """
    # It is built for Hopper, and later GPUs run none of its code.
    if config.attention_backend is not AttentionBackend.AUTO or device.capability != 9:
        return None
    found, windows = library(), model.attention_windows(block_size).items()
    shapes = [(shape, window) for shape, each in windows if shape.is_flash for window in each]
    reasons = {
        "it is not installed": found is None,
        f"--gpu-way is {config.gpu_way}": config.gpu_way is not GpuWay.PDL,
        "it needs bfloat16 or float16": dtypes not in ({torch.bfloat16}, {torch.float16}),
        "it has no kernel for the model's heads": not shapes,
        "the model's attention has sinks": any(each.has_sinks for each in model.attentions),
    }
    reason = next((why for why, is_so in reasons.items() if is_so), None)
    try:
        if found is not None and reason is None:
            flash = FlashPrefill(*found)
            with deadline(DEVICE_S):
                errors = [flash.error(*each, next(iter(dtypes)), device.device) for each in shapes]
            if all(error <= _TOLERANCE for error in errors):
                logger.info("prefill attention: FlashAttention 3 (%s), without graphs", found[0])
                return flash
            reason = f"its results are off torch's by {max(errors):.2g} of their norm"
    except Exception as error:  # whatever a library that was built for something else raises
        if is_gpu_fault(error):
            raise  # nothing more can be computed in this process
        reason = first_line(error)
    level = logging.INFO if found is None else logging.WARNING
    logger.log(level, "prefill attention: our kernels, not FlashAttention 3: %s", reason)
    return None
