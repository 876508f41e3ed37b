"""FlashAttention as a backend, where it is installed: version 2, or version 3 on Hopper.

It reads the same pool as the kernels of `penstock.engine.attention.paged`. Two calls a layer: the
decodes, one token each, then the chunks. Nothing waits for the device: where its interface asks
for a largest length, it is given what the block table can hold, and the lengths themselves lie on
the device. So a captured CUDA graph holds for any lengths.

Interfaces read: flash-attn 2.8.3 (flash_attn/flash_attn_interface.py, and flash_api.cpp for what a
block table must be), FlashAttention 3 (hopper/flash_attn_interface.py of the same), and vLLM's
build of it (vllm/vllm_flash_attn/flash_attn_interface.py), which writes where it is told.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.attention.shape import AttentionShape
from penstock.engine.device_step import DeviceStep
from penstock.scheduler.errors import InvalidConfig

# Partial results of FlashAttention 3 take this many query tokens' room (of float32), which 64 rows
# fill in 32 pieces each: 32 MiB for 32 heads of 128.
_PARTIAL_TOKENS = 2048
_MAX_SPLITS = 32
# FlashAttention 3 chooses a row's pieces by its own length only up to so many rows.
_MAX_SPLIT_ROWS = 992


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashRows:
    """Rows that one call is about. Tensors are int32 on the device.

    block_tables: (R, max_blocks). query_starts, key_starts: (R + 1,), each row's offset among the
    query tokens, and among the keys if these lay one behind the other. context_lens: (R,).
    max_query_len: a bound, and 1 only where every row has one token.
    """

    block_tables: Tensor
    query_starts: Tensor
    key_starts: Tensor
    context_lens: Tensor
    max_query_len: int
    block_size: int

    @property
    def max_context_len(self) -> int:
        return self.block_tables.shape[1] * self.block_size

    def max_splits(self, num_tokens: int) -> int:
        """Into how many pieces a row's keys may be cut."""
        if len(self.context_lens) > _MAX_SPLIT_ROWS:
            return 1
        return max(1, min(_MAX_SPLITS, _PARTIAL_TOKENS // num_tokens))


class FlashLibrary(Protocol):
    """An installed FlashAttention: what a call to it needs."""

    @property
    def name(self) -> str: ...

    @property
    def block_multiple(self) -> int:
        """Blocks must hold a multiple of so many tokens."""
        ...

    def plan(
        self, rows: FlashRows, num_tokens: int, window: int | None, shape: AttentionShape
    ) -> Tensor | None:
        """What all layers with this window share, if anything."""
        ...

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: FlashRows,
        plan: Tensor | None,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Writes out, (T, num_heads, head_dim); query is like it."""
        ...


class FlashAttention:
    """`DeviceAttention` by an installed FlashAttention."""

    is_capturable = True
    takes_decode_lens = False

    def __init__(
        self, library: FlashLibrary, shape: AttentionShape, windows: Iterable[int | None]
    ) -> None:
        """windows: all that the model's layers have. InvalidConfig: what it cannot compute."""
        _check(library, shape)
        self._library = library
        self._shape = shape
        self._windows = set(windows)
        self._parts: list[tuple[slice, FlashRows, dict[int | None, Tensor | None]]] = []

    def plan(self, step: DeviceStep) -> None:
        num, num_tokens = step.num_decodes, len(step.token_ids)
        tables = step.block_tables.index_select(0, step.slots)
        self._parts = []
        if num:
            starts = torch.arange(num + 1, dtype=torch.int32, device=tables.device)
            self._add(slice(0, num), tables[:num], starts, step.context_lens[:num], 1)
        if step.chunk_starts is not None:
            count = num_tokens - num
            lens = step.context_lens[num:]
            self._add(slice(num, num_tokens), tables[num:], step.chunk_starts, lens, count)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: DeviceStep,
        window: int | None,
        out: Tensor,
    ) -> None:
        for tokens, rows, plans in self._parts:
            plan = plans[window]
            self._library.attend(query[tokens], keys, values, rows, plan, window, out[tokens])

    def _add(
        self,
        tokens: slice,
        tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        max_query_len: int,
    ) -> None:
        key_starts = context_lens.new_zeros(len(context_lens) + 1)
        torch.cumsum(context_lens, 0, dtype=torch.int32, out=key_starts[1:])
        rows = FlashRows(
            block_tables=tables,
            query_starts=query_starts,
            key_starts=key_starts,
            context_lens=context_lens,
            max_query_len=max_query_len,
            block_size=self._shape.block_size,
        )
        count = tokens.stop - tokens.start
        plans = {
            window: self._library.plan(rows, count, window, self._shape) for window in self._windows
        }
        self._parts.append((tokens, rows, plans))


class FlashAttention2:
    """`flash_attn`, from version 2.8 on."""

    name = "FlashAttention 2"
    block_multiple = 256

    def __init__(self, module: ModuleType | Any) -> None:
        self._decode: Callable[..., Tensor] = module.flash_attn_with_kvcache
        self._prefill: Callable[..., Tensor] = module.flash_attn_varlen_func

    def plan(
        self, rows: FlashRows, num_tokens: int, window: int | None, shape: AttentionShape
    ) -> Tensor | None:
        return None

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: FlashRows,
        plan: Tensor | None,
        window: int | None,
        out: Tensor,
    ) -> None:
        if rows.max_query_len == 1:
            mixed = self._decode(
                query.unsqueeze(1),
                keys,
                values,
                cache_seqlens=rows.context_lens,
                block_table=rows.block_tables,
                causal=True,
                window_size=_window_size(window),
            )
            out.copy_(mixed.squeeze(1))
            return
        mixed = self._prefill(
            query,
            keys,
            values,
            cu_seqlens_q=rows.query_starts,
            cu_seqlens_k=rows.key_starts,
            max_seqlen_q=rows.max_query_len,
            max_seqlen_k=rows.max_context_len,
            causal=True,
            window_size=_window_size(window),
            block_table=rows.block_tables,
        )
        out.copy_(mixed)


