"""Which tile of `skinny_linear` is fastest, and up to how many rows it beats torch's product.

All four matrices of a layer are timed; the sum of their times is what a layer takes. The rows
`linear tile` are the measurements, `linear choice` the sums: they decide `tile_of` and
`MAX_ROWS` of `penstock.engine.kernels.linear`. present_us is what `tile_of` chooses by matrix.
"""

import sys
import traceback
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from penstock.engine.kernels.linear import MAX_ROWS, Tile, skinny_linear, tile_of
from tests.bench.engine.case import Bench
from tests.bench.engine.linear_cases import layer_shapes
from tests.bench.engine.models import model_config
from tests.bench.engine.timing import (
    Call,
    num_input_sets,
    relative_error,
    report,
    seconds_per_call,
    tolerance,
)

_MODELS = ("Llama-3.1-8B", "Qwen3-0.6B")
_ROWS = (1, 8, 16)
# Of what a block may have on Hopper, what Triton's own buffers leave.
_MAX_SHARED_BYTES = 220 * 1024
# Of a point's time, less than elsewhere: there are some 50 tiles in each of 24 shapes.
_BUDGET_S = 0.02


def tiles(tiny: bool = False) -> list[Tile]:
    """The likeliest first: if time runs out, the last ones are missing."""
    if tiny:
        return [Tile(16, 256, 4, 2), Tile(8, 256, 6, 2)]
    fields = [
        *product((16, 32), (128, 256, 512), (3, 4, 6), (2, 4)),
        # A multiprocessor has one of these at a time: it needs more on its way.
        *product((8,), (128, 256, 512), (4, 6, 8), (2, 4)),
    ]
    found = [tile for tile in map(Tile._make, fields) if _shared_bytes(tile) <= _MAX_SHARED_BYTES]
    return sorted(found, key=lambda tile: tile.chunk * tile.outputs, reverse=True)


def _shared_bytes(tile: Tile) -> int:
    """Of the weight and of x, in bfloat16."""
    return 2 * tile.stages * tile.chunk * (tile.outputs + MAX_ROWS)


def layers(model: str, tiny: bool) -> dict[str, tuple[int, int]]:
    """(outputs, columns) of the matrices of one layer."""
    shapes = layer_shapes(model_config(model, tiny))
    return {name: shape for name, shape in shapes.items() if name != "lm_head"}


class _Layer:
    """One matrix with its inputs, and what they give."""

    def __init__(self, bench: Bench, rows: int, outputs: int, columns: int) -> None:
        count = num_input_sets(outputs * columns * bench.dtype.itemsize, bench.device)
        self.x = bench.random(rows, columns)
        self.weights = [bench.random(outputs, columns).mul_(columns**-0.5) for _ in range(count)]
        self.out = bench.poisoned(rows, outputs)
        self.expected = self.x.double() @ self.weights[0].double().T

    def ours(self, tile: Tile) -> list[Call]:
        return [partial(skinny_linear, self.x, w, self.out, tile=tile) for w in self.weights]

    def by_torch(self) -> list[Call]:
        return [partial(torch.mm, self.x, w.T, out=self.out) for w in self.weights]

    def error(self, call: Call) -> float:
        self.out.fill_(float("nan"))
        call()
        return relative_error(self.out, self.expected)


def measure_linear_tiles(tiny: bool) -> None:
    bench = Bench(tiny=tiny, flash_attn_3=None)
    chosen = tiles(tiny)
    for model in _MODELS[: 1 if tiny else None]:
        for rows in _ROWS[:1] if tiny else _ROWS:
            _measure_rows(bench, model, rows, chosen)


def _measure_rows(bench: Bench, model: str, rows: int, chosen: list[Tile]) -> None:
    sums: dict[Tile, list[float]] = {tile: [] for tile in chosen}
    torch_s = present_s = 0.0
    shapes = layers(model, bench.tiny)
    for name, (outputs, columns) in shapes.items():
        layer = _Layer(bench, rows, outputs, columns)
        torch_s += seconds_per_call(layer.by_torch(), _BUDGET_S)
        at: dict[str, object] = {"model": model, "layer": name, "rows": rows}
        present = tile_of(outputs, columns, rows, bench.dtype.itemsize)
        for tile, seconds in _times(bench, layer, list(dict.fromkeys((present, *chosen))), at):
            if tile in sums:
                sums[tile].append(seconds)
            present_s += seconds if tile == present else 0.0
        del layer
    complete = {tile: sum(times) for tile, times in sums.items() if len(times) == len(shapes)}
    if not complete:
        return
    best = min(complete, key=lambda tile: complete[tile])
    report(
        part="linear choice",
        model=model,
        rows=rows,
        tile=best._asdict(),
        us=complete[best] * 1e6,
        present_us=present_s * 1e6 or None,
        torch_us=torch_s * 1e6,
        is_faster_than_torch=complete[best] < torch_s,
        measured=len(complete),
    )


def _times(
    bench: Bench, layer: _Layer, chosen: list[Tile], at: dict[str, object]
) -> Iterator[tuple[Tile, float]]:
    """Of those that are right. One that cannot be compiled or launched ends no other."""
    for tile in chosen:
        calls = layer.ours(tile)
        try:
            error = layer.error(calls[0])
            seconds = seconds_per_call(calls, _BUDGET_S)
        except Exception as problem:
            traceback.print_exc(file=sys.stderr)
            message = f"{type(problem).__name__}: {problem}"[:300]
            report(part="linear tile", **at, tile=tile._asdict(), unusable=message)
            if bench.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost: stop
            continue
        is_right = error < tolerance(bench.dtype)
        us = seconds * 1e6
        report(part="linear tile", **at, tile=tile._asdict(), us=us, error=error, is_right=is_right)
        if is_right:
            yield tile, seconds


def meta_launches(model: str) -> Iterator[Call]:
    """Calls that launch each tile's kernels on tensors without data: to compile them ahead."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    shapes = layers(model, False).values()
    for tile, rows, (outputs, columns) in product(tiles(), (8, 16), shapes):
        x, weight, out = empty(rows, columns), empty(outputs, columns), empty(rows, outputs)
        yield partial(skinny_linear, x, weight, out, tile=tile)
