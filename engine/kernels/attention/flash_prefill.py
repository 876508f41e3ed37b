"""FlashAttention 3 for prefill chunks, by the operator of an installed library: it writes to a
given tensor, unlike the functions in Python, and is the same in both libraries.

Interface: hopper/flash_api.cpp of Dao-AILab/flash-attention, hopper/flash_api_torch_lib.cpp of
vllm-project/flash-attention.
"""

from importlib.util import find_spec
from pathlib import Path

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
# What vLLM's has no defaults of, and None is not allowed for.
_NEUTRAL = {"softcap": 0.0, "is_rotary_interleaved": False, "sm_margin": 0}
_NEUTRAL |= {"cp_world_size": 1, "cp_rank": 0}
# Of `error`: tokens of two chunks, and of the first one's context beside a window, up to a limit.
_CHUNKS, _CONTEXT, _WINDOW = (150, 70), 500, 8192


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
        """See `library`. Raises what loading it raises."""
        torch.ops.load_library(file)
        self._fwd = getattr(torch.ops, namespace).fwd.default
        needed = (each for each in self._fwd._schema.arguments if not each.has_default_value())
        self._others = {each.name: _NEUTRAL.get(each.name) for each in needed}
        self._tables: dict[int, Tensor] = {}  # of the chunks, by group of layers

    @staticmethod
    def takes(step: DeviceStep) -> bool:
        """Not in a graph, some of whose rows have no tokens: that was not tried on a GPU. Nor where
        tokens attend to later ones."""
        return step.chunk_starts is not None and step.decode_lens is None and step.reaches is None

    def plan(self, step: DeviceStep) -> None:
        slots = step.slots[step.num_decodes :]
        self._tables[step.group] = step.block_tables.index_select(0, slots)

    def __call__(self, query: Tensor, layer: LayerContext, step: DeviceStep, out: Tensor) -> None:
        """query, out: of the chunks alone."""
        keys, values, window, *_ = layer
        tables, lens = self._tables[step.group], step.context_lens[step.num_decodes :]
        # How many keys before and after its own a query sees; -1 is all that causality allows.
        left, right = (-1, -1) if window is None else (window - 1, 0)
        given = {
            "q": query, "k": keys, "v": values, "out": out, "cu_seqlens_q": step.chunk_starts,
            "seqused_k": lens, "page_table": tables, "max_seqlen_q": len(query),
            "max_seqlen_k": tables.shape[1] * keys.shape[1], "is_causal": True,
            "window_size_left": left, "window_size_right": right,
            "softmax_scale": query.shape[-1] ** -0.5,
            "num_splits": 1,  # so that a chunk's result depends on nothing beside it
        }  # fmt: skip
        self._fwd(**(self._others | given))

    def error(
        self, shape: AttentionShape, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> float:
        """How far off torch's result in float32 two chunks are, each head relative to its norm. One
        key too many or too few is about the root of 1 / (the keys that a query sees)."""
        torch_attention, chance = TorchAttention(), torch.Generator(device).manual_seed(0)
        first, second = _CHUNKS
        length, num_tokens = _CONTEXT + min(window or 0, _WINDOW), first + second
        num_blocks, heads = -(-length // shape.block_size), shape.num_kv_heads
        sizes = (2 * num_blocks, shape.block_size, heads), (num_tokens, shape.num_heads)
        pool, query = ((*size, shape.head_dim) for size in sizes)
        keys, values, queries = (
            torch.randn(size, generator=chance, device=device, dtype=dtype)
            for size in (pool, pool, query)
        )
        blocks = torch.randperm(pool[0], generator=chance, device=device).int()
        numbers = torch.arange(length, device=device).int()
        step = DeviceStep(
            token_ids=numbers[:num_tokens], kv_slots=numbers[:num_tokens], slots=numbers[:2],
            positions=torch.cat((numbers[-first:], numbers[:second])), num_decodes=0,
            context_lens=numbers.new_tensor((length, second)), block_tables=blocks.view(2, -1),
            chunk_starts=numbers.new_tensor((0, first, num_tokens)),
        )  # fmt: skip
        out, expected = torch.full_like(queries, torch.nan), torch.empty_like(queries).float()
        self.plan(step)
        torch_attention.plan(step)
        self(queries, LayerContext(keys, values, window), step, out)
        context = LayerContext(keys.float(), values.float(), window)
        torch_attention(queries.float(), context, step, expected)
        of_each = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        return float(of_each.square().mean().sqrt())
