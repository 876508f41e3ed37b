"""Keys and values in 8 bits: how near they are, and where they lie in the pool."""

import pytest
import torch

from penstock.engine.memory.pool.kv_codes import LIMITS, Codes, decode, encode, gather, store
from penstock.engine.memory.pool.kv_pool import KVPool
from penstock.engine.memory.pool.kv_shape import KVShape

CPU = torch.device("cpu")
SHAPE = KVShape.of(num_layers=2, num_kv_heads=3, head_dim=8)
# Of a number, by the largest of its vector: half a step of 1/127; half of the last of 4 bits, near
# the largest.
ERRORS = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_number_is_off_by_no_more_than_half_a_step_of_its_vectors_largest(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.arange(-12, 13).unsqueeze(-1)
    x = torch.randn(25, 64, generator=generator) * sizes
    codes, scales = encode(x, dtype)
    assert codes.dtype is dtype and scales.dtype is torch.float32
    peak = x.abs().amax(-1, keepdim=True)
    assert bool(((decode(codes, scales) - x).abs() <= 1.01 * ERRORS[dtype] * peak).all())
    # The largest number itself keeps its value, but for float32's rounding.
    found = decode(codes, scales).abs().amax(-1, keepdim=True)
    torch.testing.assert_close(found, peak)


@pytest.mark.parametrize("dtype", LIMITS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 8)
    x[1, 3] = 1e-35
    x[2, 0], x[3, 7] = float("inf"), float("nan")
    found = decode(*encode(x, dtype))
    assert not found[:2].any()
    assert bool(found[2:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, *LIMITS])
def test_what_is_stored_is_gathered_and_copied_with_its_scale(dtype: torch.dtype) -> None:
    pool = KVPool(SHAPE, 5, 4, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(20, generator=generator)
    keys, values = torch.randn(2, 20, 3, 8, generator=generator)
    for pages, x in zip(pool.layer(1), (keys, values), strict=True):
        store(pages, slots, x)
    pool.copy([(0, 3), (4, 1)])
    table = torch.tensor([[0, 4, 2, 3, 1]])
    for pages, x in zip(pool.layer(1), (keys, values), strict=True):
        stored = torch.empty_like(x)
        stored[slots] = x if dtype is torch.float32 else decode(*encode(x, dtype))
        expected = stored.view(5, 4, 3, 8)[[0, 4, 2, 0, 4]].flatten(0, 1).transpose(0, 1)
        assert torch.equal(gather(pages, table, torch.float32)[0], expected)
    for untouched in pool.layer(0):
        plain = untouched if isinstance(untouched, torch.Tensor) else untouched.scales
        assert not plain.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *LIMITS])
def test_the_bytes_of_a_token_are_those_of_its_memory(dtype: torch.dtype) -> None:
    pool = KVPool(SHAPE, 5, 4, dtype, CPU)
    num_bytes = sum(part.nbytes for pair in pool.pairs() for part in pair)
    assert 5 * 4 * SHAPE.bytes_per_token(dtype.itemsize) == num_bytes
    assert isinstance(pool.layer(0)[0], Codes) is (dtype in LIMITS)
