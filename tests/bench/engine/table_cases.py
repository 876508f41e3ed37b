"""The kernels that read and write the per-slot tables: one launch each, so their time is theirs."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.engine.kernels.tables import (
    gather_chunks,
    gather_decodes,
    store_sampled,
    update_table,
)
from tests.bench.engine.case import Bench, Case, MakeCase, size_of

_BLOCK_SIZE = 64


def tables(bench: Bench) -> Iterator[MakeCase]:
    for rows in bench.pick((1, 256), (17,), (3,)):
        for make in (_gather_decodes, _gather_chunks, _store, _update):
            yield partial(make, bench, rows)


class _Tables:
    """Random ids, blocks and lengths of `rows` slots, and rows in another order than slots."""

    def __init__(self, bench: Bench, rows: int) -> None:
        max_len = 200 if bench.tiny else 8192

        def ints(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, dtype=torch.int32, device=bench.device)

        self.tokens = ints(1000, rows + 1, max_len + 1)
        self.blocks = ints(5000, rows + 1, -(-max_len // _BLOCK_SIZE))
        self.lengths = ints(max_len // 2, rows + 1)
        self.slots = torch.randperm(rows, device=bench.device).int()

    def at(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token id, position, and where its key and value go."""
        slots, positions = slots.long(), positions.long()
        block = self.blocks[slots, positions // _BLOCK_SIZE].long()
        places = block * _BLOCK_SIZE + positions % _BLOCK_SIZE
        return self.tokens[slots, positions], positions, places

    def buffers(self, num_tokens: int) -> list[Tensor]:
        out = torch.full((2, num_tokens), -1, dtype=torch.int32, device=self.slots.device)
        places = torch.full_like(out[0], -1, dtype=torch.int64)
        return [out[0], out[1], places, torch.full_like(self.slots, -1)]


def _differing(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    """The share of elements that differ, of the worst pair."""
    return max(float((out != expected).double().mean()) for out, expected in pairs)


def _gather_decodes(bench: Bench, rows: int) -> Case:
    data = _Tables(bench, rows)
    out = data.buffers(rows)
    lengths, kept = data.lengths[data.slots.long()], data.lengths.clone()
    token_ids, positions, places, context_lens = out

    def call(counted: Tensor) -> None:
        gather_decodes(
            data.slots, counted, data.tokens, data.blocks[None], _BLOCK_SIZE,
            token_ids, positions, places[None], context_lens,
        )  # fmt: skip

    def error() -> float:
        data.lengths.copy_(kept)
        call(data.lengths)
        now = data.lengths[data.slots.long()]
        expected = (*data.at(data.slots, lengths), lengths + 1, lengths + 1)
        return _differing(zip((*out, now), expected, strict=True))

    return Case(
        kernel="gather_decodes",
        at={"rows": rows},
        # That counts for no slot: thousands of calls would leave the tables.
        calls=[partial(call, data.lengths[:1])],
        error=error,
        num_bytes=size_of(*out) + 5 * size_of(data.slots),
    )


def _gather_chunks(bench: Bench, rows: int) -> Case:
    """Each row a chunk of the same length, from its slot's position."""
    data = _Tables(bench, rows)
    count = 20 if bench.tiny else 32
    starts = data.lengths[data.slots.long()]
    offsets = (torch.arange(rows + 1, device=bench.device) * count).int()
    out = data.buffers(rows * count)
    token_ids, positions, places, context_lens = out
    call = partial(
        gather_chunks,
        data.slots,
        starts,
        offsets,
        data.lengths.clone(),
        data.tokens,
        data.blocks[None],
        _BLOCK_SIZE,
        count,
        token_ids,
        positions,
        places[None],
        context_lens,
    )

    def error() -> float:
        call()
        step = torch.arange(count, device=bench.device)
        positions = (starts[:, None] + step).flatten()
        expected = (*data.at(data.slots.repeat_interleave(count), positions), starts + count)
        return _differing(zip(out, expected, strict=True))

    return Case(
        kernel="gather_chunks",
        at={"rows": rows, "tokens": rows * count},
        calls=[call],
        error=error,
        num_bytes=2 * size_of(*out),
    )


def _store(bench: Bench, rows: int) -> Case:
    """What a step writes back: the sampled ids."""
    data = _Tables(bench, rows)
    ids = torch.randint(1000, (rows,), dtype=torch.int32, device=bench.device)
    context_lens = data.lengths[data.slots.long()] + 1

    def call() -> None:
        store_sampled(ids, data.slots, context_lens, data.tokens)

    def error() -> float:
        tokens = data.tokens.clone()
        tokens[data.slots.long(), context_lens.long()] = ids
        call()
        return _differing(iter([(data.tokens, tokens)]))

    return Case(
        kernel="store_sampled",
        at={"rows": rows},
        calls=[call],
        error=error,
        num_bytes=3 * size_of(ids),
    )


def _update(bench: Bench, rows: int) -> Case:
    """Every row has grown by a block."""
    data = _Tables(bench, rows)
    columns = torch.randint(data.blocks.shape[1], (rows,), device=bench.device)
    updates = torch.stack((data.slots, columns.int(), 7000 + columns.int()), 1).contiguous()

    def error() -> float:
        blocks = data.blocks.clone()
        blocks[data.slots.long(), columns] = updates[:, 2]
        update_table(updates, data.blocks)
        return _differing(iter([(data.blocks, blocks)]))

    return Case(
        kernel="update_table",
        at={"rows": rows},
        calls=[partial(update_table, updates, data.blocks)],
        error=error,
        num_bytes=size_of(updates) + 4 * rows,
    )
