"""FlashAttention 3 as a yardstick for our attention kernels: vLLM's build of it, from a folder.

Interface: vllm/vllm_flash_attn/flash_attn_interface.py of a vLLM wheel.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.step.device_step import DeviceStep
from penstock.scheduler.errors import InvalidConfig

# Partial results may take the memory of this many query tokens (of float32), which 64 rows fill in
# 32 splits each: 32 MiB for 32 heads of 128.
_PARTIAL_TOKENS = 2048
_MAX_SPLITS = 32
# It splits a row by the row's own length only up to this many rows.
_MAX_SPLIT_ROWS = 992


class FlashAttention3:
    """`DeviceAttention` of steps that are all decodes or all chunks."""

    name = "vLLM's FlashAttention 3"
    is_capturable = True
    takes_decode_lens = False

    def __init__(self, module: Any, shape: AttentionShape) -> None:
        """module: from `interface_in`."""
        if not module.FA3_AVAILABLE:
            raise InvalidConfig(f"--flash-attn-3: {module.FA3_UNAVAILABLE_REASON}")
        self._module = module
        self._shape = shape
        self._arguments: dict[str, Any] = {}

    def plan(self, step: DeviceStep) -> None:
        """For layers without a window, of which alone the benchmarks have any."""
        num_rows, num_tokens, shape = len(step.slots), len(step.token_ids), self._shape
        starts, max_query_len = step.chunk_starts, num_tokens
        if starts is None:
            starts = torch.arange(num_rows + 1, dtype=torch.int32, device=step.slots.device)
            max_query_len = 1
        tables = step.block_tables.index_select(0, step.slots)
        num_splits = max(1, min(_MAX_SPLITS, _PARTIAL_TOKENS // num_tokens))
        shared = {
            "max_seqlen_q": max_query_len,
            "max_seqlen_k": tables.shape[1] * shape.block_size,
            "cu_seqlens_q": starts,
            "causal": True,
            "num_splits": 1 if num_rows > _MAX_SPLIT_ROWS else num_splits,
        }
        schedule = self._module.get_scheduler_metadata(
            batch_size=num_rows,
            num_heads_q=shape.num_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=step.context_lens,
            qkv_dtype=torch.bfloat16,
            page_size=shape.block_size,
            window_size=(-1, -1),
            **shared,
        )
        self._arguments = shared | {
            "seqused_k": step.context_lens,
            "block_table": tables,
            "window_size": [-1, -1],
            "scheduler_metadata": schedule,
            "fa_version": 3,
        }

    def __call__(self, query: Tensor, layer: LayerContext, step: DeviceStep, out: Tensor) -> None:
        keys, values, window, sinks, *_ = layer
        assert window is None and sinks is None
        self._module.flash_attn_varlen_func(query, keys, values, out=out, **self._arguments)


def interface_in(folder: Path) -> ModuleType:
    """The flash_attn_interface.py of a folder, which finds the shared library beside it.

    Its imports are relative, so the folder stands for a package.
    """
    for file in ("flash_attn_interface.py", "_vllm_fa3_C.abi3.so"):
        if not (folder / file).exists():
            raise InvalidConfig(
                f"--flash-attn-3 is {folder}, which has no {file}; name the folder "
                "vllm/vllm_flash_attn of an unpacked vLLM wheel"
            )
    name = "flash_attn_3_of_a_folder"
    package = ModuleType(name)
    package.__path__ = [str(folder.resolve())]
    sys.modules[name] = package
    return import_module(f"{name}.flash_attn_interface")
