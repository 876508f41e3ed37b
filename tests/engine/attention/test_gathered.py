"""The batched attention in torch agrees with the reference."""

import pytest
import torch

from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.memory.pool.kv_codes import LIMITS, Codes, KVPages, decode, encode
from penstock.engine.step.model_input import build_model_input
from tests.support.reference_attention import reference_attention
from tests.support.tiny_models import make_batch

NUM_SLOTS, BLOCKS_EACH = 12, 8


@pytest.mark.parametrize("kv_dtype", [None, *LIMITS])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("block_size", [4, 16])
def test_gathered_attention_is_the_references(
    window: int | None,
    heads: int,
    kv_heads: int,
    block_size: int,
    has_sinks: bool,
    kv_dtype: torch.dtype | None,
) -> None:
    generator = torch.Generator().manual_seed(heads)
    num_blocks = NUM_SLOTS * BLOCKS_EACH
    keys, values = torch.randn(2, num_blocks, block_size, kv_heads, 16, generator=generator)
    tables = torch.randperm(num_blocks, generator=generator).view(NUM_SLOTS, BLOCKS_EACH)
    starts = (0, 1, 3, 4, 15, 16, 17, 31, 0, 0, 13, 20)
    counts = (1, 1, 1, 1, 1, 1, 1, 1, 1, 9, 7, 12)
    step = build_model_input(
        make_batch(tuple(range(NUM_SLOTS)), starts, counts, num_decodes=9),
        torch.zeros(NUM_SLOTS, 200, dtype=torch.int64),
        tables.to(torch.int32),
        block_size,
    )
    query = torch.randn(sum(counts), heads, 16, generator=generator)
    pages: list[KVPages] = [keys, values]
    if kv_dtype:
        coded = [encode(plain, kv_dtype) for plain in (keys, values)]
        pages = [Codes(codes, scales.transpose(1, 2)) for codes, scales in coded]
        keys, values = (decode(*each) for each in coded)
    sinks = 2 * torch.randn(heads, generator=generator) if has_sinks else None
    torch.testing.assert_close(
        gathered_attention(query, pages[0], pages[1], step, window, sinks),
        reference_attention(query, keys, values, step, window, sinks),
    )
