"""The Triton attention kernels agree with the reference, for rows of different lengths."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.kernels.attention.paged.decode import PagedDecode
from penstock.engine.kernels.attention.paged.prefill import PagedPrefill
from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.kernels.rope import rotate_and_store
from penstock.engine.memory.pool.kv_codes import LIMITS, Codes, KVPages, decode
from penstock.engine.step.device_step import DecodeQueries, DraftSizes, Rotation
from penstock.engine.step.model_input import ModelInput
from tests.support.kernels import DEVICE, DTYPES, ON_GPU, TOLERANCE, coded, error, poisoned, random
from tests.support.reference_attention import reference_attention

SHAPES = [
    AttentionShape(num_heads=4, num_kv_heads=4, head_dim=16, block_size=16),
    AttentionShape(num_heads=6, num_kv_heads=2, head_dim=24, block_size=64),
    AttentionShape(num_heads=7, num_kv_heads=1, head_dim=8, block_size=128),
]
# Of latents: heads in one tile, in two, and one that is alone.
LATENTS = [
    AttentionShape(num_heads=6, num_kv_heads=1, head_dim=56, block_size=16, latent_dim=40),
    AttentionShape(num_heads=96, num_kv_heads=1, head_dim=24, block_size=64, latent_dim=16),
    AttentionShape(num_heads=1, num_kv_heads=1, head_dim=36, block_size=128, latent_dim=32),
]

# On a GPU all are. In the interpreter each takes seconds.
SLOW = () if ON_GPU else (pytest.mark.slow,)
# Without a norm in 2 types; with one; and keys and values in codes.
QUICK = (0, 1, 3, 8)


class Rows:
    """Rows with these lengths, in shuffled blocks, whose last `counts` tokens are queries."""

    def __init__(
        self,
        shape: AttentionShape,
        lengths: list[int],
        counts: list[int],
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        size, num_rows = shape.block_size, len(lengths)
        num_blocks = [-(-length // size) for length in lengths]
        pool = (sum(num_blocks) + 3, size, shape.num_kv_heads, shape.head_dim)
        keys, values = (random(*pool, dtype=dtype, seed=seed) for seed in (1, 2))
        # Blocks of no row, which must not be read.
        shuffled = torch.randperm(pool[0], generator=torch.Generator().manual_seed(0))
        for unused in shuffled[sum(num_blocks) :].tolist():
            keys[unused] = values[unused] = float("nan")
        self.keys: KVPages = coded(keys, kv_dtype) if kv_dtype else keys
        self.values: KVPages = coded(values, kv_dtype) if kv_dtype else values
        if shape.latent_dim:
            self.values = _first(self.keys, shape.latent_dim)
        self.tables = torch.full((num_rows + 2, max(num_blocks)), pool[0] - 1, dtype=torch.int32)
        slots = torch.randperm(num_rows + 2, generator=torch.Generator().manual_seed(1))[:num_rows]
        owned = torch.split(shuffled[: sum(num_blocks)], num_blocks)
        for slot, blocks in zip(slots, owned, strict=True):
            self.tables[slot, : len(blocks)] = blocks.to(torch.int32)
        offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
        self.query = random(offsets[-1], shape.num_heads, shape.head_dim, dtype=dtype)
        positions = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
        step = ModelInput(
            token_ids=torch.empty(0),
            positions=torch.cat(positions),
            kv_slots=torch.empty(0),
            block_tables=self.tables[slots],
            query_starts=offsets,
            context_lens=lengths,
            num_decodes=0,
            sample_rows=torch.empty(0),
        )
        self._step = step
        self.tables, self.slots = self.tables.to(DEVICE), slots.to(DEVICE, torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.offsets = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        self.out = poisoned(*self.query.shape[:2], shape.value_dim, dtype=dtype)

    def layer(self, window: int | None, sinks: Tensor | None = None) -> LayerContext:
        return LayerContext(self.keys, self.values, window, sinks)

    def error(self, window: int | None, sinks: Tensor | None = None) -> float:
        """Of the attention to what is stored: how exactly is not its concern."""
        pool = _plain(self.keys), _plain(self.values)
        query = self.query.cpu().float()
        sinks = None if sinks is None else sinks.cpu()
        return error(self.out.cpu(), reference_attention(query, *pool, self._step, window, sinks))


def _plain(pages: KVPages) -> Tensor:
    if isinstance(pages, Tensor):
        return pages.cpu().float()
    return decode(pages.codes, pages.scales.transpose(1, 2)).cpu()


def _first(pages: KVPages, dims: int) -> KVPages:
    if isinstance(pages, Tensor):
        return pages[..., :dims]
    return Codes(pages.codes[..., :dims], pages.scales)


def _copy(pages: KVPages) -> KVPages:
    if isinstance(pages, Tensor):
        return pages.clone()
    return Codes(pages.codes.clone(), pages.scales.clone())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", [*SHAPES, *LATENTS])
def test_decode_agrees_with_the_reference(
    shape: AttentionShape, window: int | None, dtype: torch.dtype
) -> None:
    lengths = [1, 5, 64, 65, 1100, 300]
    rows = Rows(shape, lengths, [1] * len(lengths), dtype)
    decode = PagedDecode(shape, max_rows=8, num_sms=2, device=DEVICE)
    decode.plan(rows.lengths, rows.slots, window)
    decode(rows.query, rows.layer(window), rows.tables, rows.out)
    assert rows.error(window) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 100])
def test_sinks_take_their_share_once_whatever_pieces_a_row_has(window: int | None) -> None:
    shape, dtype, lengths = SHAPES[0], torch.float32, [1, 65, 1100]
    sinks = 3 * random(shape.num_heads)
    rows = Rows(shape, lengths, [1] * len(lengths), dtype)
    decode = PagedDecode(shape, max_rows=8, num_sms=2, device=DEVICE)
    decode.plan(rows.lengths, rows.slots, window)
    decode(rows.query, rows.layer(window, sinks), rows.tables, rows.out)
    assert rows.error(window, sinks) < TOLERANCE[dtype]
    rows = Rows(shape, [1, 65, 170], [1, 40, 60], dtype)
    prefill = PagedPrefill(shape, max_rows=8, max_tokens=300, num_sms=1, device=DEVICE, dtype=dtype)
    prefill.plan(rows.offsets)
    prefill(
        rows.query, rows.layer(window, sinks), rows.tables, rows.slots, rows.offsets, rows.lengths,
        rows.out,
    )  # fmt: skip
    assert rows.error(window, sinks) < TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", LIMITS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    # The interpreter is slow; together these have blocks larger and smaller than a tile.
    list(
        product([*SHAPES, *LATENTS], DTYPES)
        if ON_GPU
        else zip([*SHAPES[:2], *LATENTS[:2]], DTYPES * 2, strict=True)
    ),
)
def test_decode_and_prefill_read_codes_as_the_reference_reads_their_values(
    shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    lengths, window = [1, 65, 170], 120
    rows = Rows(shape, lengths, [1] * len(lengths), dtype, kv_dtype)
    decode = PagedDecode(shape, max_rows=8, num_sms=2, device=DEVICE)
    decode.plan(rows.lengths, rows.slots, window)
    decode(rows.query, rows.layer(window), rows.tables, rows.out)
    assert rows.error(window) < TOLERANCE[dtype]
    rows = Rows(shape, lengths, [1, 40, 60], dtype, kv_dtype)
    prefill = PagedPrefill(shape, max_rows=8, max_tokens=300, num_sms=1, device=DEVICE, dtype=dtype)
    prefill.plan(rows.offsets)
    prefill(
        rows.query, rows.layer(window), rows.tables, rows.slots, rows.offsets, rows.lengths,
        rows.out,
    )  # fmt: skip
    assert rows.error(window) < TOLERANCE[dtype]


def _queries(counts: list[int], most: int) -> DecodeQueries:
    """Of tokens one after the other, in as many rows as there are tokens."""
    absent = [0] * (sum(counts) - len(counts))
    firsts = [0, *torch.tensor(counts).cumsum(0).tolist()[:-1], *absent]
    columns = torch.tensor([firsts, [*counts, *absent]], dtype=torch.int32, device=DEVICE)
    return DecodeQueries(columns[0], columns[1], most)


def _decode_queries(
    shape: AttentionShape, rows: Rows, counts: list[int], most: int, layer: LayerContext
) -> PagedDecode:
    decode = PagedDecode(
        shape, max_rows=4, num_sms=2, device=DEVICE, drafted=DraftSizes((32,), most)
    )
    zeros = torch.zeros(sum(counts) - len(counts), dtype=torch.int32, device=DEVICE)
    lengths, slots = torch.cat((rows.lengths, zeros)), torch.cat((rows.slots, zeros))
    decode.plan(lengths, slots, layer.window, _queries(counts, most))
    decode(rows.query, layer, rows.tables, rows.out, most_queries=most)
    return decode


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(
    ("shape", "most"),
    [(SHAPES[0], 2), (SHAPES[1], 4), (SHAPES[2], 8), (SHAPES[1], 8), (LATENTS[0], 4)],
)
def test_a_row_of_several_queries_agrees_with_the_reference(
    shape: AttentionShape, most: int, window: int | None, dtype: torch.dtype
) -> None:
    """Whose tokens are in one piece or in two, at the ends of tiles and of blocks."""
    lengths = [most, 64, 66, 129, 1100, 1]
    counts = [most, 2, min(most, 4), most, 1, 1]
    rows = Rows(shape, lengths, counts, dtype)
    layer = rows.layer(window, 3 * random(shape.num_heads) if most == 4 else None)
    decode = _decode_queries(shape, rows, counts, most, layer)
    assert rows.error(window, layer.sinks) < TOLERANCE[dtype]
    first = decode.work_list(window).first_item[: len(counts) + 1].tolist()
    assert window is not None or max(b - a for a, b in pairwise(first)) > 2


@pytest.mark.parametrize("kv_dtype", LIMITS)
def test_several_queries_read_codes_too(kv_dtype: torch.dtype) -> None:
    counts = [3, 4, 1]
    rows = Rows(SHAPES[1], [65, 170, 5], counts, torch.float32, kv_dtype)
    _decode_queries(SHAPES[1], rows, counts, 4, rows.layer(120))
    assert rows.error(120) < TOLERANCE[torch.float32]


def test_a_query_beside_others_gives_what_it_gives_alone() -> None:
    """By the same pieces, but for the rounding of products of other rows."""
    shape, lengths, counts = SHAPES[1], [600, 70], [4, 3]
    rows = Rows(shape, lengths, counts, torch.float32)
    _decode_queries(shape, rows, counts, 4, rows.layer(None))
    alone = PagedDecode(shape, max_rows=4, num_sms=2, device=DEVICE)
    out = torch.empty_like(rows.out[:2])
    alone.plan(rows.lengths, rows.slots, None)
    alone(rows.query[[3, 6]], rows.layer(None), rows.tables, out)
    assert error(rows.out[[3, 6]], out) < TOLERANCE[torch.float32] / 10


def test_rows_of_length_0_have_no_work_and_change_nothing() -> None:
    shape, dtype = SHAPES[0], torch.float32
    rows = Rows(shape, [600, 70], [1, 1], dtype)
    decode = PagedDecode(shape, max_rows=8, num_sms=2, device=DEVICE)
    zeros = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    lengths, slots = torch.cat((rows.lengths, zeros)), torch.cat((rows.slots, zeros))
    query = torch.cat((rows.query, poisoned(3, *rows.query.shape[1:])))
    out = torch.cat((rows.out, torch.zeros_like(query[2:])))
    decode.plan(lengths, slots, None)
    decode(query, rows.layer(None), rows.tables, out)
    rows.out = out[:2]
    assert rows.error(None) < TOLERANCE[dtype]
    assert not out[2:].any()


@pytest.mark.parametrize(
    ("shape", "has_norm", "dtype", "kv_dtype"),
    [
        # The interpreter sums the squares of fewer than eight numbers in another order.
        *(
            pytest.param(*case, marks=() if number in QUICK else SLOW)
            for number, case in enumerate(
                [
                    *product(SHAPES[:2], [False, True], DTYPES, [None]),
                    *product(SHAPES[1:2], [True], DTYPES[-1:], LIMITS),
                ]
            )
        ),
    ],
)
def test_a_decode_that_rotates_gives_the_bits_of_a_rotation_and_a_decode(
    shape: AttentionShape, has_norm: bool, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    check_bits(shape, has_norm, dtype, kv_dtype)


@pytest.mark.parametrize("kv_parts", [0, 1, pytest.param(2, marks=SLOW)])
def test_so_does_one_of_values_that_are_normed_or_of_another_layers_keys(kv_parts: int) -> None:
    check_bits(SHAPES[0], True, torch.float32, None, kv_parts=kv_parts, norms_values=True)


def check_bits(
    shape: AttentionShape,
    has_norm: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    *,
    kv_parts: int = 2,
    norms_values: bool = False,
) -> None:
    lengths, dim = [1, 64, 65, 700], shape.head_dim
    rows = Rows(shape, lengths, [1] * len(lengths), dtype, kv_dtype)
    heads = shape.num_heads + kv_parts * shape.num_kv_heads
    projected = random(len(lengths), heads * dim, dtype=dtype)
    angles = random(1000, dim // 2, seed=3)
    rotation = Rotation(
        cos=angles.cos(),
        sin=angles.sin(),
        query_norm=random(dim, dtype=dtype, seed=1) if has_norm else None,
        key_norm=random(dim, dtype=dtype, seed=2) if has_norm else None,
        eps=1e-5,
        kv_parts=kv_parts,
        norms_values=norms_values,
    )
    positions = rows.lengths - 1
    blocks = rows.tables[rows.slots.long()].gather(1, (positions // shape.block_size)[:, None])
    kv_slots = blocks[:, 0].long() * shape.block_size + positions % shape.block_size
    pool = _copy(rows.keys), _copy(rows.values)
    decode = PagedDecode(shape, max_rows=8, num_sms=2, device=DEVICE)
    decode.plan(rows.lengths, rows.slots, None)
    rotate_and_store(projected, rotation, positions, kv_slots, *pool, rows.query)
    decode(rows.query, LayerContext(*pool, None), rows.tables, rows.out)
    out = poisoned(*rows.out.shape, dtype=dtype)
    decode(projected, rows.layer(None), rows.tables, out, rotation, kv_slots)
    stored = [_plain(pages) for pages in (rows.keys, rows.values, *pool)]
    for ours, theirs in ((out, rows.out), (stored[0], stored[2]), (stored[1], stored[3])):
        # A GPU's compiler may multiply and add in one instruction here and in two there.
        close = 10 * TOLERANCE[dtype] if ON_GPU else 0
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close, equal_nan=True)


def test_a_decode_that_runs_again_gives_the_same_bits() -> None:
    """As in a graph: what counts a row's pieces is as it was before."""
    rows = Rows(SHAPES[0], [900, 3, 400], [1, 1, 1], torch.float32)
    decode = PagedDecode(SHAPES[0], max_rows=8, num_sms=2, device=DEVICE)
    decode.plan(rows.lengths, rows.slots, None)
    outs = [torch.empty_like(rows.out) for _ in range(2)]
    for out in outs:
        decode(rows.query, rows.layer(None), rows.tables, out)
    assert torch.equal(*outs)


