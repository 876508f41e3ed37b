"""The attention backends of a GPU that `--attention-backend` chooses from."""

from collections.abc import Collection, Mapping

import torch

from penstock.engine.config import AttentionBackend, EngineConfig, KVCacheDtype
from penstock.engine.kernels.attention.flash import FlashAttention
from penstock.engine.kernels.attention.flash_prefill import FlashPrefill
from penstock.engine.kernels.attention.gathered import TorchAttention
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.attention.protocol import DeviceAttention
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.step.device_step import DraftSizes
from penstock.scheduler.errors import InvalidConfig


def make_attention(
    config: EngineConfig,
    windows: Mapping[AttentionShape, Collection[int | None]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    max_tokens: int,
    has_sinks: bool = False,
    flash: FlashPrefill | None = None,
    drafted: DraftSizes | None = None,
) -> DeviceAttention:
    """The configured backend. Raises InvalidConfig if it is not available here.

    windows: as of `PagedAttention`. max_rows, max_tokens: of one step. has_sinks: whether calls
    give sinks. flash: for chunks, with `auto`, which else is our Triton kernels on every GPU.
    drafted: where decodes may have drafts, which `takes_drafts` says.
    """
    if config.attention_backend is AttentionBackend.TORCH:
        return TorchAttention()
    if config.attention_backend is AttentionBackend.FLASH_ATTN:
        if config.kv_cache_dtype is not KVCacheDtype.AUTO:
            raise InvalidConfig(
                f"--kv-cache-dtype is {config.kv_cache_dtype}, which FlashAttention 2 does not "
                "support; leave it out, or use --attention-backend triton"
            )
        if has_sinks:
            raise InvalidConfig(
                "this model's attention has sinks, which FlashAttention 2 does not support; use "
                "--attention-backend triton"
            )
        if dtype is torch.float32:
            raise InvalidConfig(
                "--dtype is float32, which FlashAttention does not support; use --dtype bfloat16 "
                "or float16, or --attention-backend triton"
            )
        return FlashAttention(windows)
    num_sms = 1
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    sizes = max_rows, max_tokens, num_sms
    return PagedAttention(windows, *sizes, device, dtype, flash=flash, drafted=drafted)


def takes_drafts(config: EngineConfig) -> bool:
    """Whether the configured backend computes several queries of a decode."""
    return config.attention_backend in (AttentionBackend.AUTO, AttentionBackend.TRITON)
