"""A stand-in for FlashAttention 3's operator, computed by plain torch on a processor.

It is registered with torch by the schema of the real one, so that torch refuses arguments which the
real one lacks, and it refuses what mha_fwd of hopper/flash_api.cpp refuses. It reads every length,
which only a test may do.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.step.model_input import ModelInput
from tests.support.reference_attention import reference_attention

# hopper/flash_api.cpp of Dao-AILab/flash-attention, and hopper/flash_api_torch_lib.cpp of
# vllm-project/flash-attention.
_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, "
    "Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_SCHEMA_OF_VLLM = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "Tensor? o_scale, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, "
    "int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
# By the folder that an installation has: the library's file, and its operator.
_INSTALLED = {
    "flash_attn_3": ("_C.abi3.so", "flash_attn_3", _SCHEMA),
    "vllm": ("vllm_flash_attn/_vllm_fa3_C.abi3.so", "_vllm_fa3_C", _SCHEMA_OF_VLLM),
}
# What must be as it is by default, as nothing of it is computed here.
_NEUTRAL = {
    "window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0,
    "is_rotary_interleaved": False, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1,
    "cp_rank": 0,
}  # fmt: skip

Attend = Callable[..., Tensor]


class Installed:
    """num_calls: of the operator since it was installed. attend: as `right`."""

    def __init__(self) -> None:
        self.num_calls, self.attend = 0, right

    def __call__(self, **given: Any) -> Tensor:
        self.num_calls += 1
        out: Tensor = given["out"]
        out.copy_(self.attend(**given))
        return out


_current: list[Installed] = []
_libraries: dict[str, Any] = {}  # torch keeps an operator for good
_Library: Any = torch.library.Library


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, package: str = "flash_attn_3"
) -> Installed:
    """Has the package in a folder on sys.path, and its library loaded by torch as a real one."""
    file, namespace, schema = _INSTALLED[package]
    path = folder / package / file
    path.parent.mkdir(parents=True)
    path.touch()
    init = "raise AssertionError('imported')\n"
    (folder / package / "__init__.py").write_text(init)
    monkeypatch.syspath_prepend(folder)
    installed = Installed()

    def load_library(loaded: Path) -> None:
        assert loaded == path
        if namespace not in _libraries:
            library = _libraries[namespace] = _Library(namespace, "DEF")
            library.define(schema)
            names = [
                each.name for each in getattr(torch.ops, namespace).fwd.default._schema.arguments
            ]

            def fwd(*args: Any, **kwargs: Any) -> Any:
                given = dict(zip(names, args, strict=False)) | kwargs
                out = _current[-1](**given)
                empty = torch.empty(0)
                results = out, empty, empty.clone(), empty.clone()
                return results if package == "flash_attn_3" else list(results)

            library.impl("fwd", fwd, "CPU")
        _current.append(installed)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    return installed


def right(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int,
    page_table: Tensor,
    softmax_scale: float,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    num_splits: int = 0,
    **others: Any,
) -> Tensor:
    """Paged, each row's last query at its last key. Raises AssertionError for what the real one
    refuses, or what nobody should ask of it."""
    for name, value in others.items():
        assert value is None or value == _NEUTRAL[name], (name, value)
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype == out.dtype
    assert all(each.stride(-1) == 1 for each in (q, k, v, out, page_table))
    for each in (cu_seqlens_q, seqused_k):
        assert each.is_contiguous() and each.dtype == torch.int32
    (num_tokens, num_heads, head_dim), num_rows = q.shape, len(cu_seqlens_q) - 1
    assert num_tokens and head_dim % 8 == 0 and head_dim <= 256 and num_heads % k.shape[2] == 0
    assert out.shape == q.shape and k.shape == v.shape and k.shape[3] == head_dim
    assert seqused_k.shape == (num_rows,) and page_table.dtype == torch.int32
    assert page_table.shape[0] == num_rows and int(page_table.max()) < len(k)
    counts: list[int] = cu_seqlens_q.diff().tolist()
    assert int(cu_seqlens_q[0]) == 0 and int(cu_seqlens_q[-1]) == num_tokens
    assert min(counts) > 0 and max(counts) <= max_seqlen_q
    lengths: list[int] = seqused_k.tolist()
    room = page_table.shape[1] * k.shape[1]
    assert max(lengths) <= room and (max_seqlen_k is None or max(lengths) <= max_seqlen_k)
    assert softmax_scale == head_dim**-0.5 and is_causal and num_splits == 1
    assert window_size_right == (-1 if window_size_left == -1 else 0)
    window = None if window_size_left == -1 else window_size_left + 1
    return _attend(q, k, v, counts, lengths, page_table, window)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: list[int],
    lengths: list[int],
    tables: Tensor,
    window: int | None,
) -> Tensor:
    positions = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
    step = ModelInput(
        token_ids=q,
        positions=torch.cat(positions),
        kv_slots=q,
        block_tables=tables,
        query_starts=[0, *torch.tensor(counts).cumsum(0).tolist()],
        context_lens=lengths,
        num_decodes=0,
        sample_rows=q,
    )
    return reference_attention(q, k, v, step, window)
