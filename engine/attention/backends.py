"""Which attention a GPU's steps go through: what `--attention-backend` chooses between."""

import torch

from penstock.engine.attention.flash import FlashAttention, find_flash_library
from penstock.engine.attention.host_planned import TorchAttention
from penstock.engine.attention.paged import AttentionShape, PagedAttention
from penstock.engine.config import AttentionBackend, EngineConfig
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.fused import DeviceAttention
from penstock.scheduler.errors import InvalidConfig


def make_attention(
    config: EngineConfig,
    model: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    max_tokens: int,
) -> DeviceAttention:
    """What the configuration asks for; InvalidConfig where that is not to be had here.

    max_rows, max_tokens: of one step. `auto` is our Triton kernels, on every GPU: no measurement
    of FlashAttention beside them has been committed yet (`loadtest/results` is where it would be).
    """
    shape = AttentionShape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
    )
    if config.attention_backend is AttentionBackend.TORCH:
        return TorchAttention()
    if config.attention_backend is AttentionBackend.FLASH_ATTN:
        if dtype is not torch.bfloat16:
            raise InvalidConfig(
                f"--dtype is {str(dtype).removeprefix('torch.')}, but FlashAttention takes no "
                "float32; use --dtype bfloat16, or --attention-backend triton"
            )
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        return FlashAttention(find_flash_library(capability), shape, model.windows)
    num_sms = 1
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return PagedAttention(shape, model.windows, max_rows, max_tokens, num_sms, device, dtype)