class FlashAttention3:
    """`flash_attn_interface`, as built from FlashAttention's folder `hopper`."""

    name = "FlashAttention 3"
    block_multiple = 16

    def __init__(self, module: ModuleType | Any) -> None:
        self._attend: Callable[..., Tensor] = module.flash_attn_with_kvcache
        self._metadata: Callable[..., Tensor] = module.get_scheduler_metadata

    def plan(
        self, rows: FlashRows, num_tokens: int, window: int | None, shape: AttentionShape
    ) -> Tensor | None:
        return _schedule(self._metadata, rows, num_tokens, window, shape)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: FlashRows,
        plan: Tensor | None,
        window: int | None,
        out: Tensor,
    ) -> None:
        mixed = self._attend(
            query,
            keys,
            values,
            cache_seqlens=rows.context_lens,
            page_table=rows.block_tables,
            cu_seqlens_q=rows.query_starts,
            max_seqlen_q=rows.max_query_len,
            causal=True,
            window_size=_window_size(window),
            scheduler_metadata=plan,
            num_splits=rows.max_splits(len(query)),
        )
        out.copy_(mixed)


class VllmFlashAttention3:
    """The build of FlashAttention 3 that vLLM's wheel brings."""

    name = "vLLM's FlashAttention 3"
    block_multiple = 16

    def __init__(self, module: ModuleType | Any) -> None:
        if not module.FA3_AVAILABLE:
            raise ImportError(module.FA3_UNAVAILABLE_REASON)
        self._attend: Callable[..., Tensor] = module.flash_attn_varlen_func
        self._metadata: Callable[..., Tensor] = module.get_scheduler_metadata

    def plan(
        self, rows: FlashRows, num_tokens: int, window: int | None, shape: AttentionShape
    ) -> Tensor | None:
        return _schedule(self._metadata, rows, num_tokens, window, shape)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: FlashRows,
        plan: Tensor | None,
        window: int | None,
        out: Tensor,
    ) -> None:
        self._attend(
            query,
            keys,
            values,
            max_seqlen_q=rows.max_query_len,
            cu_seqlens_q=rows.query_starts,
            max_seqlen_k=rows.max_context_len,
            seqused_k=rows.context_lens,
            causal=True,
            window_size=list(_window_size(window)),
            block_table=rows.block_tables,
            out=out,
            scheduler_metadata=plan,
            num_splits=rows.max_splits(len(query)),
            fa_version=3,
        )


# Modules in which an interface is looked for, the fastest first.
_HOPPER: tuple[tuple[str, Callable[[Any], FlashLibrary]], ...] = (
    ("flash_attn_interface", FlashAttention3),
    ("vllm.vllm_flash_attn.flash_attn_interface", VllmFlashAttention3),
)
_ANY_GPU: tuple[tuple[str, Callable[[Any], FlashLibrary]], ...] = (("flash_attn", FlashAttention2),)


def find_flash_library(capability: tuple[int, int]) -> FlashLibrary:
    """The fastest that is installed and runs on a GPU of this compute capability."""
    reasons = []
    for module, library in (*(_HOPPER if capability[0] == 9 else ()), *_ANY_GPU):
        try:
            return library(import_module(module))
        except ModuleNotFoundError as error:
            if error.name != module.partition(".")[0]:  # it is there, and lacks something itself
                reasons.append(f"{module}: {error}")
        # OSError: a shared library that is built for another torch.
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(f"{module}: {error}")
    found = f" (found, but not usable: {'; '.join(reasons)})" if reasons else ""
    raise InvalidConfig(
        f"--attention-backend is flash_attn, but FlashAttention is not installed{found}; "
        "pip install 'penstock[flash]', or use --attention-backend triton"
    )


def _check(library: FlashLibrary, shape: AttentionShape) -> None:
    name, multiple = library.name, library.block_multiple
    if shape.block_size % multiple:
        raise InvalidConfig(
            f"--block-size is {shape.block_size}, but {name} reads blocks of a multiple of "
            f"{multiple} tokens; use --block-size {-(-shape.block_size // multiple) * multiple}, "
            "or --attention-backend triton"
        )
    if shape.head_dim % 8 or shape.head_dim > 256:
        raise InvalidConfig(
            f"this model's heads have {shape.head_dim} dimensions, and {name} takes a multiple of "
            "8, at most 256; use --attention-backend triton"
        )


def _window_size(window: int | None) -> tuple[int, int]:
    """How many keys before and behind its own a query sees."""
    return (-1, -1) if window is None else (window - 1, 0)


def _schedule(
    metadata: Callable[..., Tensor],
    rows: FlashRows,
    num_tokens: int,
    window: int | None,
    shape: AttentionShape,
) -> Tensor:
    """How FlashAttention 3 shares the work out, from the lengths on the device."""
    return metadata(
        batch_size=len(rows.context_lens),
        max_seqlen_q=rows.max_query_len,
        max_seqlen_k=rows.max_context_len,
        num_heads_q=shape.num_heads,
        num_heads_kv=shape.num_kv_heads,
        headdim=shape.head_dim,
        cache_seqlens=rows.context_lens,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=rows.query_starts,
        page_size=shape.block_size,
        causal=True,
        window_size=_window_size(window),
        num_splits=rows.max_splits(num_tokens),
    )
