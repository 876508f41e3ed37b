"""Steps of decodes some of which have drafts, as CUDA graphs: from the gather of their tokens to
the ids that are accepted.

Rows have as many tokens as they need, one after the other, and a graph is padded with rows of one
token. Where the previous step has drafts too and is still running, only the device knows where a
row starts: `DeviceTables.lengths`, which the step's last kernel writes.
"""

from collections.abc import Callable
from itertools import accumulate, chain, repeat

import torch
from torch import Tensor

from penstock.engine.executors.cuda.adapter_tiles import TileMemory
from penstock.engine.executors.cuda.decode_steps import DecodeKey, DecodeSteps
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.graphs import StepGraphs
from penstock.engine.executors.cuda.step_sampler import GRAPH_MODES, StepSampler
from penstock.engine.kernels.sample.sampler import Mode
from penstock.engine.kernels.tables import (
    DraftedRows,
    DraftedTokens,
    accept_drafts,
    gather_drafted,
)
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.step.device_step import DecodeQueries, DeviceStep, DraftSizes
from penstock.engine.step.model_input import AdapterRun
from penstock.scheduler.types import ScheduledBatch


class DraftSteps:
    """Owns the memory that its graphs read their rows from. slots, next_positions: of the tokens of
    the last step, whose ids are sampled. accepted: as of `accept_drafts`; host_accepted: the same
    in the host's memory, as `HostIds.launched`, or None where it must be copied."""

    host_accepted: Tensor | None = None

    def __init__(
        self,
        model: FusedModel,
        tables: DeviceTables,
        sampler: StepSampler,
        drafted: DraftSizes,
        beside: DecodeSteps,
        *,
        use_graphs: bool,
    ) -> None:
        """beside: the steps without drafts, whose `HostIds` and memory of graphs it shares."""
        self._model, self._tables, self._sampler = model, tables, sampler
        self.sizes, self._queries, most = drafted.tokens, drafted.queries, drafted.most_tokens
        self._host = beside.host
        integers = tables.lengths.new_zeros(11, most)
        self._inputs, self.accepted = integers[:4], integers[4:6]
        self._token_ids, self._positions, self.slots, self.next_positions, self._lens = integers[6:]
        slots, firsts, counts, _ = self._inputs  # until the first step, rows of padding
        slots.fill_(tables.padding_slot)
        firsts.copy_(torch.arange(most))
        counts.fill_(1)
        num_groups = len(tables.block_tables)
        self._kv_slots = integers.new_zeros(num_groups, most, dtype=torch.int64)
        self._tiles = TileMemory(tables, self.sizes, model.num_adapter_slots)
        self._size = most
        device = tables.lengths.device
        self._graphs = StepGraphs(self._run, device, enabled=use_graphs, beside=beside.graphs)

    def capture(self, on_captured: Callable[[], None]) -> None:
        has_adapters = self._model.num_adapter_slots > 0
        self._graphs.capture(
            DecodeKey.each(self.sizes, GRAPH_MODES, has_adapters=has_adapters), on_captured
        )
        if self._host is not None:
            self._host.restart()

    def __call__(
        self, batch: ScheduledBatch, adapters: tuple[AdapterRun, ...], mode: Mode
    ) -> tuple[Tensor, Tensor]:
        """Logits after all tokens of the step, (T, vocab_size), and the ids that are sampled of
        them."""
        num_tokens = sum(batch.num_tokens)
        size = self._size = next(size for size in self.sizes if size >= num_tokens)
        self._inputs[:, :size].copy_(self._tables.upload(self._padded(batch, size)))
        if adapters:
            self._tiles.write(adapters, size)
        logits, ids = self._graphs(DecodeKey(size, mode, bool(adapters)))
        host = None if self._host is None else self._host.launched()
        self.host_accepted = None
        if host is not None:
            self.host_accepted = host[: self.accepted.numel()].view_as(self.accepted)
        return logits[:num_tokens], ids[:num_tokens]

    def accept(self, ids: Tensor, num_rows: int) -> None:
        """Takes the last step's ids, sampled after its graph, in place of those of the graph."""
        rows = DraftedRows(*(each[:num_rows] for each in self._rows(self._size)))
        tables = self._tables
        accept_drafts(
            ids,
            rows,
            self._queries,
            self._positions,
            tables.lengths,
            tables.token_table,
            self.accepted,
        )
        self.host_accepted = None

    def _padded(self, batch: ScheduledBatch, size: int) -> tuple[list[int], ...]:
        """As `DraftedRows`. A padding row has the padding slot and one token; there are as many
        rows as tokens, so that rows of no token come last."""
        num_rows, firsts = len(batch.slots), [0, *accumulate(batch.num_tokens)]
        num_padding = size - firsts[-1]
        absent = [0] * (size - num_rows - num_padding)
        drafts = chain.from_iterable((0, *of_row) for of_row in batch.drafts)
        return (
            [*batch.slots, *repeat(self._tables.padding_slot, size - num_rows)],
            [*firsts[:-1], *range(firsts[-1], size), *absent],
            [*batch.num_tokens, *repeat(1, num_padding), *absent],
            [*drafts, *repeat(0, num_padding)],
        )

    def _rows(self, size: int) -> DraftedRows:
        """In memory that does not move."""
        return DraftedRows(*self._inputs[:, :size])

    def _run(self, key: DecodeKey) -> tuple[Tensor, Tensor]:
        """A whole step of `size` tokens, in memory that does not move: what the graph captures."""
        size, mode, has_adapters = key
        tables, rows, host = self._tables, self._rows(size), self._host
        tokens = DraftedTokens(
            self._token_ids[:size],
            self._positions[:size],
            self.slots[:size],
            self.next_positions[:size],
        )
        kv_slots = self._kv_slots[:, :size].unbind()
        step = DeviceStep(
            token_ids=tokens.token_ids,
            positions=tokens.positions,
            kv_slots=kv_slots[0],
            slots=rows.slots,
            context_lens=self._lens[:size],
            num_decodes=size,
            chunk_starts=None,
            block_tables=tables.block_tables[0],
            more_groups=tuple(zip(kv_slots[1:], tables.block_tables[1:], strict=True)),
            adapters=self._tiles.read(size) if has_adapters else None,
            queries=DecodeQueries(rows.firsts, rows.counts, self._queries),
        )
        gather_drafted(
            rows,
            self._queries,
            tables.lengths,
            tables.token_table,
            tables.all_block_tables,
            tables.block_size,
            tokens,
            self._kv_slots,
            step.context_lens,
            *((host.turn, len(host.rows)) if host else ()),
        )
        logits = self._model.logits(self._model(step))
        ids = self._sampler.sample(logits, tokens.slots, tokens.next_positions, mode)
        accept_drafts(
            ids,
            rows,
            self._queries,
            tokens.positions,
            tables.lengths,
            tables.token_table,
            self.accepted,
            *((host.rows, host.turn) if host else ()),
        )
        return logits, ids
