"""Whether FlashAttention 3 computes the prefill chunks of a GPU."""

import logging
from collections.abc import Collection, Mapping

import torch

from penstock.engine.config import AttentionBackend, EngineConfig, GpuWay
from penstock.engine.executors.cuda.device import Device
from penstock.engine.kernels.attention.flash_prefill import FlashPrefill, library
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.loading.self_check import DEVICE_S, deadline
from penstock.engine.step.gpu_fault import first_line, is_gpu_fault

logger = logging.getLogger(__name__)

# It is built for Hopper. Later GPUs run none of its code.
_CAPABILITY = 9
_DTYPES = (torch.bfloat16, torch.float16)
# Of `FlashPrefill.error`: rounding to bfloat16 gives less than 0.004, a window of 4,096 that is
# wrong by one key 0.013.
_TOLERANCE = 0.01


def flash_prefill(
    config: EngineConfig,
    device: Device,
    windows: Mapping[AttentionShape, Collection[int | None]],
    dtypes: tuple[torch.dtype, torch.dtype],
    has_sinks: bool,
) -> FlashPrefill | None:
    """None where our kernels are to compute them. dtypes: of queries, and of the pool.

    It is used only if it gives what torch gives for every head size and window of the model. After
    a fault of the GPU, whichever caused it, the next process goes on without it.
    """
    if config.attention_backend is not AttentionBackend.AUTO or device.capability != _CAPABILITY:
        return None
    if (found := library()) is None:
        logger.info("prefill attention: our own kernels; FlashAttention 3 is not installed")
        return None
    shapes = {shape: each for shape, each in windows.items() if FlashPrefill.fits(shape)}
    reason = _reason(config, shapes, dtypes, has_sinks)
    if reason is None:
        try:
            flash = FlashPrefill(*found)
            for shape, of_layers in shapes.items():
                for window in of_layers:
                    with deadline(DEVICE_S):
                        error = flash.error(shape, window, dtypes[0], device.device)
                    if not error <= _TOLERANCE:
                        reason = f"it is off torch's result by {error:.2g} of its norm"
        # Whatever a library that was built for something else may raise.
        except Exception as error:
            if is_gpu_fault(error):
                raise  # nothing more can be computed in this process
            reason = first_line(error)
    if reason is not None:
        what = "prefill attention: our own kernels, as FlashAttention 3 (%s) is not used: %s"
        logger.warning(what, found[0], reason)
        return None
    logger.info("prefill attention: FlashAttention 3 (%s), in steps without a graph", found[0])
    return flash


def _reason(
    config: EngineConfig,
    shapes: Collection[AttentionShape],
    dtypes: tuple[torch.dtype, torch.dtype],
    has_sinks: bool,
) -> str | None:
    """Why it is not to be tried."""
    if config.gpu_way is not GpuWay.PDL:
        return f"--gpu-way is {config.gpu_way}"
    if has_sinks:
        return "the model's attention has sinks"
    if dtypes[0] not in _DTYPES or dtypes[0] is not dtypes[1]:
        return "it needs keys and values of bfloat16 or float16"
    return None if shapes else "it has no kernel for the model's heads"
