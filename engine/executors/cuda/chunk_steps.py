"""Steps with prefill chunks: small ones as CUDA graphs, padded to a few sizes, with any rows.

Launching such a step kernel by kernel takes the host some 130 us a layer; up to the sizes here the
device needs less. So one graph for each number of tokens runs any mix of decodes and chunks, whose
rows are described by tensors that are written before it runs. The length of larger ones hides it.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.executors.cuda.adapter_tiles import TileMemory, tiles_of
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.graphs import StepGraphs
from penstock.engine.executors.cuda.state_tiles import StateTileMemory
from penstock.engine.executors.cuda.state_tiles import tiles_of as state_tiles_of
from penstock.engine.kernels.tables import gather_chunks
from penstock.engine.memory.hardware import peak_bandwidth, peak_flops
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.step.device_step import DeviceStep
from penstock.engine.step.model_input import AdapterRun
from penstock.scheduler.types import ScheduledBatch

# Below about 200 tokens a matrix product is bound by reading its weight, so that padding costs
# nothing; above 500 the steps of most models take long enough to hide the launches.
CHUNK_SIZES = (64, 128, 192, 256, 384, 512)
# Of other models. Padding to these is a twelfth of a step on average, and of a large product often
# nothing, as its tiles have 128 rows.
_LARGER_SIZES = (640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# Of the host, for a layer: loadtest/LOG.md.
_LAUNCHES_S = 130e-6


def chunk_sizes(
    whole: ModelConfig, num_ranks: int, device_name: str, dtype: torch.dtype, max_tokens: int
) -> tuple[int, ...]:
    """The numbers of tokens for which there are graphs: those in which the launches of a step would
    take longer than the device at the datasheet's peak.

    whole: the model of all ranks, so that each stage of it has the same. num_ranks: that divide
    each layer. max_tokens: of a step.
    """
    flops, bandwidth = peak_flops(device_name, dtype), peak_bandwidth(device_name)
    if flops is None or bandwidth is None:
        return CHUNK_SIZES
    launches_s = whole.num_layers * _LAUNCHES_S * num_ranks
    # So many tokens read nearly all experts, and the other weights while they compute.
    left_s = launches_s - whole.expert_bytes(dtype.itemsize) / bandwidth
    most = min(max_tokens, left_s * flops / (2 * whole.num_token_weights))
    return CHUNK_SIZES + tuple(size for size in _LARGER_SIZES if size <= most)


class ChunkKey(NamedTuple):
    """size: of tokens. has_adapters: some may have one."""

    size: int
    has_adapters: bool


class ChunkSteps:
    """Owns the memory that its graphs read their rows from."""

    def __init__(self, model: FusedModel, tables: DeviceTables, sizes: Sequence[int]) -> None:
        """sizes: numbers of tokens, ascending; empty for no graphs."""
        self._model = model
        self._tables = tables
        self.sizes = tuple(sizes)
        self._max_rows = max_rows = tables.padding_slot
        device, largest = tables.lengths.device, max(sizes, default=0)
        self._inputs = torch.zeros(4 * max_rows + 2, dtype=torch.int32, device=device)
        self._split()[0].fill_(tables.padding_slot)
        self._token_ids, self._positions = self._inputs.new_zeros(2, largest).unbind()
        num_groups = len(tables.block_tables)
        self._kv_slots = torch.zeros(num_groups, largest, dtype=torch.int64, device=device)
        self._context_lens, self._decode_lens = self._inputs.new_zeros(2, max_rows).unbind()
        self._tiles = TileMemory(tables, sizes, model.num_adapter_slots)
        self._state_tiles = None
        if model.has_states:
            self._state_tiles = StateTileMemory(tables, sizes, max_rows)
        self._graphs = StepGraphs(self._run, device)

    def size_for(self, num_tokens: int) -> int | None:
        """To which so many tokens are padded; None where they are too many."""
        return next((size for size in self.sizes if size >= num_tokens), None)

    def capture(self, on_captured: Callable[[], None]) -> None:
        kinds = (True, False) if self._model.num_adapter_slots else (False,)
        keys = (ChunkKey(size, kind) for size in reversed(self.sizes) for kind in kinds)
        self._graphs.capture(keys, on_captured)

    def __call__(
        self, batch: ScheduledBatch, query_starts: list[int], adapters: tuple[AdapterRun, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states of all tokens, the slots and the lengths of all rows; each with padding after,
        where it is a graph.

        query_starts: each row's offset into the tokens, and their number. All three are valid until
        the next call.
        """
        size = self.size_for(query_starts[-1])
        if size is None:
            return self._launch(batch, query_starts, adapters)
        self._inputs.copy_(self._tables.upload(self._padded(batch, query_starts)))
        if adapters:
            self._tiles.write(adapters, size)
        if self._state_tiles is not None:
            self._state_tiles.write(batch, query_starts)
        states = self._graphs(ChunkKey(size, bool(adapters)))
        return states, self._split()[0], self._context_lens

    def _padded(self, batch: ScheduledBatch, query_starts: list[int]) -> list[int]:
        """The input that `_split` splits. Padding rows have the padding slot and no token."""
        num_rows, num_decodes, num_tokens = len(batch.slots), batch.num_decodes, query_starts[-1]
        absent = self._max_rows - num_rows
        return list(
            chain(
                (*batch.slots, *(self._tables.padding_slot,) * absent),
                (*_starts(batch), *(0,) * absent),
                (*query_starts, *(num_tokens,) * absent),
                # To the prefill kernel, decodes are rows without a token.
                (max(start, num_decodes) for start in query_starts),
                (num_tokens,) * absent,
            )
        )

    def _split(self) -> tuple[Tensor, ...]:
        """Slots, starts, offsets of all rows, and those of the chunks."""
        rows = self._max_rows
        return torch.split(self._inputs, [rows, rows, rows + 1, rows + 1])

    def _run(self, key: ChunkKey) -> Tensor:
        size = key.size
        tables, kv_slots = self._tables, self._kv_slots[:, :size]
        slots, starts, offsets, chunk_starts = self._split()
        for places, padding in zip(kv_slots, tables.padding_kv_slots, strict=True):
            places.fill_(padding)
        num_decodes = min(size, self._max_rows)
        step = DeviceStep(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            kv_slots=kv_slots[0],
            slots=slots,
            context_lens=self._context_lens,
            num_decodes=num_decodes,
            chunk_starts=chunk_starts,
            block_tables=tables.block_tables[0],
            decode_lens=self._decode_lens[:num_decodes],
            more_groups=tuple(zip(kv_slots[1:], tables.block_tables[1:], strict=True)),
            adapters=self._tiles.read(size) if key.has_adapters else None,
            state_tiles=self._state_tiles.read(size) if self._state_tiles else None,
        )
        # All of the memory, whose rows have one length in every graph.
        return self._states(step, self._kv_slots, starts, offsets, size, self._decode_lens)

    def _launch(
        self, batch: ScheduledBatch, query_starts: list[int], adapters: tuple[AdapterRun, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A step that is launched kernel by kernel, as `__call__`."""
        tables, num_rows = self._tables, len(batch.slots)
        values = tables.upload((*batch.slots, *_starts(batch), *query_starts))
        slots, starts, offsets = torch.split(values, [num_rows, num_rows, num_rows + 1])
        num_tokens = query_starts[-1]
        token_ids, positions = values.new_empty(2, num_tokens).unbind()
        shape = len(tables.block_tables), num_tokens
        kv_slots = values.new_empty(shape, dtype=torch.int64)
        has_states = self._state_tiles is not None
        step = DeviceStep(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots[0],
            slots=slots,
            context_lens=torch.empty_like(slots),
            num_decodes=batch.num_decodes,
            chunk_starts=offsets[batch.num_decodes :] - batch.num_decodes,
            block_tables=tables.block_tables[0],
            more_groups=tuple(zip(kv_slots[1:], tables.block_tables[1:], strict=True)),
            adapters=tiles_of(adapters, num_tokens, self._model.num_adapter_slots, tables),
            state_tiles=state_tiles_of(batch, query_starts, tables) if has_states else None,
        )
        states = self._states(step, kv_slots, starts, offsets, max(batch.num_tokens))
        return states, slots, step.context_lens

    def _states(
        self,
        step: DeviceStep,
        kv_slots: Tensor,
        starts: Tensor,
        offsets: Tensor,
        longest: int,
        decode_lens: Tensor | None = None,
    ) -> Tensor:
        """Computes those of all tokens. kv_slots: of all groups. starts, offsets: of each row, in
        its sequence and among the tokens. longest: tokens that a row may have. decode_lens: of all
        rows, where the step reads them."""
        tables = self._tables
        gather_chunks(
            step.slots,
            starts,
            offsets,
            tables.lengths,
            tables.token_table,
            tables.all_block_tables,
            tables.block_size,
            longest,
            step.token_ids,
            step.positions,
            kv_slots,
            step.context_lens,
            decode_lens,
        )
        return self._model(step)


def _starts(batch: ScheduledBatch) -> tuple[int, ...]:
    """Where each row starts; of a decode, whose length the device knows, see `gather_chunks`."""
    return (*(-1,) * batch.num_decodes, *batch.starts[batch.num_decodes :])
