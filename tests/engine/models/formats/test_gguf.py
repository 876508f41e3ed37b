"""The numbers of every type are those of llama.cpp's own package, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from penstock.engine.files.gguf.header import OTHER_TYPES, TENSOR_TYPES, TensorType
from penstock.engine.models.formats.gguf import blocks

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


QUANTIZED = pytest.mark.parametrize(
    ("number", "kind"),
    [
        pytest.param(*each, id=each[1].name)
        for each in TENSOR_TYPES.items()
        if each[1].block_size > 1
    ],
)


@QUANTIZED
def test_codes_and_scales_stand_for_the_same_numbers(number: int, kind: TensorType) -> None:
    raw = random_rows(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))
    parts = [blocks.coded(torch.from_numpy(rows), kind) for rows in (raw[:2], raw[2:])]
    linear = parts[0].joined(parts, None)
    scheme = blocks.scheme(kind)
    assert scheme is not None and linear.weight_format == scheme.weight_format
    np.testing.assert_array_equal(linear.weight().numpy(), expected)
    np.testing.assert_array_equal(linear.rows(1, 4).weight().numpy(), expected[1:4])


@QUANTIZED
def test_codes_take_as_much_memory_as_foretold_and_little_more_than_in_the_file(
    number: int, kind: TensorType
) -> None:
    raw = torch.from_numpy(random_rows(kind))
    columns = raw.shape[1] // kind.block_bytes * kind.block_size
    linear = blocks.coded(raw, kind)
    scheme = blocks.scheme(kind)
    assert scheme is not None and linear.num_bytes == scheme.num_bytes(5, columns)
    assert raw.nbytes <= linear.num_bytes <= 1.03 * raw.nbytes


def test_numbers_without_blocks_have_no_codes() -> None:
    assert blocks.scheme(TENSOR_TYPES[1]) is None
