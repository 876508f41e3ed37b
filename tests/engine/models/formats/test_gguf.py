"""The numbers of every type are those of llama.cpp's own package, bit for bit; of two types that it
does not compute, those of ggml's C, written again in numpy."""

import gguf
import numpy as np
import pytest
import torch

from penstock.engine.files.gguf.header import OTHER_TYPES, TENSOR_TYPES, TensorType
from penstock.engine.models.formats.gguf import blocks, codebooks
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import StackedLinear, stacked
from tests.support.gguf_blocks import dequantized_blocks

TYPES = pytest.mark.parametrize(
    ("number", "kind"), TENSOR_TYPES.items(), ids=[kind.name for kind in TENSOR_TYPES.values()]
)


def random_rows(kind: TensorType) -> np.ndarray:
    """Five rows of 96 blocks, of any bytes: NaN and infinities among the scales."""
    random = np.random.default_rng(kind.block_bytes)
    rows = random.integers(0, 256, (5, 96 * kind.block_bytes), dtype=np.uint8)
    if kind.name == "NVFP4":  # scales have no sign
        rows.reshape(-1, kind.block_bytes)[:, :4] &= 0x7F
    return rows


def rows_in_halves(kind: TensorType) -> torch.Tensor:
    """The same with scales that float16 holds, as they are in practice."""
    rows = random_rows(kind)
    if kind.name == "MXFP4":
        exponents = rows.reshape(-1, kind.block_bytes)[:, 0]
        exponents[:] = exponents & 0x7F | 0x70
    return torch.from_numpy(rows)


@TYPES
def test_types_have_the_names_and_sizes_of_ggml(number: int, kind: TensorType) -> None:
    if number == 42:  # newer than the package
        assert (kind.name, kind.block_size, kind.block_bytes) == ("Q2_0", 64, 18)
        return
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
        expected = dequantized_blocks(raw, number)
    found = blocks.numbers(torch.from_numpy(raw), kind).float().numpy()
    assert found.shape == (5, 96 * kind.block_size)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


QUANTIZED = pytest.mark.parametrize(
    ("number", "kind"),
    [
        pytest.param(*each, id=each[1].name)
        for each in TENSOR_TYPES.items()
        if each[1].block_size > 1
    ],
)


def joined(raw: torch.Tensor, kind: TensorType) -> GroupedLinear:
    linear = stacked([blocks.coded(rows, kind) for rows in (raw[:2], raw[2:])], None)
    assert isinstance(linear, GroupedLinear)
    return linear


@QUANTIZED
def test_codes_and_scales_stand_for_the_same_numbers(number: int, kind: TensorType) -> None:
    raw = random_rows(kind)
    with np.errstate(all="ignore"):
        expected = dequantized_blocks(raw, number)
    linear = joined(torch.from_numpy(raw), kind)
    scheme = blocks.scheme(kind)
    assert scheme is not None and linear.weight_format == scheme.weight_format
    np.testing.assert_array_equal(linear.weight().numpy(), expected)
    np.testing.assert_array_equal(linear.rows(1, 4).weight().numpy(), expected[1:4])
    # As ranks divide it: in the middle of a block of 256, or of a group.
    parts = ((0, 384),), ((384, 1152),), ((1200, 1600),), ((128, 256), (640, 1024), (0, 128))
    for spans in parts:
        part = linear.columns(spans).weight().numpy()
        chosen = np.concatenate([expected[:, first:end] for first, end in spans], axis=1)
        np.testing.assert_array_equal(part, chosen)


@QUANTIZED
def test_codes_take_as_much_memory_as_foretold_and_little_more_than_in_the_file(
    number: int, kind: TensorType
) -> None:
    raw = rows_in_halves(kind)
    columns = raw.shape[1] // kind.block_bytes * kind.block_size
    linear = joined(raw, kind)
    scheme = blocks.scheme(kind)
    assert scheme is not None and linear.num_bytes == scheme.num_bytes(5, columns)
    # At least 4 bits, and of Q2_K 16 and more for scales and minima of each 16.
    assert raw.nbytes <= linear.num_bytes <= max(1.03 * raw.nbytes, 5 * columns * 5.2 / 8)


@QUANTIZED
def test_a_gpu_holds_the_same_numbers_where_its_kernels_read_such_codes(
    number: int, kind: TensorType
) -> None:
    linear, scheme = joined(rows_in_halves(kind), kind), blocks.scheme(kind)
    assert scheme is not None
    held, layout = linear.on_gpu(torch.device("cpu")), scheme.gpu_layout(linear.in_features)
    assert (held is None) is (layout is None) is (not scheme.is_grouped)
    if held is not None and layout is not None:
        found = torch.empty(5, linear.in_features)
        held.write_weight(found)
        np.testing.assert_array_equal(found.numpy(), linear.weight().numpy())
        assert held.num_bytes == layout.num_bytes(5)


def test_codebooks_are_those_of_ggml() -> None:
    for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"):
        theirs = getattr(gguf.quants, name)
        theirs.init_grid()
        codes = codebooks._codebook(name.replace("IQ1_S", "IQ1"))
        magnitudes = np.array(theirs.grid_map, np.float32)[codes.numpy()]
        np.testing.assert_array_equal(magnitudes, theirs.grid.reshape(theirs.grid_shape))


def test_a_layer_of_one_table_is_not_joined_with_one_of_another() -> None:
    kinds = {kind.name: kind for kind in TENSOR_TYPES.values()}
    layers = [
        blocks.coded(torch.from_numpy(random_rows(kinds[name])), kinds[name])
        for name in ("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S")
    ]
    assert isinstance(stacked(layers, None), StackedLinear)
    assert len({layer.kind for layer in layers}) == len(layers)


def test_numbers_without_blocks_have_no_codes() -> None:
    assert blocks.scheme(TENSOR_TYPES[1]) is None
