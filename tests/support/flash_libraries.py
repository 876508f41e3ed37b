"""Modules with the signatures of the FlashAttention libraries, computed by plain torch.

Each function lists the parameters of the real one, in its order (`SOURCES` says where that is): a
call that the real one would not take fails here too, and so does one that it would refuse. They
look at every length, as only a test may.
"""

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.reference import reference_attention
from penstock.engine.model_input import ModelInput

# Where the signatures stand, in the source distribution of flash-attn 2.8.3, and in vLLM's wheel.
SOURCES = {
    "FlashAttention2Module": "flash_attn/flash_attn_interface.py",
    "FlashAttention3Module": "hopper/flash_attn_interface.py",
    "VllmFlashAttentionModule": "vllm/vllm_flash_attn/flash_attn_interface.py",
}


def parameters(source: Path) -> dict[str, list[str]]:
    """Of each function of a Python file, without importing it."""
    return {
        node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


class FlashAttention2Module:
    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: None = None,
        v: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        block_table: Tensor | None = None,
        softmax_scale: None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert cache_seqlens is not None and block_table is not None
        assert k_cache.shape[1] % 256 == 0 and q.dim() == 4
        counts = [q.shape[1]] * len(q)
        flat = q.flatten(0, 1)
        mixed = _attend(flat, k_cache, v_cache, cache_seqlens, block_table, counts, window_size)
        return mixed.view_as(q)

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert causal and block_table is not None and k.shape[1] % 256 == 0
        assert cu_seqlens_k.dtype == torch.int32 and max_seqlen_k >= int(cu_seqlens_k.diff().max())
        counts = _counts(cu_seqlens_q, max_seqlen_q)
        return _attend(q, k, v, cu_seqlens_k.diff(), block_table, counts, window_size)


class _Scheduled:
    """What FlashAttention 3 was told beforehand must be what it is told in the call."""

    promised: dict[int, tuple[Any, ...]]

    def __init__(self) -> None:
        self.promised = {}

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        headdim_v: None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: None = None,
        cache_leftpad: None = None,
        page_size: int | None = None,
        max_seqlen_k_new: int = 0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        has_softcap: bool = False,
        num_splits: int = 0,
        pack_gqa: None = None,
        sm_margin: int = 0,
    ) -> Tensor:
        assert cu_seqlens_q is not None and batch_size == len(cache_seqlens)
        metadata = torch.zeros(batch_size + 1, dtype=torch.int32)
        self.promised[id(metadata)] = (
            metadata,  # kept, so that no other gets its id
            (max_seqlen_q, max_seqlen_k, (num_heads_q, headdim), (page_size, num_heads_kv)),
            (tuple(window_size), num_splits, causal),
        )
        return metadata

    def _check(
        self,
        metadata: Tensor | None,
        max_query_len: int,
        max_key_len: int,
        query: Tensor,
        keys: Tensor,
        window_size: Sequence[int],
        num_splits: int,
        causal: bool,
    ) -> None:
        shapes = (tuple(query.shape[1:]), tuple(keys.shape[1:3]))
        assert self.promised[id(metadata)][1:] == (
            (max_query_len, max_key_len, *shapes),
            (tuple(window_size), num_splits, causal),
        )
        assert 1 <= num_splits <= 128 and causal


class FlashAttention3Module(_Scheduled):
    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: None = None,
        v: None = None,
        qv: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        softmax_scale: None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert cache_seqlens is not None and page_table is not None
        assert cu_seqlens_q is not None and max_seqlen_q is not None
        max_key_len = page_table.shape[1] * k_cache.shape[1]
        self._check(
            scheduler_metadata, max_seqlen_q, max_key_len, q, k_cache, window_size, num_splits,
            causal,
        )  # fmt: skip
        counts = _counts(cu_seqlens_q, max_seqlen_q)
        return _attend(q, k_cache, v_cache, cache_seqlens, page_table, counts, window_size)


class VllmFlashAttentionModule(_Scheduled):
    FA3_AVAILABLE = True

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: None = None,
        seqused_k: Tensor | None = None,
        q_v: None = None,
        dropout_p: float = 0.0,
        softmax_scale: None = None,
        causal: bool = False,
        window_size: list[int] | None = None,
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
        return_softmax_lse: bool = False,
        out: Tensor | None = None,
        scheduler_metadata: Tensor | None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        num_splits: int = 0,
        fa_version: int = 2,
    ) -> Tensor:
        assert seqused_k is not None and block_table is not None and out is not None
        assert window_size is not None and fa_version == 3
        self._check(
            scheduler_metadata, max_seqlen_q, max_seqlen_k, q, k, window_size, num_splits, causal
        )
        counts = _counts(cu_seqlens_q, max_seqlen_q)
        return out.copy_(_attend(q, k, v, seqused_k, block_table, counts, window_size))


def _counts(query_starts: Tensor, max_query_len: int) -> list[int]:
    assert query_starts.dtype == torch.int32
    counts: list[int] = query_starts.diff().tolist()
    assert max(counts) <= max_query_len and (max_query_len > 1 or set(counts) == {1})
    return counts


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    context_lens: Tensor,
    tables: Tensor,
    counts: list[int],
    window_size: Sequence[int],
) -> Tensor:
    """Causal, the last query token of a row at its last key."""
    assert tables.dtype == context_lens.dtype == torch.int32 and tables.is_contiguous()
    lengths = context_lens.tolist()
    left, right = window_size
    assert right == (-1 if left == -1 else 0)
    positions = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
    step = ModelInput(
        token_ids=query,
        positions=torch.cat(positions),
        kv_slots=query,
        block_tables=tables,
        query_starts=[0, *torch.tensor(counts).cumsum(0).tolist()],
        context_lens=lengths,
        num_decodes=0,
        sample_rows=query,
    )
    return reference_attention(query, keys, values, step, None if left == -1 else left + 1)


INTERFACES: tuple[tuple[Callable[[], Any], str], ...] = (
    (FlashAttention2Module, SOURCES["FlashAttention2Module"]),
    (FlashAttention3Module, SOURCES["FlashAttention3Module"]),
    (VllmFlashAttentionModule, SOURCES["VllmFlashAttentionModule"]),
)
