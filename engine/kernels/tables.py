"""The per-slot tables on the device: what a step reads of its sequences and writes back.

The tables have fixed addresses for captured graphs: token_table (slots, max_len + 1) int32,
block_tables (slots, max_blocks) int32, and lengths (slots,) int32, how many tokens of a slot's
sequence have their keys and values in the pool.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div

_BLOCK = 256
# Of a program that gathers or accepts drafts.
_DRAFTED_ROWS = 16


class RotaryPositions(NamedTuple):
    """What tokens are rotated by, where that is not their positions. shifts: (slots,) int32, how
    much less it is, as an image takes fewer positions than it has tokens; of tokens after the last.
    of_tokens: (T,) int32, written by what gathers the tokens."""

    shifts: Tensor
    of_tokens: Tensor


def gather_decodes(
    slots: Tensor,
    lengths: Tensor,
    token_table: Tensor,
    block_tables: Tensor,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    context_lens: Tensor,
    turn: Tensor | None = None,
    num_turns: int = 1,
    rotary: RotaryPositions | None = None,
) -> None:
    """One token for each of `slots`, (B,) int32: the first that is not yet computed.

    block_tables: of all groups, (G, slots, max_blocks). Writes token_ids, positions, context_lens,
    (B,) int32, and kv_slots, (G, B or more) int64. Then lengths[slots[i]] = context_lens[i], except
    for the last slot, which is padding; and turn, (1,) int32, goes on by one, modulo num_turns.
    """
    num_rows = len(slots)
    _gather_decodes[(ceil_div(num_rows, _BLOCK),)](
        slots, lengths, token_table, block_tables, token_ids, positions, kv_slots, context_lens,
        num_rows, len(lengths) - 1, token_table.stride(0), *block_tables.stride()[:2],
        len(block_tables), kv_slots.stride(0), block_size, turn, num_turns,
        *(rotary or (None, None)), BLOCK=_BLOCK, num_warps=2,
    )  # fmt: skip


def gather_chunks(
    slots: Tensor,
    starts: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    token_table: Tensor,
    block_tables: Tensor,
    block_size: int,
    max_num_tokens: int,
    token_ids: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    context_lens: Tensor,
    decode_lens: Tensor | None = None,
    rotary: RotaryPositions | None = None,
) -> None:
    """The tokens of the sequence in slots[i] from starts[i] on, as many as query_starts gives; of a
    decode, which starts at -1, the first that is not yet computed.

    slots, starts: (R,) int32. query_starts: (R + 1,) int32, offsets into the T tokens written.
    block_tables: of all groups, (G, slots, max_blocks). max_num_tokens: the most of any row. Writes
    token_ids, positions, context_lens, kv_slots and lengths as `gather_decodes` does; and
    decode_lens, (R,) int32, the length of each decode and 0 of other rows.
    """
    grid = (len(slots), ceil_div(max_num_tokens, _BLOCK))
    _gather_chunks[grid](
        slots, starts, query_starts, lengths, token_table, block_tables,
        token_ids, positions, kv_slots, context_lens, decode_lens,
        len(lengths) - 1, token_table.stride(0), *block_tables.stride()[:2], len(block_tables),
        kv_slots.stride(0), block_size, *(rotary or (None, None)), BLOCK=_BLOCK, num_warps=2,
    )  # fmt: skip


class DraftedRows(NamedTuple):
    """Decodes with drafts, as many rows as tokens: those of row i are counts[i] from firsts[i] on,
    0 for a row that is none. All (T,) int32; drafts: by token, void at the first of a row."""

    slots: Tensor
    firsts: Tensor
    counts: Tensor
    drafts: Tensor


class DraftedTokens(NamedTuple):
    """What `gather_drafted` writes of each token: (T,) int32. next_positions: what is sampled after
    each."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    next_positions: Tensor


