"""A stand-in for the module `flash_attn`, computed by plain torch.

Each function has the parameters of the real one, in its order (`SOURCE` is where they are
defined): a call with arguments that the real one lacks or refuses fails here too. It reads every
length, which only a test may do.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.step.model_input import ModelInput
from tests.support.reference_attention import reference_attention

# In the source distribution of flash-attn 2.8.3.
SOURCE = "flash_attn/flash_attn_interface.py"


def parameters(source: Path) -> dict[str, list[str]]:
    """Of each function of a Python file, without importing it."""
    return {
        node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


class FlashAttnModule:
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
