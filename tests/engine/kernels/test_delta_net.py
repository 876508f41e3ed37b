"""The kernels of gated delta nets agree with torch's token by token, in float64, however a step's
tokens are divided, and leave the states of others alone."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.state_tiles import DeviceStates, StateTileMemory, tiles_of
from penstock.engine.memory.pool.state_pool import StatePool
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.delta_net.kernels.chunks import recur_chunks
from penstock.engine.models.parts.delta_net.kernels.convolution import convolve
from penstock.engine.models.parts.delta_net.kernels.decode import recur_decodes
from penstock.engine.models.parts.delta_net.kernels.shape import Gates
from penstock.engine.models.parts.delta_net.layer import (
    Segment,
    torch_recurrence,
)
from penstock.engine.step.device_step import DeviceStep
from penstock.scheduler.types import BlockCopy, ScheduledBatch, StateSnapshot
from tests.support.delta_nets import delta_net_layer, exact
from tests.support.kernels import DEVICE, DTYPES, error, poisoned, random
from tests.support.tiny_models import make_batch

NUM_SLOTS, NUM_STATES = 4, 9
# Sums of some hundred numbers; in float16 queries, keys and values are rounded too.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Widths that are a power of 2, and that are not; several value heads for a key head, and one.
CONFIGS = [
    DeltaNet(
        hidden_size=64, num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=64, num_taps=4
    ),
    DeltaNet(
        hidden_size=64, num_key_heads=2, num_value_heads=2, key_dim=24, value_dim=13, num_taps=3
    ),
]


class Row(NamedTuple):
    """snapshots: (number of tokens, state)."""

    slot: int
    start: int
    num_tokens: int
    snapshots: tuple[tuple[int, int], ...] = ()


class Layer:
    """One layer, its states on the device, and the same as torch has them in float64."""

    def __init__(self, config: DeltaNet, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        heads = config.num_value_heads
        self.net = delta_net_layer(
            config,
            taps=random(config.num_taps, config.num_channels),
            decay=-random(heads).abs() * 2,
            bias=random(heads, seed=1),
            norm=random(config.value_dim),
        )
        self.pool = StatePool(config.state_shape(1), NUM_STATES + 1, DEVICE)
        # What is there before has no effect.
        for tensor in (self.pool.matrices, self.pool.inputs):
            tensor.fill_(float("nan"))
        self.tables = DeviceTables(NUM_SLOTS, 64, 4, [7, NUM_STATES], DEVICE)
        self.tables.block_tables[1][:NUM_SLOTS, 0] = torch.arange(NUM_SLOTS) + 2
        self.states = DeviceStates(self.pool, self.tables, 1)
        self.expected = [
            torch.full(tensor.shape[1:], torch.nan, dtype=torch.float64)
            for tensor in (self.pool.matrices, self.pool.inputs)
        ]

    def run(
        self, rows: list[Row], num_decodes: int = 0, padded: tuple[int, int] | None = None
    ) -> None:
        """Checks outputs and states. padded: to so many rows and tokens, as in a graph."""
        counts = [row.num_tokens for row in rows]
        total = sum(counts)
        size = padded[1] if padded else total
        config = self.config
        projected = random(size, config.num_channels + config.num_values, seed=rows[0].start)
        projected = projected.to(self.dtype)
        gates = random(size, 2 * config.num_value_heads, seed=1).to(self.dtype)
        batch = make_batch(
            tuple(row.slot for row in rows),
            tuple(row.start for row in rows),
            tuple(counts),
            num_decodes=num_decodes,
            snapshots=tuple(
                StateSnapshot(index, *each)
                for index, row in enumerate(rows)
                for each in row.snapshots
            ),
        )
        found = self._found(batch, projected, gates, padded)
        expected = self._expected(rows, projected[:total].double().cpu(), gates.double().cpu())
        assert error(found[:total].cpu(), expected) < TOLERANCE[self.dtype]
        tensors = self.pool.matrices[0], self.pool.inputs[0]
        for tensor, reference in zip(tensors, self.expected, strict=True):
            kept = tensor[:NUM_STATES].cpu()
            assert torch.equal(kept.isnan(), reference[:NUM_STATES].isnan())
            assert (
                error(kept.nan_to_num(), reference[:NUM_STATES].nan_to_num())
                < (TOLERANCE[self.dtype])
            )
            # So that errors of one step are not those of the next.
            tensor[:NUM_STATES] = reference[:NUM_STATES].to(DEVICE, torch.float32)

    def _found(
        self,
        batch: ScheduledBatch,
        projected: Tensor,
        gates: Tensor,
        padded: tuple[int, int] | None,
    ) -> Tensor:
        starts = [0]
        for count in batch.num_tokens:
            starts.append(starts[-1] + count)
        num_decodes, slots, decode_lens = batch.num_decodes, list(batch.slots), None
        positions = [
            start + index
            for start, count in zip(batch.starts, batch.num_tokens, strict=True)
            for index in range(count)
        ]
        tiles = tiles_of(batch, starts, self.tables) if num_decodes < len(slots) else None
        if padded:
            num_rows, size = padded
            decode_lens = self._ints([1] * num_decodes + [0] * (min(num_rows, size) - num_decodes))
            slots += [NUM_SLOTS] * (num_rows - len(slots))
            positions += [0] * (size - len(positions))
            num_decodes = len(decode_lens)
            memory = StateTileMemory(self.tables, [size, 2 * size], num_rows)
            memory.write(batch, starts)
            tiles = memory.read(size)
        ints = self._ints(slots)
        step = DeviceStep(
            token_ids=self._ints(positions),
            positions=self._ints(positions),
            kv_slots=ints.long(),
            slots=ints,
            context_lens=torch.ones_like(ints),
            num_decodes=num_decodes,
            chunk_starts=None if tiles is None else ints,
            block_tables=self.tables.block_tables[1],
            decode_lens=decode_lens,
            state_tiles=tiles,
        )
        net, shape = self.net, self.config.state_shape(1)
        matrices, inputs = self.pool.layer(0)
        out = poisoned(len(projected), self.config.num_values, dtype=self.dtype)
        mixed = convolve(shape, projected, net.taps, step, inputs)
        of_gates = Gates(gates, net.decay, net.bias)
        for recur in (recur_decodes, recur_chunks):
            recur(shape, projected, mixed, of_gates, net.norm, net.eps, step, matrices, out)
        self.states.snapshot_decodes(batch)
        return out

    def _expected(self, rows: list[Row], projected: Tensor, gates: Tensor) -> Tensor:
        first, segments = 0, []
        for row in rows:
            state = row.slot + 2
            source, start, end = state if row.start else -1, first, first + row.num_tokens
            of_row = []
            for num, snapshot in row.snapshots:
                of_row.append(Segment(start, first + num, source, snapshot))
                start, source = first + num, snapshot
            segments.append([*of_row, Segment(start, end, source, state)])
            first = end
        matrices, inputs = self.expected
        return torch_recurrence(exact(self.net), projected, gates, matrices, inputs, segments)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
@torch.inference_mode()
def test_chunks_and_decodes_of_any_length_are_torchs(config: DeltaNet, dtype: torch.dtype) -> None:
    layer = Layer(config, dtype)
    layer.run([Row(0, 0, 37), Row(2, 0, 2)])
    layer.run([Row(2, 2, 1), Row(0, 37, 1), Row(1, 0, 1)], num_decodes=2)


@torch.inference_mode()
def test_snapshots_are_the_states_on_the_way() -> None:
    layer = Layer(CONFIGS[1], torch.float32)
    layer.run([Row(0, 0, 20, ((1, 6), (17, 7))), Row(1, 0, 3, ((3, 0),))])
    layer.run([Row(0, 20, 1, ((1, 6),)), Row(1, 3, 1), Row(1, 4, 34, ((33, 8),))], num_decodes=2)


@torch.inference_mode()
def test_rows_and_tokens_that_pad_a_graph_change_nothing() -> None:
    layer = Layer(CONFIGS[0], torch.float32)
    layer.run([Row(0, 0, 12, ((8, 7),)), Row(1, 0, 1)], padded=(NUM_SLOTS, 16))
    layer.run([Row(1, 1, 1), Row(0, 12, 2)], num_decodes=1, padded=(NUM_SLOTS, 6))


@torch.inference_mode()
def test_equal_keys_that_nothing_decays_stay_exact() -> None:
    """All of A below its diagonal is 1: where its powers grow to 1e8, its inverse has only 1 and
    -1."""
    layer = Layer(CONFIGS[0], torch.float32)
    config = layer.config
    layer.net.bias.fill_(-40)  # no decay
    layer.net.taps.zero_()[-1] = 1
    projected = random(32, config.num_channels + config.num_values)
    projected[:, : config.num_keys * 2] = projected[0, : config.num_keys * 2]
    gates = torch.full((32, 2 * config.num_value_heads), 40.0, device=DEVICE)  # beta is 1
    out = layer._found(make_batch((0,), (0,), (32,)), projected, gates, None)
    segments = [[Segment(0, 32, -1, 2)]]
    matrices, inputs = layer.expected
    wide = (projected.double().cpu(), gates.double().cpu())
    expected = torch_recurrence(exact(layer.net), *wide, matrices, inputs, segments)
    assert error(out.cpu(), expected) < 1e-5


@torch.inference_mode()
def test_states_are_copied_in_an_order_in_which_none_is_overwritten_before_it_is_read() -> None:
    layer = Layer(CONFIGS[1], torch.float32)
    for tensor in (layer.pool.matrices, layer.pool.inputs):
        for state in range(NUM_STATES):
            tensor[:, state] = state
    copies = (BlockCopy(5, 6, group=1), BlockCopy(3, 5, group=1), BlockCopy(8, 8, group=1))
    layer.states.copy(make_batch((0,), (4,), (1,), copies=(*copies, BlockCopy(1, 2))))
    for tensor in (layer.pool.matrices, layer.pool.inputs):
        found = tensor.flatten(2)[0, :NUM_STATES]
        assert found.amin(1).tolist() == found.amax(1).tolist() == [0, 1, 2, 3, 4, 3, 5, 7, 8]