def gather_drafted(
    rows: DraftedRows,
    most_queries: int,
    lengths: Tensor,
    token_table: Tensor,
    block_tables: Tensor,
    block_size: int,
    tokens: DraftedTokens,
    kv_slots: Tensor,
    context_lens: Tensor,
    turn: Tensor | None = None,
    num_turns: int = 1,
    rotary: RotaryPositions | None = None,
) -> None:
    """The first token of each row that is not yet computed, and its drafts.

    most_queries: of a row, a power of two. Writes tokens, kv_slots, context_lens and turn as
    `gather_decodes` does, the latter two of each row; but lengths are what `accept_drafts` makes of
    them.
    """
    num_rows = len(rows.slots)
    _gather_drafted[(ceil_div(num_rows, _DRAFTED_ROWS),)](
        *rows, lengths, token_table, block_tables, *tokens, kv_slots, context_lens,
        num_rows, token_table.stride(0), *block_tables.stride()[:2], len(block_tables),
        kv_slots.stride(0), block_size, turn, num_turns, *(rotary or (None, None)),
        ROWS=_DRAFTED_ROWS, QUERIES=most_queries, num_warps=2,
    )  # fmt: skip


def accept_drafts(
    ids: Tensor,
    rows: DraftedRows,
    most_queries: int,
    positions: Tensor,
    lengths: Tensor,
    token_table: Tensor,
    accepted: Tensor,
    host: Tensor | None = None,
    turn: Tensor | None = None,
) -> None:
    """Appends to each row's sequence the ids that were sampled after its tokens, up to the first
    that is not the draft which follows.

    ids: (T,), sampled after each token. positions: (T,) of `gather_drafted`. Writes lengths, so
    that the last id is not yet computed; and accepted, (2, T) int32, how many ids each row has got,
    and all ids. host[turn] = accepted: (turns, 2 T or more). One after an accepted draft that is
    invalid is left to the next step, as in `penstock.engine.sampling.verify`. A call for the same
    tokens takes the place of the one before.
    """
    num_rows = len(rows.slots)
    _accept_drafts[(ceil_div(num_rows, _DRAFTED_ROWS),)](
        ids, *rows, positions, lengths, token_table, accepted, host, turn,
        num_rows, len(lengths) - 1, token_table.stride(0), accepted.stride(0),
        0 if host is None else host.stride(0),
        ROWS=_DRAFTED_ROWS, QUERIES=most_queries, num_warps=2, **overlapped(),
    )  # fmt: skip


def store_sampled(
    ids: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    token_table: Tensor,
    host_ids: Tensor | None = None,
    turn: Tensor | None = None,
) -> None:
    """Appends each sampled id, or 0 for a negative one, to its sequence's tokens.

    ids, slots, context_lens: (S,). host_ids[turn, i] = ids[i]: (turns, S or more) int32, in pinned
    memory of the host. Raises ValueError where the device does not reach that.
    """
    num_rows = len(slots)
    _store_sampled[(ceil_div(num_rows, _BLOCK),)](
        ids, slots, context_lens, token_table, num_rows, token_table.stride(0),
        host_ids, turn, 0 if host_ids is None else host_ids.stride(0),
        BLOCK=_BLOCK, num_warps=2, **overlapped(),
    )  # fmt: skip


def update_table(updates: Tensor, table: Tensor) -> None:
    """table[slot, index] = value for each (slot, index, value) of updates, (N, 3) int32. table: of
    blocks or of tokens."""
    num_updates = len(updates)
    _update_table[(ceil_div(num_updates, _BLOCK),)](
        updates, table, num_updates, table.stride(0), BLOCK=_BLOCK, num_warps=2
    )


_DECODE_SIZES = (
    "num_rows", "num_slots", "token_stride", "group_stride", "table_stride", "num_groups",
    "kv_stride", "num_turns",
)  # fmt: skip


