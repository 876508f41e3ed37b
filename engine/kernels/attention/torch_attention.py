"""The CPU's attention on a GPU: slow and simple, to distinguish errors of kernels and models."""

import torch
from torch import Tensor

from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.memory.pool.kv_codes import KVPages
from penstock.engine.step.device_step import DeviceStep
from penstock.engine.step.model_input import ModelInput


class TorchAttention:
    """`DeviceAttention` by `gathered_attention`.

    It needs every length on the host, so each step waits for the device once, and no CUDA graph can
    capture it.
    """

    is_capturable = False
    takes_decode_lens = False

    def __init__(self) -> None:
        self._inputs: dict[int, ModelInput] = {}  # by group of layers

    def plan(self, step: DeviceStep) -> None:
        num, chunk_starts = step.num_decodes, step.chunk_starts
        query_starts = torch.arange(num + 1, dtype=torch.int32, device=step.slots.device)
        if chunk_starts is not None:
            query_starts = torch.cat((query_starts, chunk_starts[1:] + num))
        self._inputs[step.group] = ModelInput(
            token_ids=step.token_ids,
            positions=step.positions,
            kv_slots=step.kv_slots,
            block_tables=step.block_tables.index_select(0, step.slots),
            query_starts=query_starts.tolist(),
            context_lens=step.context_lens.tolist(),
            num_decodes=num,
            sample_rows=query_starts[1:] - 1,
        )

    def __call__(
        self,
        query: Tensor,
        keys: KVPages,
        values: KVPages,
        step: DeviceStep,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        out.copy_(gathered_attention(query, keys, values, self._inputs[step.group], window, sinks))
