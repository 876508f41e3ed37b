"""Steps of decodes alone as CUDA graphs, from the gather of their tokens to the sampled ids: padded
to a few sizes, they read and write per-slot tables alone."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from penstock.engine.executors.cuda.adapter_tiles import TileMemory
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.graphs import StepGraphs, captured_sizes
from penstock.engine.executors.cuda.host_ids import HostIds
from penstock.engine.executors.cuda.step_sampler import GRAPH_MODES, StepSampler
from penstock.engine.kernels.sample.sampler import Mode
from penstock.engine.kernels.tables import gather_decodes, store_sampled
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.step.device_step import DeviceStep
from penstock.engine.step.model_input import AdapterRun

logger = logging.getLogger(__name__)


class DecodeKey(NamedTuple):
    """A graph's. size: of rows. has_adapters: some may have one."""

    size: int
    mode: Mode
    has_adapters: bool

    @classmethod
    def each(
        cls, sizes: Sequence[int], modes: Sequence[Mode], *, has_adapters: bool
    ) -> Iterator[Self]:
        """Of all graphs, the largest first. has_adapters: whether rows may have any."""
        kinds = (True, False) if has_adapters else (False,)
        for size in reversed(sizes):
            for kind in kinds:
                for mode in modes:
                    yield cls(size, mode, kind)


class DecodeSteps:
    """Owns the memory that its graphs read their rows from: slots and context_lens are those of
    the rows of the last step. host_ids: the ids that it sampled, as `HostIds.launched`; None where
    they must be copied."""

    host_ids: Tensor | None = None

    def __init__(
        self,
        model: FusedModel,
        tables: DeviceTables,
        sampler: StepSampler | None,
        *,
        use_graphs: bool,
        has_output_layer: bool,
        num_in_flight: int,
        most_drafted: int = 0,
    ) -> None:
        """sampler: of the graphs; None where rows are sampled after them. has_output_layer: where
        states alone are computed, without it. num_in_flight: `ModelInfo.max_in_flight`.
        most_drafted: tokens of steps with drafts, see `DraftSteps`."""
        self._model, self._tables, self._sampler = model, tables, sampler
        self._has_output_layer = has_output_layer
        self.sizes = captured_sizes(tables.padding_slot)

        def buffer(dtype: torch.dtype = torch.int32) -> Tensor:
            return tables.lengths.new_zeros(tables.padding_slot, dtype=dtype)

        self.slots = buffer().fill_(tables.padding_slot)
        self._token_ids, self._positions, self.context_lens = buffer(), buffer(), buffer()
        num_groups = len(tables.block_tables)
        self._kv_slots = buffer(torch.int64).repeat(num_groups, 1)
        self._tiles = TileMemory(tables, self.sizes, model.num_adapter_slots)
        self._written_slots: tuple[int, ...] = ()
        self._written_adapters: tuple[int, tuple[AdapterRun, ...]] = 0, ()
        num_numbers = max(tables.padding_slot, 2 * most_drafted)
        self.host = None if sampler is None else self._reached(num_in_flight, num_numbers)
        self.graphs = StepGraphs(self._run, tables.lengths.device, enabled=use_graphs)

    def size_for(self, num_rows: int) -> int:
        """The number to which so many rows are padded."""
        return next(size for size in self.sizes if size >= num_rows)

    def capture(self, on_captured: Callable[[], None]) -> None:
        modes = GRAPH_MODES[-1:] if self._sampler is None else GRAPH_MODES
        has_adapters = self._model.num_adapter_slots > 0
        self.graphs.capture(
            DecodeKey.each(self.sizes, modes, has_adapters=has_adapters), on_captured
        )
        if self.host is not None:
            self.host.restart()

    def __call__(
        self, slots: tuple[int, ...], adapters: tuple[AdapterRun, ...], mode: Mode
    ) -> tuple[Tensor, Tensor]:
        """Logits of one token for each slot, or its states without the output layer; and the
        sampled ids. Both have as many rows as the graph: (rows, vocab_size or hidden_size)."""
        size = self.size_for(len(slots))
        if slots != self._written_slots:
            padding = (self._tables.padding_slot,) * (len(self.slots) - len(slots))
            self.slots.copy_(self._tables.upload((*slots, *padding)))
            self._written_slots = slots
        if adapters and (size, adapters) != self._written_adapters:
            self._tiles.write(adapters, size)
            self._written_adapters = size, adapters
        outputs = self.graphs(DecodeKey(size, mode, bool(adapters)))
        self.host_ids = None if self.host is None else self.host.launched()
        return outputs

    def _reached(self, num_in_flight: int, num_numbers: int) -> HostIds | None:
        """None where the device does not reach the host's memory."""
        tables = self._tables
        host = HostIds(num_in_flight, num_numbers, tables.lengths.device)
        padding = self._token_ids[:1], self.slots[:1], self.context_lens[:1], tables.token_table
        try:
            store_sampled(*padding, host.rows, host.turn)
        except ValueError as error:
            logger.info("sampled ids are copied after each step (%s)", error)
            return None
        return host

    def _run(self, key: DecodeKey) -> tuple[Tensor, Tensor]:
        """A whole step of `size` decodes, in memory that does not move: what the graph captures."""
        size, mode, has_adapters = key
        tables = self._tables
        slots, context_lens = self.slots[:size], self.context_lens[:size]
        kv_slots = self._kv_slots[:, :size].unbind()
        step = DeviceStep(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            kv_slots=kv_slots[0],
            slots=slots,
            context_lens=context_lens,
            num_decodes=size,
            chunk_starts=None,
            block_tables=tables.block_tables[0],
            more_groups=tuple(zip(kv_slots[1:], tables.block_tables[1:], strict=True)),
            adapters=self._tiles.read(size) if has_adapters else None,
        )
        gather_decodes(
            slots,
            tables.lengths,
            tables.token_table,
            tables.all_block_tables,
            tables.block_size,
            step.token_ids,
            step.positions,
            self._kv_slots,
            context_lens,
            *((self.host.turn, len(self.host.rows)) if self.host else ()),
        )
        states = self._model(step)
        computed = self._model.logits(states) if self._has_output_layer else states
        if self._sampler is None:
            return computed, step.token_ids  # which nobody reads
        ids = self._sampler.sample(computed, slots, context_lens, mode)
        host = (self.host.rows, self.host.turn) if self.host else ()
        store_sampled(ids, slots, context_lens, tables.token_table, *host)
        return computed, ids