@triton.jit(do_not_specialize=_DECODE_SIZES)
def _gather_decodes(
    slots, lengths, token_table, block_tables, token_ids, positions, kv_slots, context_lens,
    num_rows, num_slots, token_stride, group_stride, table_stride, num_groups, kv_stride,
    block_size, turn, num_turns, shifts, rotary_positions, BLOCK: tl.constexpr,
):  # fmt: skip
    if turn is not None:  # noqa: SIM102  (known at compile time, the other is not)
        if tl.program_id(0) == 0:
            tl.store(turn, (tl.load(turn) + 1) % num_turns)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    slot = tl.load(slots + row, mask=mask, other=0).to(tl.int64)
    position = tl.load(lengths + slot, mask=mask, other=0)
    token_id = tl.load(token_table + slot * token_stride + position, mask=mask, other=0)
    tl.store(token_ids + row, token_id, mask=mask)
    tl.store(positions + row, position, mask=mask)
    if shifts is not None:
        shift = tl.load(shifts + slot, mask=mask, other=0)
        tl.store(rotary_positions + row, position - shift, mask=mask)
    tl.store(context_lens + row, position + 1, mask=mask)
    tl.store(lengths + slot, position + 1, mask=mask & (slot < num_slots))
    entry = block_tables + slot * table_stride + position // block_size
    for group in range(0, num_groups):
        wide = tl.cast(group, tl.int64)
        block = tl.load(entry + wide * group_stride, mask=mask, other=0).to(tl.int64)
        target = kv_slots + wide * kv_stride + row
        tl.store(target, block * block_size + position % block_size, mask=mask)


_CHUNK_SIZES = (
    "num_slots", "token_stride", "group_stride", "table_stride", "num_groups", "kv_stride",
)  # fmt: skip


# These are slices of one tensor, at any offset. Specialised, the kernel would be compiled once for
# aligned ones and again, while serving, for the others.
@triton.jit(
    do_not_specialize=_CHUNK_SIZES,
    do_not_specialize_on_alignment=["starts", "query_starts", "positions", "rotary_positions"],
)
def _gather_chunks(
    slots, starts, query_starts, lengths, token_table, block_tables,
    token_ids, positions, kv_slots, context_lens, decode_lens,
    num_slots, token_stride, group_stride, table_stride, num_groups, kv_stride, block_size,
    shifts, rotary_positions, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row)
    is_decode = start < 0
    start = tl.where(is_decode, tl.load(lengths + slot), start)
    # Before one thread writes the length, all have read it. Other programs of a decode's row have
    # no token.
    tl.debug_barrier()
    first = tl.load(query_starts + row)
    num_tokens = tl.load(query_starts + row + 1) - first
    if tl.program_id(1) == 0:
        tl.store(context_lens + row, start + num_tokens)
        if decode_lens is not None:
            tl.store(decode_lens + row, tl.where(is_decode, start + 1, 0))
        if slot < num_slots:
            tl.store(lengths + slot, start + num_tokens)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_tokens
    position = start + index
    token_id = tl.load(token_table + slot * token_stride + position, mask=mask, other=0)
    tl.store(token_ids + first + index, token_id, mask=mask)
    tl.store(positions + first + index, position, mask=mask)
    if shifts is not None:
        shifted = position - tl.load(shifts + slot)
        tl.store(rotary_positions + first + index, shifted, mask=mask)
    entry = block_tables + slot * table_stride + position // block_size
    for group in range(0, num_groups):
        wide = tl.cast(group, tl.int64)
        block = tl.load(entry + wide * group_stride, mask=mask, other=0).to(tl.int64)
        target = kv_slots + wide * kv_stride + first + index
        tl.store(target, block * block_size + position % block_size, mask=mask)