def _pieces(lengths: list[int], num_sms: int, kv_heads: int) -> list[int]:
    """How long the first piece of each row is."""
    shape = AttentionShape(num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=16, block_size=16)
    decode = PagedDecode(shape, max_rows=256, num_sms=num_sms, device=DEVICE)
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    decode.plan(lens, torch.zeros_like(lens), None)
    work = decode.work_list(None)
    first = work.items[work.first_item[: len(lengths)].long()]
    return (first[:, 2] - first[:, 1]).tolist()


@pytest.mark.parametrize(
    ("batch", "context", "piece"),
    [
        (1, 512, 64),  # 8 pieces of 8 heads, on 132 multiprocessors
        (1, 8192, 192),  # 43 pieces of 8 heads: as many as run at once
        (16, 1024, 384),
        (32, 8192, 2048),
        (256, 1024, 1024),
    ],
)
def test_few_tokens_make_short_pieces_that_run_at_once(
    batch: int, context: int, piece: int
) -> None:
    assert set(_pieces([context] * batch, 132, 8)) == {piece}


@pytest.mark.parametrize(
    "lengths", [[1], [256], [257], [4096], [100, 4000, 3], [700] * 9, [63, 64, 65, 511, 512, 513]]
)
@pytest.mark.parametrize("window", [None, 70])
def test_the_pieces_of_a_plan_cover_each_row_once(lengths: list[int], window: int | None) -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
    decode = PagedDecode(shape, max_rows=9, num_sms=4, device=DEVICE)
    slots = torch.arange(10, 10 + len(lengths), dtype=torch.int32, device=DEVICE)
    decode.plan(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), slots, window)
    work = decode.work_list(window)
    first = work.first_item[: len(lengths) + 1].tolist()
    items = work.items[: first[-1]].tolist()
    assert len(items) <= len(work.items)
    for row, length in enumerate(lengths):
        pieces = items[first[row] : first[row + 1]]
        assert [piece[0] for piece in pieces] == [row] * len(pieces)
        seen_from = max(0, length - window) // 64 * 64 if window else 0
        assert [piece[1] for piece in pieces] == [seen_from, *(piece[2] for piece in pieces[:-1])]
        assert pieces[-1][2] == length
        assert {tuple(piece[3:7]) for piece in pieces} == {
            (len(pieces), first[row], 10 + row, length)
        }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    "shape", [SHAPES[0], pytest.param(SHAPES[1], marks=SLOW), SHAPES[2], *LATENTS]
)
def test_prefill_agrees_with_the_reference(
    shape: AttentionShape, window: int | None, dtype: torch.dtype
) -> None:
    lengths, counts = [70, 5, 200, 1], [70, 2, 133, 1]
    rows = Rows(shape, lengths, counts, dtype)
    prefill = PagedPrefill(shape, max_rows=8, max_tokens=300, num_sms=1, device=DEVICE, dtype=dtype)
    prefill.plan(rows.offsets)
    prefill(
        rows.query, rows.layer(window), rows.tables, rows.slots, rows.offsets, rows.lengths,
        rows.out,
    )  # fmt: skip
    assert rows.error(window) < TOLERANCE[dtype]
