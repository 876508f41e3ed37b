"""Products with codes agree with their weights in float32: in Triton's interpreter, or on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.kernels.codes.numbers import dequantize, unpacking, widening
from penstock.engine.kernels.codes.skinny import skinny_grouped_linear
from penstock.engine.kernels.codes.tiles import tiled_linear
from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.linear import Scaled
from penstock.engine.models.layers.coded import CodedLinear
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear, packed_nibbles
from tests.support.kernels import DEVICE, DTYPES, TOLERANCE, error, poisoned, random, scaled
from tests.support.weight_formats import coded

EPS = 1e-5
# A whole layer's group; 300 is a multiple of no other.
COLUMNS, OUTPUTS = 300, 70
# Twice the numbers of E2M1, and a table that is not symmetric.
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
UNEVEN = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def made(
    bits: int, group_size: int, *, has_zeros: bool = False, columns: int = COLUMNS
) -> GroupedLinear:
    make = coded(bits, group_size, has_zeros=has_zeros)
    linear = make(random(OUTPUTS, columns), None)
    assert isinstance(linear, GroupedLinear)
    return linear


def with_levels(levels: list[int], group_size: int) -> GroupedLinear:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (OUTPUTS, COLUMNS), generator=generator).to(DEVICE)
    groups = -(-COLUMNS // group_size)
    return GroupedLinear(
        packed_nibbles(codes),
        random(OUTPUTS, groups).abs() + 0.1,
        None,
        group_size=group_size,
        in_features=COLUMNS,
        levels=torch.tensor(levels, dtype=torch.int8, device=DEVICE),
    )


def on_device(linear: GroupedLinear | Fp8Linear) -> CodedWeight:
    weight = linear.coded_weight(DEVICE)
    assert weight is not None
    return weight


def check(
    linear: GroupedLinear | Fp8Linear, num_rows: int, dtype: torch.dtype = torch.float32
) -> None:
    weight = on_device(linear)
    expected = poisoned(OUTPUTS, weight.columns)
    linear.write_weight(expected)
    x = random(num_rows, weight.columns, dtype=dtype)
    out = poisoned(num_rows, OUTPUTS, dtype=dtype)
    skinny_grouped_linear(x, weight, out)
    assert error(out, x.float() @ expected.T) < TOLERANCE[dtype]
    if num_rows == 2:
        check_many(weight, expected, dtype)


def check_many(weight: CodedWeight, expected: Tensor, dtype: torch.dtype) -> None:
    # For more rows, weights are rounded to the type of x.
    many = random(20, weight.columns, dtype=dtype)
    wide = poisoned(len(many), 2 * OUTPUTS, dtype=dtype)
    tiled_linear(many, weight, wide[:, :OUTPUTS])
    product = many.float() @ expected.to(dtype).float().T
    assert error(wide[:, :OUTPUTS], product) < TOLERANCE[dtype]
    assert bool(wide[:, OUTPUTS:].isnan().all())
    rows = poisoned(20, weight.columns)
    dequantize(weight, 30, rows)
    assert torch.equal(rows, expected[30:50])
    whole = poisoned(OUTPUTS, weight.columns)
    CodedLinear(weight, None).write_weight(whole)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("group_size", [32, 128, COLUMNS])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_multiplied_with_the_scales_of_their_groups(bits: int, group_size: int) -> None:
    check(made(bits, group_size), 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 16])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, COLUMNS])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_groups_of_every_size_are_multiplied_for_every_number_of_rows(
    bits: int, has_zeros: bool, group_size: int, num_rows: int, dtype: torch.dtype
) -> None:
    check(made(bits, group_size, has_zeros=has_zeros), num_rows, dtype)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 32), (4, 64)])
def test_zeros_are_subtracted_from_codes(bits: int, group_size: int) -> None:
    linear = made(bits, group_size, has_zeros=True)
    assert linear.zeros is not None and len(set(linear.zeros.flatten().tolist())) > 4
    check(linear, 2)


@pytest.mark.parametrize("levels", [E2M1, UNEVEN])
@pytest.mark.parametrize("group_size", [32, 128])
def test_codes_of_4_bits_may_stand_for_any_levels(levels: list[int], group_size: int) -> None:
    check(with_levels(levels, group_size), 2)


def test_scales_that_float16_cannot_hold_are_kept() -> None:
    linear = made(4, 32)
    linear.scales = linear.scales.float() * 2**-30
    check(linear, 2)


def fp8(block: tuple[int, int]) -> Fp8Linear:
    codes = (100 * random(OUTPUTS, COLUMNS)).clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = [-(-size // step) for size, step in zip(codes.shape, block, strict=True)]
    return Fp8Linear(codes, random(*grid, seed=1).abs() + 0.1, None, block=block)


@pytest.mark.parametrize("block", [(1, COLUMNS), (32, 64)])
def test_fp8_is_multiplied_with_the_scales_of_its_rows_or_blocks(block: tuple[int, int]) -> None:
    check(fp8(block), 2)


@pytest.mark.parametrize("columns", [300, 320])
def test_an_odd_number_of_groups_has_no_neighbour_after_the_last(columns: int) -> None:
    check(made(4, 64 if columns == 320 else 32, columns=columns), 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_surrounds_the_layer_is_computed_too(bits: int) -> None:
    linear, rows = made(bits, 32), 3
    check_fusions(linear, rows, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 8, 16])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (8, 128), (4, 32), (4, 128)])
def test_what_surrounds_the_layer_is_computed_for_every_number_of_rows(
    bits: int, group_size: int, num_rows: int, dtype: torch.dtype
) -> None:
    check_fusions(made(bits, group_size), num_rows, dtype)


def check_fusions(linear: GroupedLinear, num_rows: int, dtype: torch.dtype) -> None:
    weight, plain = on_device(linear), linear.weight()
    x, norm = random(num_rows, COLUMNS, dtype=dtype), random(COLUMNS, dtype=dtype, seed=1)
    bias, residual = random(OUTPUTS, dtype=dtype), random(num_rows, OUTPUTS, dtype=dtype)
    product = x.float() @ plain.T
    of_normed = functional.rms_norm(x.float(), (COLUMNS,), norm.float(), EPS) @ plain.T

    logits = poisoned(num_rows, OUTPUTS)
    skinny_grouped_linear(scaled(x, norm), weight, logits, eps=EPS)
    assert error(logits, of_normed) < TOLERANCE[dtype]
    # Into columns of a wider tensor.
    wide = poisoned(num_rows, 2 * OUTPUTS, dtype=dtype)
    skinny_grouped_linear(scaled(x, norm), weight, wide[:, OUTPUTS:], eps=EPS, bias=bias)
    assert error(wide[:, OUTPUTS:], of_normed + bias.float()) < TOLERANCE[dtype]
    assert bool(wide[:, :OUTPUTS].isnan().all())
    in_place = residual.clone()
    following = random(OUTPUTS, dtype=dtype, seed=2)
    added = skinny_grouped_linear(
        x, weight, in_place, bias=bias, residual=in_place, following=following
    )
    assert error(in_place, product + bias.float() + residual.float()) < TOLERANCE[dtype]
    assert isinstance(added, Scaled)
    assert error(added.values, in_place.float() * following.float()) < TOLERANCE[dtype]
    assert error(added.squares.sum(1), in_place.float().square().sum(1)) < TOLERANCE[dtype]
    gated = poisoned(num_rows, OUTPUTS // 2, dtype=dtype)
    skinny_grouped_linear(scaled(x, norm), weight, gated, eps=EPS, is_gated=True)
    gate, up = of_normed.chunk(2, -1)
    assert error(gated, functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_rows", [40, 300])
def test_few_outputs_of_many_columns_are_split_and_added_up(num_rows: int) -> None:
    columns, bias = 1100, random(OUTPUTS)
    linear = made(4, 128, columns=columns)
    x, out = random(num_rows, columns), poisoned(num_rows, OUTPUTS)
    tiled_linear(x, on_device(linear), out, bias)
    assert error(out, x @ linear.weight().T + bias) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_has_the_same_bits_alone_and_in_company(bits: int) -> None:
    weight, x = on_device(made(bits, 32)), random(8, COLUMNS)
    outs = [poisoned(num_rows, OUTPUTS) for num_rows in (8, 1)]
    for out in outs:
        skinny_grouped_linear(x[: len(out)], weight, out)
    assert torch.equal(outs[0][:1], outs[1])


def test_groups_that_no_product_on_the_matrix_units_fits_have_no_form() -> None:
    assert made(4, 24).coded_weight(DEVICE) is None


ASSEMBLED = pytest.mark.parametrize(
    ("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)


def _prmt(a: int, b: int, selector: int) -> int:
    """The PTX ISA, `prmt` in its default mode."""
    both = (b << 32 | a).to_bytes(8, "little")
    found = 0
    for index in range(4):
        choice = selector >> 4 * index & 15
        byte = both[choice & 7]
        found |= (byte if choice < 8 else 255 * (byte >> 7)) << 8 * index
    return found


def _multiply_add(a: int, b: int, c: int, dtype: torch.dtype) -> int:
    x, y, z = torch.tensor([a, b, c], dtype=torch.uint32).view(dtype).view(3, 2).double()
    return int((x * y + z).to(dtype).view(torch.uint32))


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "shr.b32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else -1,
    "fma.rn.bf16x2": lambda a, b, c: _multiply_add(a, b, c, torch.bfloat16),
    "fma.rn.f16x2": lambda a, b, c: _multiply_add(a, b, c, torch.float16),
}


def run(assembly: str, given: int, count: int) -> list[int]:
    """The first registers that this PTX writes, given the next one that it reads."""
    registers = {f"${count}": given}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for statement in assembly.strip("{} \n").split(";"):
        if statement.strip() and ".reg" not in statement:
            name, operands = statement.strip().split(maxsplit=1)
            target, *sources = operands.split(", ")
            registers[target] = OPERATIONS[name](*map(value, sources))
    return [registers[f"${index}"] for index in range(count)]


@ASSEMBLED
@pytest.mark.parametrize("levels", [None, E2M1, UNEVEN])
def test_the_assembly_for_gpus_makes_the_same_numbers_of_every_byte(
    kind: str, dtype: torch.dtype, levels: list[int] | None
) -> None:
    """The interpreter runs other code, so this one is run by the instructions' definitions."""
    stands_for = torch.tensor(levels or range(-8, 8))
    words = None if levels is None else stands_for.to(torch.int8).view(torch.int32).tolist()
    assembly = unpacking(words, kind)
    for first in range(256):
        codes = [first, first ^ 0xFF, (first * 7 + 3) % 256, 255 - first // 2]
        found = run(assembly, int.from_bytes(bytes(codes), "little"), 4)
        numbers = torch.tensor(found, dtype=torch.uint32).view(dtype).double()
        expected = [stands_for[code & 15] for code in codes] + [stands_for[c >> 4] for c in codes]
        assert numbers.tolist() == [float(number) for number in expected], first


@ASSEMBLED
def test_the_assembly_for_gpus_makes_the_numbers_of_fp8(kind: str, dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = every[~every.isnan()].repeat(2)
    expected = codes.to(dtype)
    for first in range(254):
        four = codes[first : first + 4].view(torch.uint8).tolist()
        found = run(widening(kind), int.from_bytes(bytes(four), "little"), 2)
        numbers = torch.tensor(found, dtype=torch.uint32).view(dtype)
        assert torch.equal(numbers, expected[first : first + 4]), four
