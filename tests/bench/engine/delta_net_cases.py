"""The recurrence of gated delta nets: of decodes, which read and write a state each, and of a
chunk."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.delta_net.kernels.chunks import TILE_TOKENS, recur_chunks
from penstock.engine.models.parts.delta_net.kernels.convolution import convolve
from penstock.engine.models.parts.delta_net.kernels.decode import recur_decodes
from penstock.engine.models.parts.delta_net.kernels.shape import Gates
from penstock.engine.models.parts.delta_net.layer import (
    DeltaNetLayer,
    Segment,
    torch_recurrence,
)
from penstock.engine.step.device_step import DeviceStep, StateTiles
from tests.bench.engine.case import Bench, Case, MakeCase, size_of
from tests.bench.engine.timing import relative_error
from tests.support.delta_nets import delta_net_layer

# A layer of Qwen3.5-9B; and a toy.
_LAYER = DeltaNet(
    hidden_size=64, num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, num_taps=4
)
_TOY = DeltaNet(
    hidden_size=64, num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, num_taps=4
)
_ROWS = (1, 16, 64, 256)
_CHUNKS = (64, 512, 4096)


def delta_net(bench: Bench) -> Iterator[MakeCase]:
    config = _TOY if bench.tiny else _LAYER
    for rows in (2,) if bench.tiny else _ROWS:
        yield partial(_case, bench, config, rows, 1)
    for tokens in (40,) if bench.tiny else _CHUNKS:
        yield partial(_case, bench, config, 1, tokens)


def _case(bench: Bench, config: DeltaNet, rows: int, tokens: int) -> Case:
    """rows: sequences of so many tokens each; of 1, they are decodes."""
    shape, is_decode, num = config.state_shape(1), tokens == 1, rows * tokens
    net = _net(bench, config)
    projected = bench.random(num, config.num_channels + config.num_values)
    gates = Gates(bench.random(num, 2 * config.num_value_heads), net.decay, net.bias)
    sets = bench.sets(rows * shape.num_bytes)
    states = [
        (
            bench.random(
                rows, shape.num_heads, shape.key_dim, shape.value_dim, dtype=torch.float32
            ),
            bench.random(rows, shape.num_inputs, shape.num_channels, dtype=torch.float32),
        )
        for _ in range(sets)
    ]
    step = _step(bench, rows, tokens)
    out = bench.poisoned(num, config.num_values)

    def run(matrices: Tensor, inputs: Tensor) -> None:
        mixed = convolve(shape, projected, net.taps, step, inputs)
        for recur in (recur_decodes, recur_chunks):
            recur(shape, projected, mixed, gates, net.norm, net.eps, step, matrices, out)

    def error() -> float:
        matrices, inputs = (each.clone() for each in states[0])
        out.fill_(float("nan"))
        run(*states[0])
        # The last sequence's tokens, since torch takes them one by one; at most so many.
        first, end = num - tokens, num - tokens + min(tokens, 256)
        segments = [[Segment(first, end, rows - 1, rows - 1)]]
        values = gates.values.float()
        expected = torch_recurrence(net, projected.float(), values, matrices, inputs, segments)
        return relative_error(out[first:end], expected[first:end])

    calls: list[Callable[[], None]] = [partial(run, *each) for each in states]
    moved = 2 * rows * shape.num_bytes + size_of(projected, gates.values, out)
    return Case(
        kernel="delta net, decodes" if is_decode else "delta net, chunk",
        at={"rows": rows, "tokens": tokens},
        calls=calls,
        error=error,
        num_bytes=moved,
        flops=2 * config.num_state_products * num,
    )


def _net(bench: Bench, config: DeltaNet) -> DeltaNetLayer:
    def random(*of: int) -> Tensor:
        return bench.random(*of, dtype=torch.float32)

    heads = config.num_value_heads
    return delta_net_layer(
        config,
        taps=random(config.num_taps, config.num_channels),
        decay=-random(heads).abs(),
        bias=random(heads),
        norm=random(config.value_dim),
    )


def _step(bench: Bench, rows: int, tokens: int) -> DeviceStep:
    """Sequence i has slot and state i, and tokens before these."""
    slots, num = bench.ints(range(rows)), rows * tokens
    tiles = None
    if tokens > 1:
        edges = [*range(0, tokens, TILE_TOKENS), tokens]
        of_one = [(a, b, 0, -1) for a, b in pairwise(edges)]
        assert rows == 1, "one chunk"
        tiles = StateTiles(
            TILE_TOKENS,
            bench.ints([1, len(of_one), 0, 0]),
            bench.ints([(0, 0, 0, len(of_one))]),
            bench.ints(of_one),
        )
    return DeviceStep(
        token_ids=bench.ints([0] * num),
        positions=bench.ints([100] * num),
        kv_slots=bench.ints([0] * num).long(),
        slots=slots,
        context_lens=bench.ints([100 + tokens] * rows),
        num_decodes=rows if tiles is None else 0,
        chunk_starts=None if tiles is None else bench.ints([0, tokens]),
        block_tables=slots[:, None].contiguous(),
        state_tiles=tiles,
    )
