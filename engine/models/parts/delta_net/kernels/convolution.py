"""The causal convolution of a gated delta net's queries, keys and values, and what is kept of its
inputs for the next step.

A program computes one head of queries, keys or values; the first two are normalised too. The inputs
before a chunk's first token are in its sequence's state, so nothing writes there before all tiles
have been computed: `_store_inputs` is a launch of its own.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.activation import silu
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2
from penstock.engine.memory.pool.state_shape import StateShape
from penstock.engine.models.parts.delta_net.kernels.shape import sizes, tile_programs
from penstock.engine.step.device_step import DeviceStep

# Tokens that a program computes at a time, of a tile.
_TOKENS = 32
_CHANNELS = 512


def convolve(
    shape: StateShape, projected: Tensor, taps: Tensor, step: DeviceStep, inputs: Tensor
) -> Tensor:
    """Queries, keys and values of all tokens: (T, channels), of the type of `projected`. Queries
    and keys have length 1, queries then key_dim ** -0.5.

    projected: (T, channels + values). taps: as in `DeltaNet`. step: as the layer's group sees it.
    inputs: one layer's, see `StatePool`; those of the step's sequences are replaced.
    """
    mixed = projected.new_empty(len(projected), shape.num_channels)
    heads = 2 * shape.num_key_heads + shape.num_heads
    constants = sizes(shape)
    head_sizes = {"DIMS": max(constants.pop("KEYS"), constants.pop("VALUES"))}
    constants["TAPS"] = shape.num_inputs + 1
    entries = next_power_of_2(shape.num_inputs)
    tables = step.block_tables
    if step.num_decodes:
        _convolve_decodes[(step.num_decodes, heads)](
            projected, taps, tables, step.slots, step.positions, step.lens_of_decodes, inputs,
            mixed, tables.stride(0),
            **constants, **head_sizes, ENTRIES=entries, num_warps=1, **overlapped(),
        )  # fmt: skip
    if (tiles := step.state_tiles) is not None:
        _convolve_tiles[(tile_programs(step), heads)](
            projected, taps, tables, step.slots, step.positions, *tiles.lists, inputs, mixed,
            tables.stride(0),
            **constants, **head_sizes, TILE=tiles.most_tokens,
            TOKENS=min(_TOKENS, tiles.most_tokens), num_warps=4, **overlapped(),
        )  # fmt: skip
        num_chunks = min(len(tiles.chunks), tile_programs(step))
        _store_inputs[(num_chunks, ceil_div(shape.num_channels, _CHANNELS))](
            projected, tables, step.slots, step.positions, *tiles.lists, inputs, tables.stride(0),
            **constants, ENTRIES=entries, BLOCK=_CHANNELS, num_warps=4, **overlapped(),
        )  # fmt: skip
    return mixed


@triton.jit
def _channels(head, dim, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """A head's channels, be it of queries, keys or values, and which of them there are."""
    is_value = head >= 2 * KEY_HEADS
    first = tl.where(
        is_value,
        2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM,
        head * KEY_DIM,
    )
    return first + dim, dim < tl.where(is_value, VALUE_DIM, KEY_DIM)


@triton.jit
def _factor(squares, head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr):
    """The factor of a head; squares: their sum."""
    unit = tl.rsqrt(squares + 1e-6)
    scale: tl.constexpr = KEY_DIM**-0.5
    return tl.where(head < KEY_HEADS, unit * scale, tl.where(head < 2 * KEY_HEADS, unit, 1.0))


