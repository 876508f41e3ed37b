"""What adapters add to a linear layer, by the kernels, is what torch adds."""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.executors.cuda.adapter_tiles import TileMemory, tiles_of
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.kernels.adapters import BAND, LowRanks, add_low_rank, most_tiles, tile_rows
from penstock.engine.step.device_step import AdapterTiles
from penstock.engine.step.model_input import AdapterRun
from tests.support.kernels import DEVICE, DTYPES, TOLERANCE, error, poisoned, random

SLOTS, COLUMNS = 3, 200
# Of outputs: the first projection has more than one band, none has whole ones.
SIZES = (BAND + 24, 40)
TABLES = DeviceTables(4, 8, 4, [0], DEVICE)


def run(first: int, count: int, slot: int) -> AdapterRun:
    return AdapterRun(first, count, slot)


def changes(
    ranks: Sequence[Sequence[int]], max_rank: int, dtype: torch.dtype, columns: int = COLUMNS
) -> LowRanks:
    """ranks: of each slot and projection; what is beyond them is not a number."""
    num = len(SIZES)
    down = poisoned(len(ranks), num * max_rank, columns, dtype=dtype)
    up = poisoned(len(ranks), max_rank, sum(SIZES), dtype=dtype)
    starts = [0, *torch.tensor(SIZES).cumsum(0).tolist()]
    for slot, of_slot in enumerate(ranks):
        for index, rank in enumerate(of_slot):
            rows = slice(index * max_rank, index * max_rank + rank)
            a = random(rank, columns, dtype=dtype, seed=slot + 7 * index) / columns**0.5
            down[slot, rows] = a
            b = random(rank, SIZES[index], dtype=dtype, seed=slot + 9 * index)
            up[slot, :rank, starts[index] : starts[index + 1]] = b
    scales = torch.tensor([[0.5 + slot for slot in range(len(ranks))], [2.0] * len(ranks)])
    bands = [
        (index, first, min(first + BAND, starts[index + 1]))
        for index in range(num)
        for first in range(starts[index], starts[index + 1], BAND)
    ]
    return LowRanks(
        down,
        up,
        torch.tensor(ranks, dtype=torch.int32).t().contiguous().to(DEVICE),
        scales.to(DEVICE),
        torch.tensor(bands, dtype=torch.int32, device=DEVICE),
        alignment=8,
    )


def expected(
    x: torch.Tensor, of: LowRanks, runs: Sequence[AdapterRun], out: torch.Tensor
) -> torch.Tensor:
    """In float32."""
    total, max_rank = out.float().clone(), of.up.shape[1]
    for first, count, slot in runs:
        start, rows = 0, slice(first, first + count)
        for index, size in enumerate(SIZES):
            rank = int(of.ranks[index, slot])
            a = of.down[slot, index * max_rank : index * max_rank + rank].float()
            b = of.up[slot, :rank, start : start + size].float()
            added = x[rows].float() @ a.t() @ b * of.scales[index, slot]
            total[rows, start : start + size] += added
            start += size
    return total


def check(runs: list[AdapterRun], num_tokens: int, of: LowRanks, dtype: torch.dtype) -> None:
    tiles = tiles_of(runs, num_tokens, len(of.up), TABLES)
    assert tiles is not None
    x = random(num_tokens, of.down.shape[2], dtype=dtype)
    out = random(num_tokens, sum(SIZES), dtype=dtype, seed=3)
    wanted = expected(x, of, runs, out)
    add_low_rank(x, of, tiles, out)
    assert error(out.float(), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_each_token_gets_what_its_own_adapter_adds(dtype: torch.dtype) -> None:
    ranks = [(4, 16), (16, 3), (0, 5)]
    # Two sequences apart from each other have the same; the fifth and the last token have none.
    runs = [run(0, 2, 1), run(2, 2, 0), run(5, 20, 1), run(25, 1, 2)]
    check(runs, 27, changes(ranks, 16, dtype), dtype)


@pytest.mark.parametrize(("max_rank", "rank"), [(3, 3), (130, 70), (130, 130)])
@torch.inference_mode()
def test_ranks_may_be_of_any_size(max_rank: int, rank: int) -> None:
    of = changes([(rank, 2), (1, max_rank)], max_rank, torch.float32)
    check([run(0, 1, 1), run(1, 2, 0)], 3, of, torch.float32)


@torch.inference_mode()
def test_many_columns_are_added_up_in_parts() -> None:
    of = changes([(4, 8)], 8, torch.float32, columns=2500)
    check([run(0, 1, 0)], 1, of, torch.float32)


@torch.inference_mode()
def test_a_step_of_many_tokens_has_larger_tiles() -> None:
    assert tile_rows(300) > tile_rows(30)
    of = changes([(4, 8), (8, 8)], 8, torch.float32)
    check([run(0, 130, 0), run(140, 160, 1)], 300, of, torch.float32)


@torch.inference_mode()
def test_rows_without_an_adapter_keep_their_bits() -> None:
    of = changes([(4, 8)], 8, torch.float16)
    out = random(6, sum(SIZES), dtype=torch.float16)
    before = out.clone()
    tiles = tiles_of([run(2, 3, 0)], 6, 1, TABLES)
    assert tiles is not None
    add_low_rank(random(6, COLUMNS, dtype=torch.float16), of, tiles, out)
    changed = (out != before).any(dim=1).tolist()
    assert changed == [False, False, True, True, True, False]


def _tokens(tiles: AdapterTiles) -> dict[int, list[int]]:
    """Those of each slot."""
    found: dict[int, list[int]] = {}
    order = tiles.order.tolist()
    for slot, first, count in zip(
        tiles.slots.tolist(), tiles.firsts.tolist(), tiles.counts.tolist(), strict=True
    ):
        assert count <= tiles.rows
        found.setdefault(slot, []).extend(order[first : first + count])
    return {slot: tokens for slot, tokens in found.items() if tokens}


@pytest.mark.parametrize("size", [1, 8, 40, 300])
def test_tiles_of_a_graph_hold_any_mixture_and_do_not_move(size: int) -> None:
    memory = TileMemory(TABLES, [1, 8, 40, 300], SLOTS)
    address = memory.read(size).order.data_ptr()
    mixtures = [
        [run(0, size, 2)],
        [run(token, 1, token % SLOTS) for token in range(size)],  # each its neighbours' others
        [run(size - 1, 1, 1)],
    ]
    for runs in mixtures:
        memory.write(runs, size)
        tiles = memory.read(size)
        assert tiles.order.data_ptr() == address
        assert len(tiles.counts) == most_tiles(size, SLOTS)
        wanted: dict[int, list[int]] = {}
        for first, count, slot in runs:
            wanted.setdefault(slot, []).extend(range(first, first + count))
        assert _tokens(tiles) == wanted


def test_a_step_without_adapters_has_no_tiles() -> None:
    assert tiles_of([], 5, SLOTS, TABLES) is None
