"""FlashAttention 2 as a backend: the package `flash-attn` of PyPI, where it is installed.

It reads the same pool as the kernels of `engine/kernels/attention/paged`. Two calls a layer: the
decodes, one token each, then the chunks. The host never waits for the device: lengths stay on the
device, and the largest length that the interface takes is the most that a block table can hold. So
a captured CUDA graph is valid for any lengths.

Interface: flash-attn 2.8.3, flash_attn/flash_attn_interface.py, and csrc/flash_attn/flash_api.cpp
for what it requires of a block table.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.step.device_step import DeviceStep
from penstock.scheduler.errors import InvalidConfig

# Blocks must hold a multiple of this many tokens.
_BLOCK_MULTIPLE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """The chunks of a step. starts: see `DeviceStep.chunk_starts`. key_starts: likewise, among the
    keys if those of all sequences were in one row."""

    block_tables: Tensor
    starts: Tensor
    key_starts: Tensor


class FlashAttention:
    """`DeviceAttention` by flash-attn."""

    is_capturable = True
    takes_decode_lens = False

    def __init__(self, shapes: Collection[AttentionShape]) -> None:
        """shapes: of all layers. Raises InvalidConfig where it is not installed, or cannot compute
        one of them."""
        self._decode, self._prefill = _load()
        for shape in shapes:
            _check(shape)
            self._block_size = shape.block_size
        # By group of layers.
        self._decode_tables: dict[int, Tensor] = {}
        self._chunks: dict[int, _Chunks | None] = {}

    def plan(self, step: DeviceStep) -> None:
        num = step.num_decodes
        tables = step.block_tables.index_select(0, step.slots)
        self._decode_tables[step.group] = tables[:num]
        self._chunks[step.group] = None
        if step.chunk_starts is not None:
            lens = step.context_lens[num:]
            key_starts = lens.new_zeros(len(lens) + 1)
            torch.cumsum(lens, 0, dtype=torch.int32, out=key_starts[1:])
            self._chunks[step.group] = _Chunks(
                block_tables=tables[num:], starts=step.chunk_starts, key_starts=key_starts
            )

    def __call__(self, query: Tensor, layer: LayerContext, step: DeviceStep, out: Tensor) -> None:
        keys, values, window, sinks, has_spans = layer
        # `make_attention` refuses a cache in 8 bits, and sinks.
        assert sinks is None and isinstance(keys, Tensor) and isinstance(values, Tensor)
        assert not has_spans or step.reaches is None, "it has no masks"
        num, chunks = step.num_decodes, self._chunks[step.group]
        # How many keys before and after its own a query sees.
        window_size = (-1, -1) if window is None else (window - 1, 0)
        options: dict[str, Any] = {"causal": True, "window_size": window_size}
        if num:
            mixed = self._decode(
                query[:num].unsqueeze(1),
                keys,
                values,
                cache_seqlens=step.context_lens[:num],
                block_table=self._decode_tables[step.group],
                **options,
            )
            out[:num].copy_(mixed.squeeze(1))
        if chunks is not None:
            mixed = self._prefill(
                query[num:],
                keys,
                values,
                cu_seqlens_q=chunks.starts,
                cu_seqlens_k=chunks.key_starts,
                max_seqlen_q=len(query) - num,
                max_seqlen_k=chunks.block_tables.shape[1] * self._block_size,
                block_table=chunks.block_tables,
                **options,
            )
            out[num:].copy_(mixed)


def _load() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """flash-attn's functions for decodes and for chunks."""
    found = ""
    try:
        module = import_module("flash_attn")
        return module.flash_attn_with_kvcache, module.flash_attn_varlen_func
    except ModuleNotFoundError as error:
        if error.name != "flash_attn":  # it is installed, and lacks a module itself
            found = f" (found, but not usable: {error})"
    # OSError: a library built for another torch. AttributeError: a version that is too old.
    except (ImportError, OSError, AttributeError) as error:
        found = f" (found, but not usable: {error})"
    raise InvalidConfig(
        f"--attention-backend is flash_attn, but FlashAttention is not installed{found}; "
        "pip install 'penstock[flash]', or use --attention-backend triton"
    )


def _check(shape: AttentionShape) -> None:
    if shape.block_size % _BLOCK_MULTIPLE:
        fitting = -(-shape.block_size // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE
        raise InvalidConfig(
            f"--block-size is {shape.block_size}, but flash-attn requires a multiple of "
            f"{_BLOCK_MULTIPLE}; use --block-size {fitting}, or --attention-backend triton"
        )
    if not shape.is_flash:
        raise InvalidConfig(
            f"this model's heads have {shape.head_dim} dimensions, but flash-attn requires a "
            "multiple of 8, at most 256; use --attention-backend triton"
        )