@triton.jit(
    do_not_specialize=["table_stride"],
    # Slices of a step's tensors, see `_gather_chunks`.
    do_not_specialize_on_alignment=["slots", "positions", "lens"],
)
def _convolve_decodes(
    projected, taps, tables, slots, positions, lens, inputs, mixed, table_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, TAPS: tl.constexpr, ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token of a sequence, and one head. Moves the head's inputs on by one."""
    wait_for_kernels_before(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if tl.load(lens + row) == 0:
        return
    state = tl.load(tables + tl.load(slots + row).to(tl.int64) * table_stride).to(tl.int64)
    num_before = tl.where(tl.load(positions + row) == 0, 0, TAPS - 1)
    channel, is_channel = _channels(head, tl.arange(0, DIMS), KEY_HEADS, KEY_DIM, VALUE_DIM)
    entry = tl.arange(0, ENTRIES)[:, None]
    kept = inputs + (state * (TAPS - 1) + entry) * CHANNELS + channel[None, :]
    is_kept = (entry < TAPS - 1) & is_channel[None, :]
    before = tl.load(kept, mask=is_kept & (entry < num_before), other=0.0)
    weights = tl.load(taps + entry * CHANNELS + channel[None, :], mask=is_kept, other=0.0)
    own = tl.load(
        projected + row * (CHANNELS + VALUE_HEADS * VALUE_DIM) + channel, mask=is_channel, other=0.0
    ).to(tl.float32)
    weight = tl.load(taps + (TAPS - 1) * CHANNELS + channel, mask=is_channel, other=0.0)
    x = silu(tl.sum(before * weights, 0) + own * weight)
    x *= _factor(tl.sum(x * x, 0), head, KEY_HEADS, KEY_DIM)
    tl.store(mixed + row * CHANNELS + channel, x.to(mixed.dtype.element_ty), mask=is_channel)
    # Other threads may have loaded what this one overwrites.
    tl.debug_barrier()
    tl.store(kept - CHANNELS, before, mask=is_kept & (entry > 0))
    last = inputs + (state * (TAPS - 1) + TAPS - 2) * CHANNELS + channel
    tl.store(last, own, mask=is_channel)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["slots", "positions", "counts", "chunks", "tiles"],
)
def _convolve_tiles(
    projected, taps, tables, slots, positions, counts, chunks, tiles, inputs, mixed, table_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of chunks, and one head."""
    wait_for_kernels_before(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    ROW: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(1)
    channel, is_channel = _channels(head, tl.arange(0, DIMS), KEY_HEADS, KEY_DIM, VALUE_DIM)
    for tile in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        first = tl.load(tiles + tile * 4)
        end = tl.load(tiles + tile * 4 + 1)
        chunk = chunks + tl.load(tiles + tile * 4 + 2) * 4
        begin = tl.load(chunk + 1)
        slot = tl.load(slots + tl.load(chunk)).to(tl.int64)
        state = tl.load(tables + slot * table_stride).to(tl.int64)
        # A state's inputs are those of tokens before this one.
        old_end = tl.where(tl.load(positions + begin) == 0, -TAPS, begin)
        for start in range(0, TILE, TOKENS):
            token = first + start + tl.arange(0, TOKENS)
            is_there = (token < end)[:, None] & is_channel[None, :]
            total = tl.zeros((TOKENS, DIMS), tl.float32)
            for tap in tl.static_range(TAPS):
                source = token - (TAPS - 1 - tap)
                place = projected + source.to(tl.int64)[:, None] * ROW + channel[None, :]
                mask = is_there & (source >= begin)[:, None]
                x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
                if tap < TAPS - 1:
                    entry = state * (TAPS - 1) + (source - begin + TAPS - 1)
                    place = inputs + entry[:, None] * CHANNELS + channel[None, :]
                    x += tl.load(place, mask=is_there & (source < old_end)[:, None], other=0.0)
                weight = tl.load(taps + tap * CHANNELS + channel, mask=is_channel, other=0.0)
                total += x * weight[None, :]
            total = silu(total)
            total *= _factor(tl.sum(total * total, 1), head, KEY_HEADS, KEY_DIM)[:, None]
            target = mixed + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            tl.store(target, total.to(mixed.dtype.element_ty), mask=is_there)


@triton.jit
def _last_inputs(
    projected, kept, begin, old_end, end, entry, channel, is_there,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Those before the token `end` of a chunk: of the chunk itself, or of its sequence's state."""
    source = end - (TAPS - 1) + entry
    is_new = source >= begin
    new = tl.load(
        projected + source.to(tl.int64) * ROW + channel, mask=is_there & is_new, other=0.0
    )
    old = tl.load(
        kept + (source - begin + TAPS - 1).to(tl.int64) * CHANNELS + channel,
        mask=is_there & (source < old_end),
        other=0.0,
    )
    return new.to(tl.float32) + old


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["slots", "positions", "counts", "chunks", "tiles"],
)
def _store_inputs(
    projected, tables, slots, positions, counts, chunks, tiles, inputs, table_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Chunks, and some channels: the snapshots on their way, then the sequences' own."""
    wait_for_kernels_before(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    ROW: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM
    entry = tl.arange(0, ENTRIES)[:, None]
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_there = (entry < TAPS - 1) & (channel < CHANNELS)
    place = entry * CHANNELS + channel
    for index in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        chunk = chunks + index * 4
        begin = tl.load(chunk + 1)
        slot = tl.load(slots + tl.load(chunk)).to(tl.int64)
        state = tl.load(tables + slot * table_stride).to(tl.int64)
        own = inputs + state * ((TAPS - 1) * CHANNELS)
        old_end = tl.where(tl.load(positions + begin) == 0, -TAPS, begin)
        end = begin
        for tile in range(tl.load(chunk + 2), tl.load(chunk + 3)):
            end = tl.load(tiles + tile * 4 + 1)
            snapshot = tl.load(tiles + tile * 4 + 3).to(tl.int64)
            if snapshot >= 0:
                x = _last_inputs(
                    projected, own, begin, old_end, end, entry, channel, is_there,
                    TAPS, CHANNELS, ROW,
                )  # fmt: skip
                tl.store(inputs + snapshot * ((TAPS - 1) * CHANNELS) + place, x, mask=is_there)
        x = _last_inputs(
            projected, own, begin, old_end, end, entry, channel, is_there, TAPS, CHANNELS, ROW
        )
        # Other threads may have loaded what this one overwrites.
        tl.debug_barrier()
        tl.store(own + place, x, mask=is_there)
