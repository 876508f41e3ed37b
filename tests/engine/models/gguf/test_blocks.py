"""The numbers of every type are those of llama.cpp's own package, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from penstock.engine.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES, TensorType
from penstock.engine.models.gguf import blocks
from penstock.engine.models.layers.grouped import GroupedLinear

TYPES = pytest.mark.parametrize(
    ("number", "kind"), TENSOR_TYPES.items(), ids=[kind.name for kind in TENSOR_TYPES.values()]
)


def random_rows(kind: TensorType) -> np.ndarray:
    """Five rows of three blocks, of any bytes: NaN and infinities among the scales."""
    random = np.random.default_rng(kind.block_bytes)
    return random.integers(0, 256, (5, 3 * 32 * kind.block_bytes), dtype=np.uint8)


@TYPES
def test_types_have_the_names_and_sizes_of_ggml(number: int, kind: TensorType) -> None:
    theirs = gguf.GGMLQuantizationType(number)
    assert kind.name == theirs.name
    assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]


def test_every_type_of_ggml_is_known_by_name() -> None:
    names = {each.value: each.name for each in gguf.GGMLQuantizationType}
    known = {number: kind.name for number, kind in TENSOR_TYPES.items()} | OTHER_TYPES
    assert names.items() <= known.items()


@TYPES
def test_numbers_are_those_of_ggml(number: int, kind: TensorType) -> None:
    raw = random_rows(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))
    found = blocks.numbers(torch.from_numpy(raw), kind).float().numpy()
    assert found.shape == (5, 3 * 32 * kind.block_size)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "IQ4_NL"])
def test_codes_and_scales_stand_for_the_same_numbers(name: str) -> None:
    number, kind = next((n, each) for n, each in TENSOR_TYPES.items() if each.name == name)
    assert blocks.is_grouped(kind)
    raw = random_rows(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))
    codes, scales = blocks.grouped(torch.from_numpy(raw), kind)
    linear = GroupedLinear(
        codes,
        scales,
        None,
        group_size=32,
        in_features=expected.shape[1],
        levels=blocks.levels(kind),
    )
    np.testing.assert_array_equal(linear.weight().numpy(), expected)
