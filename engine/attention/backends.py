"""Which attention a GPU's steps go through: what `--attention-backend` chooses between."""

from collections.abc import Iterable

import torch

from penstock.engine.attention.flash import FlashAttention
from penstock.engine.attention.host_planned import TorchAttention
from penstock.engine.attention.paged import PagedAttention
from penstock.engine.attention.protocol import DeviceAttention
from penstock.engine.attention.shape import AttentionShape
from penstock.engine.config import AttentionBackend, EngineConfig
from penstock.scheduler.errors import InvalidConfig


def make_attention(
    config: EngineConfig,
    shape: AttentionShape,
    windows: Iterable[int | None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    max_tokens: int,
) -> DeviceAttention:
    """What the configuration asks for; InvalidConfig where that is not to be had here.

    max_rows, max_tokens: of one step. `auto` is our Triton kernels, on every GPU: no measurement
    of FlashAttention beside them has been committed yet (`loadtest/results` is where it would be).
    """
    if config.attention_backend is AttentionBackend.TORCH:
        return TorchAttention()
    if config.attention_backend is AttentionBackend.FLASH_ATTN:
        if dtype is not torch.bfloat16:
            raise InvalidConfig(
                f"--dtype is {str(dtype).removeprefix('torch.')}, but FlashAttention takes no "
                "float32; use --dtype bfloat16, or --attention-backend triton"
            )
        return FlashAttention(shape)
    num_sms = 1
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return PagedAttention(shape, windows, max_rows, max_tokens, num_sms, device, dtype)