# As of `_gather_chunks`.
@triton.jit(
    do_not_specialize=["num_rows", *_CHUNK_SIZES, "num_turns"],
    do_not_specialize_on_alignment=["firsts", "counts", "drafts"],
)
def _gather_drafted(
    slots, firsts, counts, drafts, lengths, token_table, block_tables, token_ids, positions,
    token_slots, next_positions, kv_slots, context_lens, num_rows, token_stride, group_stride,
    table_stride, num_groups, kv_stride, block_size, turn, num_turns, shifts, rotary_positions,
    ROWS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    if turn is not None:  # noqa: SIM102  (known at compile time, the other is not)
        if tl.program_id(0) == 0:
            tl.store(turn, (tl.load(turn) + 1) % num_turns)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    query = tl.arange(0, QUERIES)[None, :]
    is_row = row < num_rows
    count = tl.load(counts + row, mask=is_row, other=0)
    slot = tl.load(slots + row, mask=is_row, other=0).to(tl.int64)
    start = tl.load(lengths + slot, mask=is_row, other=0)
    tl.store(context_lens + row, tl.where(count > 0, start + count, 0), mask=is_row)
    mask = query < count
    token = tl.load(firsts + row, mask=is_row, other=0) + query
    position = start + query
    known = tl.load(token_table + slot * token_stride + start, mask=count > 0, other=0)
    draft = tl.load(drafts + token, mask=mask & (query > 0), other=0)
    tl.store(token_ids + token, tl.where(query > 0, draft, known), mask=mask)
    tl.store(positions + token, position, mask=mask)
    if shifts is not None:
        shift = tl.load(shifts + slot, mask=is_row, other=0)
        tl.store(rotary_positions + token, position - shift, mask=mask)
    tl.store(token_slots + token, slot.to(tl.int32) + query * 0, mask=mask)
    tl.store(next_positions + token, position + 1, mask=mask)
    entry = block_tables + slot * table_stride + position // block_size
    for group in range(0, num_groups):
        wide = tl.cast(group, tl.int64)
        block = tl.load(entry + wide * group_stride, mask=mask, other=0).to(tl.int64)
        target = kv_slots + wide * kv_stride + token
        tl.store(target, block * block_size + position % block_size, mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "token_stride", "accepted_stride", "host_stride"],
    do_not_specialize_on_alignment=["firsts", "counts", "drafts"],
)
def _accept_drafts(
    ids, slots, firsts, counts, drafts, positions, lengths, token_table, accepted, host, turn,
    num_rows, num_slots, token_stride, accepted_stride, host_stride,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = tl.arange(0, QUERIES)[None, :]
    is_row = row < num_rows
    count = tl.load(counts + row, mask=is_row, other=0)
    slot = tl.load(slots + row, mask=is_row, other=0).to(tl.int64)
    first = tl.load(firsts + row, mask=is_row, other=0)
    start = tl.load(positions + first, mask=count > 0, other=0)
    token = first[:, None] + query
    mask = query < count[:, None]
    token_id = tl.load(ids + token, mask=mask, other=0).to(tl.int32)
    follows = query + 1 < count[:, None]
    draft = tl.load(drafts + token + 1, mask=follows, other=0)
    last = tl.min(tl.where(follows & (token_id == draft), QUERIES, query), 1)
    last_id = tl.sum(tl.where(query == last[:, None], token_id, 0), 1)
    num = tl.where((last > 0) & (last_id < 0), last, last + 1)
    # The next step, launched before the host learns that a row has no id, must find one.
    target = token_table + slot[:, None] * token_stride + start[:, None] + 1 + query
    tl.store(target, tl.maximum(token_id, 0), mask=mask & (query < num[:, None]))
    tl.store(lengths + slot, start + num, mask=(count > 0) & (slot < num_slots))
    tl.store(accepted + row, num, mask=is_row)
    tl.store(accepted + accepted_stride + token, token_id, mask=mask)
    if host is not None:
        of_turn = host + tl.load(turn).to(tl.int64) * host_stride
        tl.store(of_turn + row, num, mask=is_row)
        tl.store(of_turn + accepted_stride + token, token_id, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "token_stride", "host_stride"])
def _store_sampled(
    ids, slots, context_lens, token_table, num_rows, token_stride, host_ids, turn, host_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    slot = tl.load(slots + row, mask=mask, other=0).to(tl.int64)
    length = tl.load(context_lens + row, mask=mask, other=0)
    token_id = tl.load(ids + row, mask=mask, other=0).to(tl.int32)
    if host_ids is not None:
        of_turn = tl.load(turn).to(tl.int64) * host_stride
        tl.store(host_ids + of_turn + row, token_id, mask=mask)
    # The next step, launched before the host learns that a row has no id, must find one.
    tl.store(token_table + slot * token_stride + length, tl.maximum(token_id, 0), mask=mask)


@triton.jit(do_not_specialize=["num_updates", "table_stride"])
def _update_table(updates, table, num_updates, table_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_updates
    slot = tl.load(updates + 3 * row, mask=mask, other=0).to(tl.int64)
    index = tl.load(updates + 3 * row + 1, mask=mask, other=0)
    value = tl.load(updates + 3 * row + 2, mask=mask, other=0)
    tl.store(table + slot * table_stride + index, value, mask=mask)
