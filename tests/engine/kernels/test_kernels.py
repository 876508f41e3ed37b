"""Each Triton kernel agrees with plain torch: in the interpreter, or on a GPU if there is one."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.kernels.activation import silu_mul, softcap
from penstock.engine.kernels.linear import (
    MAX_ROWS,
    Scaled,
    Tile,
    skinny_linear,
    tile_of,
)
from penstock.engine.kernels.norm import add_rms_norm, embed, rms_norm
from penstock.engine.kernels.rope import rotate_and_store
from penstock.engine.kernels.tables import (
    DraftedRows,
    DraftedTokens,
    RotaryPositions,
    accept_drafts,
    gather_chunks,
    gather_decodes,
    gather_drafted,
    store_sampled,
    update_table,
)
from penstock.engine.memory.pool.kv_codes import LIMITS, store
from penstock.engine.models.parts.attention.rotary import rotate
from penstock.engine.models.parts.norm.layer import unit_norm
from penstock.engine.models.parts.per_layer_inputs.kernels import add_table_rows, gate_input
from penstock.engine.step.device_step import Rotation
from tests.support.kernels import (
    DEVICE,
    DTYPES,
    ON_GPU,
    TOLERANCE,
    coded,
    error,
    poisoned,
    random,
    scaled,
)

EPS = 1e-5
# Of the difference of two equal products of 42,426, one of which a GPU does not round.
NEAR_ZERO = 0.01


def _rotation(
    angles: Tensor, query_norm: Tensor | None = None, key_norm: Tensor | None = None
) -> Rotation:
    return Rotation(
        cos=angles.cos(), sin=angles.sin(), query_norm=query_norm, key_norm=key_norm, eps=EPS
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 100, 1024])
def test_rms_norm_is_torchs_with_and_without_the_residual(dtype: torch.dtype, hidden: int) -> None:
    x, residual = random(5, hidden, dtype=dtype), random(5, hidden, dtype=dtype, seed=1)
    weight = random(hidden, dtype=dtype)
    expected_sum = residual + x
    normed = poisoned(5, hidden, dtype=dtype)
    add_rms_norm(x, residual, weight, EPS, normed)
    expected = functional.rms_norm(expected_sum.float(), (hidden,), weight.float(), EPS)
    assert error(residual, expected_sum) < TOLERANCE[dtype]
    assert error(normed, expected) < TOLERANCE[dtype]
    rms_norm(x, weight, EPS, normed)
    expected = functional.rms_norm(x.float(), (hidden,), weight.float(), EPS)
    assert error(normed, expected) < TOLERANCE[dtype]


def test_embed_gathers_rows() -> None:
    embedding, ids = random(50, 20), torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=DEVICE)
    residual = poisoned(4, 20)
    embed(ids, embedding, residual)
    torch.testing.assert_close(residual, embedding[ids.long()])


def test_embed_of_a_part_of_the_vocabulary_gives_zeros_for_other_ids() -> None:
    embedding = random(10, 20)
    ids = torch.tensor([0, 9, 10, 19, 20, 50], dtype=torch.int32, device=DEVICE)
    residual = poisoned(6, 20)
    embed(ids, embedding, residual, first_id=10)
    expected = torch.zeros_like(residual)
    expected[2:4] = embedding[[0, 9]]
    torch.testing.assert_close(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_torchs(dtype: torch.dtype) -> None:
    gate_up, out = random(5, 2 * 1100, dtype=dtype), poisoned(5, 1100, dtype=dtype)
    silu_mul(gate_up, out)
    gate, up = gate_up.float().chunk(2, -1)
    assert error(out, functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("head_dim", [8, 24, 32])
def test_queries_and_keys_are_rotated_and_keys_and_values_stored(
    dtype: torch.dtype, with_norm: bool, head_dim: int
) -> None:
    num_tokens, heads, kv_heads, shape = 7, 6, 2, (4, 4, 2, head_dim)
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32).to(DEVICE)
    kv_slots = torch.randperm(16)[:num_tokens].to(DEVICE)
    angles = random(50, head_dim // 2)
    query_norm = random(head_dim, dtype=dtype, seed=1) if with_norm else None
    key_norm = random(head_dim, dtype=dtype, seed=2) if with_norm else None
    keys, values = (torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in "kv")
    query = poisoned(num_tokens, heads, head_dim, dtype=dtype)
    rotation = _rotation(angles, query_norm, key_norm)
    rotate_and_store(qkv, rotation, positions, kv_slots, keys, values, query)
    projected = qkv.float().view(num_tokens, -1, head_dim)
    q, k, v = torch.split(projected, [heads, kv_heads, kv_heads], 1)
    if query_norm is not None and key_norm is not None:
        q = functional.rms_norm(q, (head_dim,), query_norm.float(), EPS)
        k = functional.rms_norm(k, (head_dim,), key_norm.float(), EPS)
    cos, sin = (f(angles[positions.long()]).unsqueeze(1) for f in (torch.cos, torch.sin))
    expected_keys, expected_values = torch.zeros(2, *shape, device=DEVICE)
    expected_keys.flatten(0, 1)[kv_slots] = rotate(k, cos, sin)
    expected_values.flatten(0, 1)[kv_slots] = v
    assert error(query, rotate(q, cos, sin)) < TOLERANCE[dtype]
    assert error(keys, expected_keys) < TOLERANCE[dtype]
    assert error(values, expected_values) < TOLERANCE[dtype]


@pytest.mark.parametrize("kv_parts", [0, 1, 2])
def test_values_are_normed_or_are_keys_or_are_another_layers(kv_parts: int) -> None:
    num_tokens, heads, kv_heads, head_dim = 5, 3, 2, 24
    shape = (4, 4, kv_heads, head_dim)
    qkv = random(num_tokens, (heads + kv_parts * kv_heads) * head_dim)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE)
    kv_slots = torch.randperm(16)[:num_tokens].to(DEVICE)
    angles = random(50, head_dim // 2)
    query_norm, key_norm = random(head_dim, seed=1), random(head_dim, seed=2)
    keys, values = (torch.zeros(shape, device=DEVICE) for _ in "kv")
    query = poisoned(num_tokens, heads, head_dim)
    rotation = _rotation(angles, query_norm, key_norm if kv_parts else None)
    rotation = replace(rotation, kv_parts=kv_parts, norms_values=True)
    rotate_and_store(qkv, rotation, positions, kv_slots, keys, values, query)
    cos, sin = (f(angles[positions.long()]).unsqueeze(1) for f in (torch.cos, torch.sin))
    q, *stored = torch.split(qkv.view(num_tokens, -1, head_dim), [heads] + kv_parts * [kv_heads], 1)
    expected = rotate(functional.rms_norm(q, (head_dim,), query_norm, EPS), cos, sin)
    assert error(query, expected) < TOLERANCE[torch.float32]
    expected_keys, expected_values = torch.zeros(2, *shape, device=DEVICE)
    if stored:
        normed = functional.rms_norm(stored[0], (head_dim,), key_norm, EPS)
        expected_keys.flatten(0, 1)[kv_slots] = rotate(normed, cos, sin)
        expected_values.flatten(0, 1)[kv_slots] = unit_norm(stored[-1], EPS)
    torch.testing.assert_close(keys, expected_keys)
    torch.testing.assert_close(values, expected_values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_softcap_is_torchs(dtype: torch.dtype) -> None:
    logits = 100 * random(3, 1100, dtype=dtype)
    expected = torch.tanh(logits.float() / 30) * 30
    softcap(logits, 30.0)
    assert error(logits, expected) < 30 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_scaled_before_its_norm(dtype: torch.dtype) -> None:
    x, residual = random(3, 70, dtype=dtype), random(3, 70, dtype=dtype, seed=1)
    post, weight = random(70, seed=2), random(70, seed=3)
    scalar, normed = torch.tensor([0.7], dtype=dtype, device=DEVICE), poisoned(3, 70, dtype=dtype)
    total = (residual + functional.rms_norm(x.float(), (70,), post, EPS).to(dtype)) * scalar
    add_rms_norm(x, residual, weight, EPS, normed, post=post, scalar=scalar)
    assert error(residual, total) < TOLERANCE[dtype]
    expected = functional.rms_norm(total.float(), (70,), weight, EPS)
    assert error(normed, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_have_inputs_of_their_own_as_torch_makes_them(dtype: torch.dtype) -> None:
    """The table may have another type."""
    num_tokens, num_layers, size = 4, 3, 20
    projected = random(num_tokens, num_layers, size, dtype=dtype)
    table, norm = random(9, num_layers * size, seed=1), random(size, seed=2)
    ids = torch.tensor([8, 0, 3, 8], dtype=torch.int32, device=DEVICE)
    rows = table[ids.long()].view(num_tokens, num_layers, size) * size**0.5
    normed = functional.rms_norm(projected.float() * 0.3, (size,), norm, EPS)
    add_table_rows(projected, ids, table, norm, EPS, 0.3)
    assert error(projected, (normed + rows) * 0.5**0.5) < 4 * TOLERANCE[dtype]
    gate = random(num_tokens, size, dtype=dtype, seed=3)
    expected = functional.gelu(gate.float(), approximate="tanh") * projected[:, 1].float()
    gate_input(gate, projected, 1)
    assert error(gate, expected) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", LIMITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codes_that_are_stored_are_torchs_to_the_bit(
    dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    num_tokens, heads, kv_heads, head_dim = 7, 3, 2, 24
    shape = (4, 4, kv_heads, head_dim)
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    # Of all magnitudes, zero included; in float8 small ones are subnormal.
    qkv = qkv * (4.0 ** -torch.arange(num_tokens, device=DEVICE).to(dtype))[:, None]
    qkv[2] = 0
    qkv[3, ::2] /= 2000
    positions = torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE)
    kv_slots = torch.randperm(16)[:num_tokens].to(DEVICE)
    angles = torch.zeros(1, head_dim // 2, device=DEVICE)  # keys stay as they are
    pages = [coded(torch.zeros(shape, device=DEVICE), kv_dtype) for _ in range(4)]
    query = poisoned(num_tokens, heads, head_dim, dtype=dtype)
    rotate_and_store(qkv, _rotation(angles), positions, kv_slots, pages[0], pages[1], query)
    stored = torch.split(qkv.view(num_tokens, -1, head_dim)[:, heads:], kv_heads, 1)
    for ours, theirs, x in zip(pages[:2], pages[2:], stored, strict=True):
        store(theirs, kv_slots, x)
        torch.testing.assert_close(ours.scales, theirs.scales, rtol=1e-6 if ON_GPU else 0, atol=0)
        # A GPU divides less exactly, so a number between two codes may get either.
        near = (ours.codes.float() - theirs.codes.float()).abs() <= ON_GPU * (
            1 + theirs.codes.float().abs() / 8
        )
        assert bool(near.all())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by the interpreter
@pytest.mark.parametrize("kv_dtype", LIMITS)
def test_a_key_that_is_not_finite_is_stored_as_nan(kv_dtype: torch.dtype) -> None:
    qkv = torch.ones(1, 3 * 8, device=DEVICE)
    qkv[0, 9], qkv[0, 23] = float("nan"), float("inf")
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    keys, values = (coded(torch.zeros(1, 4, 1, 8, device=DEVICE), kv_dtype) for _ in "kv")
    angles, query = torch.zeros(1, 4, device=DEVICE), poisoned(1, 1, 8)
    rotate_and_store(qkv, _rotation(angles), zero, zero.long(), keys, values, query)
    assert keys.scales.isnan().tolist() == values.scales.isnan().tolist() == [[[1, 0, 0, 0]]]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by the interpreter
def test_a_query_or_key_that_float16_cannot_hold_is_nan_and_not_infinite() -> None:
    heads, shape = 2, (1, 4, 1, 8)
    qkv = torch.full((1, 4 * 8), 60_000.0, dtype=torch.float16, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    angles = torch.full((1, 4), math.pi / 4, device=DEVICE)
    keys, values = (torch.zeros(shape, dtype=torch.float16, device=DEVICE) for _ in "kv")
    query = poisoned(1, heads, 8, dtype=torch.float16)
    rotate_and_store(qkv, _rotation(angles), zero, zero.long(), keys, values, query)
    # 60,000 times the sine and cosine of 45 degrees: their difference is 0, their sum 84,853.
    for rotated in (query[0, 0], query[0, 1], keys[0, 0, 0]):
        assert rotated[:4].abs().max() < NEAR_ZERO and bool(rotated[4:].isnan().all())
    expected = rotate(qkv.view(1, 4, 8), angles.cos()[:, None], angles.sin()[:, None])
    assert bool(expected[0, :, 4:].isnan().all()) and expected[0, :, :4].abs().max() < NEAR_ZERO


TILES = [Tile(16, 256, 4, 2), Tile(8, 128, 6, 2), Tile(32, 256, 3, 2)]
# In float16 a row times a norm's weight may be too large, so it takes no half of a norm.
SCALED = [dtype for dtype in DTYPES if dtype is not torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize("tile", TILES)
def test_skinny_linear_computes_what_surrounds_a_linear_layer_too(
    dtype: torch.dtype, num_rows: int, tile: Tile
) -> None:
    columns, outputs = 300, 70
    x, weight = random(num_rows, columns, dtype=dtype), random(outputs, columns, dtype=dtype)
    bias, residual = random(outputs, dtype=dtype), random(num_rows, outputs, dtype=dtype)
    product = x.float() @ weight.float().T

    out = poisoned(num_rows, outputs, dtype=dtype)
    assert skinny_linear(x, weight, out, tile=tile) is None
    assert error(out, product) < TOLERANCE[dtype]
    in_place = residual.clone()
    skinny_linear(x, weight, in_place, bias=bias, residual=in_place, tile=tile)
    assert error(in_place, product + bias.float() + residual.float()) < TOLERANCE[dtype]
    gated = poisoned(num_rows, outputs // 2, dtype=dtype)
    skinny_linear(x, weight, gated, is_gated=True, tile=tile)
    gate, up = product.chunk(2, -1)
    assert error(gated, functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", SCALED)
@pytest.mark.parametrize("num_rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize("tile", TILES)
def test_two_products_compute_the_norm_between_them(
    dtype: torch.dtype, num_rows: int, tile: Tile
) -> None:
    columns, hidden, outputs = 90, 300, 70
    x, weight = random(num_rows, columns, dtype=dtype), random(hidden, columns, dtype=dtype)
    following, bias = random(outputs, hidden, dtype=dtype), random(outputs, dtype=dtype)
    norm, out = random(hidden, dtype=dtype, seed=1), random(num_rows, hidden, dtype=dtype)
    between = skinny_linear(x, weight, out, residual=out, following=norm, tile=tile)
    assert isinstance(between, Scaled)
    normed = functional.rms_norm(out.float(), (hidden,), norm.float(), EPS)
    product = normed @ following.float().T

    logits = poisoned(num_rows, outputs)
    skinny_linear(between, following, logits, eps=EPS, bias=bias, tile=tile)
    assert error(logits, product + bias.float()) < TOLERANCE[dtype]
    gated = poisoned(num_rows, outputs // 2, dtype=dtype)
    skinny_linear(between, following, gated, eps=EPS, is_gated=True, tile=tile)
    gate, up = product.chunk(2, -1)
    assert error(gated, functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_row_of_skinny_linear_has_the_same_bits_alone_and_in_company(
    tile: Tile, is_gated: bool
) -> None:
    x, weight, norm = random(8, 300), random(64, 300), random(300, seed=1)
    outs = [poisoned(num_rows, 32 if is_gated else 64) for num_rows in (8, 1)]
    for out in outs:
        rows = scaled(x[: len(out)], norm)
        skinny_linear(rows, weight, out, eps=EPS, is_gated=is_gated, tile=tile)
    assert torch.equal(outs[0][:1], outs[1])


SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096), (4096, 1024), (1024, 3072)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_divides_the_columns_alike_for_every_number_of_rows(
    shape: tuple[int, int], itemsize: int
) -> None:
    tiles = [tile_of(*shape, num_rows, itemsize) for num_rows in range(1, MAX_ROWS + 1)]
    assert len({(tile.outputs, tile.chunk, tile.warps) for tile in tiles}) == 1


def test_tiles_occupy_the_multiprocessors_of_an_h200_evenly() -> None:
    """Of Llama-3.1-8B: QKV in 384 programs, which are 3 for each, and the output in 128."""
    heights = [tile_of(*shape, 1, 2).outputs for shape in SHAPES[:4]]
    assert heights == [16, 32, 32, 32]
    # Where even narrow tiles leave some idle, more warps wait for memory.
    assert tile_of(1024, 3072, 1, 2).warps == 4


class Tables:
    """Three sequences of random ids and blocks, in slots 4, 0 and 2 of five; slot 5 pads."""

    block_size = 4

    def __init__(self) -> None:
        def of(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        self.token_table = torch.randint(0, 1000, (6, 33), dtype=torch.int32).to(DEVICE)
        self.block_tables = torch.randperm(48).view(6, 8).to(DEVICE, torch.int32)
        self.lengths = of([7, 0, 16, 0, 31, 0])
        self.slots = of([4, 0, 2])

    def expected(self, slot: int, position: int) -> tuple[int, int, int]:
        """Token id, position, and the pool slot of its key and value."""
        block = int(self.block_tables[slot, position // self.block_size])
        kv_slot = block * self.block_size + position % self.block_size
        return int(self.token_table[slot, position]), position, kv_slot

    def buffers(self, num_tokens: int, num_rows: int) -> list[torch.Tensor]:
        def of(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((size,), -1, dtype=dtype, device=DEVICE)

        return [of(num_tokens), of(num_tokens), of(num_tokens, torch.int64), of(num_rows)]


def test_a_decode_reads_the_first_token_not_yet_computed() -> None:
    tables = Tables()
    token_ids, positions, kv_slots, context_lens = tables.buffers(3, 3)
    gather_decodes(
        tables.slots, tables.lengths, tables.token_table, tables.block_tables[None],
        tables.block_size, token_ids, positions, kv_slots[None], context_lens,
    )  # fmt: skip
    found = zip(token_ids.tolist(), positions.tolist(), kv_slots.tolist(), strict=True)
    assert list(found) == [tables.expected(4, 31), tables.expected(0, 7), tables.expected(2, 16)]
    assert context_lens.tolist() == [32, 8, 17]


def test_decodes_get_a_place_in_each_group_and_count_in_their_slots_lengths() -> None:
    tables = Tables()
    groups = torch.stack([tables.block_tables, tables.block_tables.flip(0)])
    slots = torch.tensor([4, 5, 0, 5], dtype=torch.int32, device=DEVICE)  # 5 pads
    token_ids, positions, _, context_lens = tables.buffers(4, 4)
    kv_slots = torch.full((2, 6), -1, device=DEVICE)  # for more rows than there are
    gather_decodes(
        slots, tables.lengths, tables.token_table, groups, tables.block_size,
        token_ids, positions, kv_slots, context_lens,
    )  # fmt: skip
    rows = [(4, 31), (5, 0), (0, 7), (5, 0)]
    for blocks, found in zip(groups, kv_slots.tolist(), strict=True):
        expected = [int(blocks[slot, at // 4]) * 4 + at % 4 for slot, at in rows]
        assert found == [*expected, -1, -1]
    assert context_lens.tolist() == [32, 1, 8, 1]
    assert tables.lengths.tolist() == [8, 0, 16, 0, 32, 0]


def test_a_chunk_reads_its_tokens_in_order() -> None:
    tables = Tables()
    slots = torch.tensor([4, 0, 2, 5], dtype=torch.int32, device=DEVICE)  # 5 pads
    starts = torch.tensor([0, 5, 12, 0], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 9, 10, 15, 15], dtype=torch.int32, device=DEVICE)
    token_ids, positions, kv_slots, context_lens = tables.buffers(15, 4)
    gather_chunks(
        slots, starts, offsets, tables.lengths, tables.token_table, tables.block_tables[None],
        tables.block_size, 9, token_ids, positions, kv_slots[None], context_lens,
    )  # fmt: skip
    expected = [tables.expected(4, p) for p in range(9)] + [tables.expected(0, 5)]
    expected += [tables.expected(2, p) for p in range(12, 17)]
    found = zip(token_ids.tolist(), positions.tolist(), kv_slots.tolist(), strict=True)
    assert list(found) == expected
    assert context_lens.tolist() == [9, 6, 17, 0]
    assert tables.lengths.tolist() == [6, 0, 17, 0, 9, 0]


def test_a_decode_beside_chunks_starts_where_the_device_says() -> None:
    tables = Tables()
    groups = torch.stack([tables.block_tables, tables.block_tables.flip(0)])
    slots = torch.tensor([4, 0, 2, 5], dtype=torch.int32, device=DEVICE)  # 5 pads
    starts = torch.tensor([-1, -1, 12, 0], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 1, 2, 7, 7], dtype=torch.int32, device=DEVICE)
    token_ids, positions, _, context_lens = tables.buffers(7, 4)
    kv_slots, decode_lens = torch.full((2, 9), -1, device=DEVICE), torch.empty_like(context_lens)
    gather_chunks(
        slots, starts, offsets, tables.lengths, tables.token_table, groups, tables.block_size, 7,
        token_ids, positions, kv_slots, context_lens, decode_lens,
    )  # fmt: skip
    at = [(4, 31), (0, 7), *((2, p) for p in range(12, 17))]
    assert positions.tolist() == [position for _, position in at]
    assert token_ids.tolist() == [tables.expected(*one)[0] for one in at]
    for blocks, found in zip(groups, kv_slots.tolist(), strict=True):
        assert found == [*(int(blocks[slot, p // 4]) * 4 + p % 4 for slot, p in at), -1, -1]
    assert context_lens.tolist() == [32, 8, 17, 0] and decode_lens.tolist() == [32, 8, 0, 0]
    assert tables.lengths.tolist() == [8, 0, 17, 0, 32, 0]


def _drafted(rows: list[tuple[int, list[int]]]) -> DraftedRows:
    """Of these slots and drafts, then rows of no token."""
    counts = [1 + len(drafts) for _, drafts in rows]
    absent = [0] * (sum(counts) - len(rows))
    firsts = [0, *torch.tensor(counts).cumsum(0).tolist()[:-1]]
    columns = (
        [*(slot for slot, _ in rows), *absent],
        [*firsts, *absent],
        [*counts, *absent],
        [each for _, drafts in rows for each in (-7, *drafts)],
    )
    return DraftedRows(*torch.tensor(columns, dtype=torch.int32, device=DEVICE))


def test_a_decodes_drafts_come_after_its_last_known_token() -> None:
    tables = Tables()
    groups = torch.stack([tables.block_tables, tables.block_tables.flip(0)])
    rows = _drafted([(4, []), (0, [101, 102, 103]), (2, [201]), (5, [])])  # 5 pads
    before = tables.lengths.tolist()
    buffers = torch.full((5, 8), -1, dtype=torch.int32, device=DEVICE)
    tokens, context_lens = DraftedTokens(*buffers[:4]), buffers[4]
    kv_slots, turn = torch.full((2, 10), -1, device=DEVICE), buffers.new_ones(1)
    gather_drafted(
        rows, 4, tables.lengths, tables.token_table, groups, tables.block_size, tokens, kv_slots,
        context_lens, turn, 2,
    )  # fmt: skip
    at = [(4, 31), (0, 7), (0, 8), (0, 9), (0, 10), (2, 16), (2, 17), (5, 0)]
    known = [tables.expected(*at[index])[0] for index in (0, 1, 5, 7)]
    expected = [known[0], known[1], 101, 102, 103, known[2], 201, known[3]]
    assert tokens.token_ids.tolist() == expected
    assert tokens.positions.tolist() == [position for _, position in at]
    assert tokens.slots.tolist() == [slot for slot, _ in at]
    assert tokens.next_positions.tolist() == [position + 1 for _, position in at]
    for blocks, found in zip(groups, kv_slots.tolist(), strict=True):
        assert found == [*(int(blocks[slot, p // 4]) * 4 + p % 4 for slot, p in at), -1, -1]
    assert context_lens.tolist() == [32, 11, 18, 1, 0, 0, 0, 0]
    assert tables.lengths.tolist() == before and turn.tolist() == [0]


@pytest.mark.parametrize("kind", ["decodes", "chunks", "drafts"])
def test_tokens_after_images_are_rotated_by_less_than_their_positions(kind: str) -> None:
    tables, at = Tables(), [(4, 31), (0, 7), (2, 16)]
    shifts = torch.tensor([3, 9, 0, 9, 17, 9], dtype=torch.int32, device=DEVICE)
    read = tables.lengths, tables.token_table, tables.block_tables[None], tables.block_size
    token_ids, positions, kv_slots, context_lens = tables.buffers(6, 6)
    rotary = RotaryPositions(shifts, torch.full_like(positions, -1))
    written = kv_slots[None], context_lens
    if kind == "decodes":
        gather_decodes(tables.slots, *read, token_ids, positions, *written, rotary=rotary)
    elif kind == "chunks":
        starts, offsets = (
            torch.tensor(each, dtype=torch.int32, device=DEVICE)
            for each in ([-1, -1, 12], [0, 1, 2, 6])
        )
        gather_chunks(
            tables.slots, starts, offsets, *read, 4, token_ids, positions, *written, rotary=rotary
        )
        at = [(4, 31), (0, 7), *((2, p) for p in range(12, 16))]
    else:
        rows = _drafted([(4, []), (0, [101, 102, 103]), (2, [])])
        tokens = DraftedTokens(token_ids, positions, *tables.buffers(6, 6)[:2])
        gather_drafted(rows, 4, *read, tokens, *written, rotary=rotary)
        at = [(4, 31), *((0, p) for p in range(7, 11)), (2, 16)]
    expected = [position - int(shifts[slot]) for slot, position in at]
    assert rotary.of_tokens.tolist() == [*expected, -1, -1, -1][:6]


# The drafts of a row, the ids that are sampled after its tokens, and those that it gets.
ACCEPTED = [
    ([], [9], [9]),
    ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]),
    ([5, 6, 7], [5, 6, 1, 8], [5, 6, 1]),
    ([5, 6, 7], [1, 6, 7, 8], [1]),
    ([5, 6], [5, -1, 8], [5]),  # what is invalid is left to the next step
    ([5, 6], [-1, 6, 8], [-1]),
    ([5], [5, -1], [5]),
]


def test_a_row_gets_its_ids_up_to_the_first_that_is_not_the_draft() -> None:
    """Of more rows than a program has; a second call takes the place of the first."""
    cases = [ACCEPTED[number % len(ACCEPTED)] for number in range(20)]
    rows = _drafted([(slot, drafts) for slot, (drafts, _, _) in enumerate(cases)])
    num_tokens, num_slots = len(rows.slots), len(cases)
    ids = torch.tensor([each for _, sampled, _ in cases for each in sampled], device=DEVICE)
    starts = torch.arange(3, 3 + num_slots, dtype=torch.int32, device=DEVICE)
    positions = torch.full_like(rows.slots, -1)
    positions[rows.firsts[:num_slots].long()] = starts
    table = torch.full((num_slots + 1, 40), -5, dtype=torch.int32, device=DEVICE)
    lengths = torch.cat((starts, starts.new_zeros(1)))
    accepted = torch.full((2, num_tokens + 3), -9, dtype=torch.int32, device=DEVICE)
    host = torch.full((2, 2 * (num_tokens + 3)), -9, dtype=torch.int32, pin_memory=ON_GPU)
    turn = torch.ones(1, dtype=torch.int32, device=DEVICE)
    wrong = torch.full_like(ids, 5)
    for sampled in (wrong, ids):
        accept_drafts(
            sampled, rows, 4, positions, lengths, table, accepted[:, :num_tokens], host, turn
        )
    if ON_GPU:
        torch.cuda.synchronize()
    nums = [len(kept) for _, _, kept in cases]
    assert lengths.tolist() == [3 + row + num for row, num in enumerate(nums)] + [0]
    for row, (_, _, kept) in enumerate(cases):
        after = table[row, 4 + row : 4 + row + len(kept)].tolist()
        assert after == [max(0, each) for each in kept]
        assert (table[row, : 4 + row] == -5).all()
    for found in (accepted.cpu(), host[1].view(2, -1)):
        assert found[0, :num_slots].tolist() == nums
        assert found[1, :num_tokens].tolist() == ids.tolist()
        assert (found[:, num_tokens:] == -9).all()
    assert (host[0] == -9).all()


def test_a_row_that_pads_changes_no_length() -> None:
    tables = Tables()
    rows = _drafted([(4, [8]), (5, [])])  # 5 pads
    before = tables.lengths.tolist()
    ids, positions = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for values in ([8, 3, 111], [20, 21, 0])
    )
    accepted = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    accept_drafts(ids, rows, 2, positions, tables.lengths, tables.token_table, accepted)
    assert tables.lengths.tolist() == [*before[:4], 22, 0]
    assert tables.token_table[4, 21:23].tolist() == [8, 3]


def test_a_step_writes_its_ids_back_to_its_slots() -> None:
    tables = Tables()
    slots = torch.tensor([4, 0, 5], dtype=torch.int32, device=DEVICE)
    context_lens = torch.tensor([32, 8, 1], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([111, 222, 333], device=DEVICE)
    store_sampled(ids, slots, context_lens, tables.token_table)
    assert [int(tables.token_table[s, n]) for s, n in ((4, 32), (0, 8), (5, 1))] == [111, 222, 333]


def test_updates_reach_their_entries_of_the_block_tables() -> None:
    tables = Tables()
    expected = tables.block_tables.clone()
    expected[4, 7], expected[0, 2] = 100, 101
    updates = torch.tensor([(4, 7, 100), (0, 2, 101)], dtype=torch.int32, device=DEVICE)
    update_table(updates, tables.block_tables)
    assert tables.block_tables.tolist() == expected.tolist()
