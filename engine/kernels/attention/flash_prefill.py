"""FlashAttention 3 for prefill chunks, where a library of it is installed.

Its operator is called rather than a function of Python: the operator writes to the tensor that it
is given, and the package flash_attn_3 and vLLM's fork have it under the same names. Of vLLM the
library's file alone is loaded. The host never waits for the device: lengths stay there, and the
largest ones are the most that the step's tokens and a block table can hold. Keys are never split
among programs, so that a chunk's result depends on nothing beside it.

Interface: hopper/flash_api.cpp of Dao-AILab/flash-attention, and hopper/flash_api_torch_lib.cpp of
vllm-project/flash-attention, whose further arguments have no defaults.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.attention.gathered import TorchAttention
from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.step.device_step import DeviceStep

# By package: the library's file in it, and the namespace of its operator.
_LIBRARIES = {
    "flash_attn_3": ("_C*.so", "flash_attn_3"),
    "vllm": ("vllm_flash_attn/_vllm_fa3_C*.so", "_vllm_fa3_C"),
}
# What arguments that we do not give are, where None is not allowed.
_NEUTRAL = {
    "softcap": 0.0,
    "attention_chunk": 0,
    "is_rotary_interleaved": False,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
# Of `error`: two chunks; how many keys the first has beside a window's; and the widest window that
# is exceeded.
_CHUNKS, _CONTEXT, _WIDEST = (150, 70), 500, 8192


def library() -> tuple[Path, str] | None:
    """The file of an installed library, and its operator's namespace. Imports neither package."""
    for package, (pattern, namespace) in _LIBRARIES.items():
        spec = find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            for file in Path(place).glob(pattern):
                return file, namespace
    return None


class FlashPrefill:
    """Prompt chunks, as `PagedPrefill`."""

    def __init__(self, file: Path, namespace: str) -> None:
        """See `library`. Raises OSError or AttributeError for a library that cannot be loaded."""
        torch.ops.load_library(file)
        self._fwd = getattr(torch.ops, namespace).fwd.default
        arguments = self._fwd._schema.arguments
        self._others = {
            each.name: _NEUTRAL.get(each.name) for each in arguments if not each.has_default_value()
        }
        self._tables: dict[int, Tensor] = {}  # of the chunks, by group of layers

    @staticmethod
    def fits(shape: AttentionShape) -> bool:
        return shape.head_dim % 8 == 0 and shape.head_dim <= 256

    def plan(self, step: DeviceStep) -> None:
        slots = step.slots[step.num_decodes :]
        self._tables[step.group] = step.block_tables.index_select(0, slots)

    def __call__(self, query: Tensor, layer: LayerContext, step: DeviceStep, out: Tensor) -> None:
        """query, out: of the chunks alone."""
        keys, values, window, sinks = layer
        assert sinks is None and isinstance(keys, Tensor), "see penstock.engine.loading.prefill"
        tables = self._tables[step.group]
        # How many keys before and after its own a query sees; -1 is all that causality allows.
        left, right = (-1, -1) if window is None else (window - 1, 0)
        given: dict[str, Any] = {
            "q": query,
            "k": keys,
            "v": values,
            "out": out,
            "cu_seqlens_q": step.chunk_starts,
            "seqused_k": step.context_lens[step.num_decodes :],
            "max_seqlen_q": len(query),
            "max_seqlen_k": tables.shape[1] * keys.shape[1],
            "page_table": tables,
            "softmax_scale": query.shape[-1] ** -0.5,
            "is_causal": True,
            "window_size_left": left,
            "window_size_right": right,
            "num_splits": 1,
        }
        self._fwd(**(self._others | given))

    def error(
        self, shape: AttentionShape, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> float:
        """How far off torch's result in float32 it is, each head relative to its norm: of two
        chunks whose blocks are anywhere in a pool. One key too many or too few is about the root of
        1 / (the keys that a query sees)."""
        chance = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=chance, device=device, dtype=dtype)

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        first, second = _CHUNKS
        lens = (_CONTEXT + min(window or 0, _WIDEST), second)
        num_blocks = -(-max(lens) // shape.block_size)
        pool = (len(lens) * num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        keys, values = normal(*pool), normal(*pool)
        blocks = torch.randperm(pool[0], generator=chance, device=device)
        num_tokens = first + second
        step = DeviceStep(
            token_ids=ints(*range(num_tokens)),
            positions=ints(*range(lens[0] - first, lens[0]), *range(second)),
            kv_slots=ints(*range(num_tokens)),
            slots=ints(1, 0),
            context_lens=ints(*lens),
            num_decodes=0,
            chunk_starts=ints(0, first, num_tokens),
            block_tables=blocks.to(torch.int32).view(len(lens), num_blocks),
        )
        query = normal(num_tokens, shape.num_heads, shape.head_dim)
        out, expected = torch.full_like(query, torch.nan), torch.empty_like(query).float()
        self.plan(step)
        self(query, LayerContext(keys, values, window), step, out)
        reference = TorchAttention()
        reference.plan(step)
        reference(query.float(), LayerContext(keys.float(), values.float(), window), step, expected)
        of_each = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        return float(of_each.square().mean().sqrt())
