"""Rounding of weights to 8 and 4 bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.models.at_load.rounding import (
    GROUP_SIZE,
    LEVELS,
    Codes,
    NotRoundable,
    rounded,
)
from penstock.engine.models.layers.grouped import GroupedLinear

KINDS = pytest.mark.parametrize("kind", [Quantization.INT8, Quantization.INT4])


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def widened(codes: Codes, kind: Quantization, columns: int) -> Tensor:
    levels = torch.tensor(LEVELS, dtype=torch.int8) if kind is Quantization.INT4 else None
    linear = GroupedLinear(*codes, None, group_size=GROUP_SIZE, in_features=columns, levels=levels)
    return linear.weight()


def round_trip(weight: Tensor, kind: Quantization, num_threads: int = 1) -> Tensor:
    return widened(rounded(weight, kind, empty, num_threads), kind, weight.shape[1])


def normal(rows: int, columns: int, size: float = 0.02) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return torch.randn(rows, columns, generator=generator) * size


def to_nearest_level(weight: Tensor) -> Tensor:
    """Plain rounding of whole groups to `LEVELS`, with the largest weight at -127."""
    groups = weight.view(-1, GROUP_SIZE)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scales = (largest / LEVELS[0]).half().float()
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    divisor = torch.where(scales == 0, 1.0, scales)
    nearest = ((groups / divisor)[..., None] - levels).abs().argmin(-1)
    return (levels[nearest] * scales).view_as(weight)


def weighted_errors(weight: Tensor, other: Tensor) -> Tensor:
    """Of each group, as 4 bits weigh it."""
    groups = weight.view(-1, GROUP_SIZE)
    importance = groups.abs() + groups.square().mean(1, keepdim=True).sqrt()
    return (importance * (groups - other.view(-1, GROUP_SIZE)).square()).sum(1)


GROUPS = st.lists(st.floats(-1.0, 1.0, width=32), min_size=GROUP_SIZE, max_size=GROUP_SIZE).map(
    lambda values: torch.tensor([values])
)
SIZES = st.sampled_from([1e-6, 1e-3, 0.02, 1.0, 1e4])


@given(GROUPS, SIZES)
def test_8_bits_are_off_by_half_a_step_at_most(weight: Tensor, size: float) -> None:
    weight = weight * size
    codes = rounded(weight, Quantization.INT8, empty)
    off = (widened(codes, Quantization.INT8, GROUP_SIZE) - weight).abs().max()
    assert off <= codes.scales.float() * 0.5001
    assert int(codes.codes.min()) >= -127


@given(GROUPS, SIZES)
def test_8_bits_are_no_worse_than_the_plain_scale(weight: Tensor, size: float) -> None:
    weight = weight * size
    scale = (weight.abs().max() / 127).clamp(min=2.0**-24).half().float()
    if weight.abs().max() > 127.5 * scale:  # float16 has rounded it down
        return
    plain = (weight / scale).round() * scale
    error = (round_trip(weight, Quantization.INT8) - weight).square().sum()
    assert error <= (plain - weight).square().sum() * 1.0001


@given(GROUPS, st.sampled_from([0.02, 1.0, 1e3]))
def test_4_bits_are_no_worse_than_plain_rounding_to_the_same_levels(
    weight: Tensor, size: float
) -> None:
    weight = weight * size
    error = weighted_errors(weight, round_trip(weight, Quantization.INT4))
    # Scales in float16 are off by up to 1 in 2,048, in the plain rounding too; and numbers that are
    # near the middle of two levels may go to the other one.
    slack = 1e-6 * weighted_errors(weight, torch.zeros_like(weight))
    assert error <= weighted_errors(weight, to_nearest_level(weight)) * 1.05 + slack


def test_4_bits_lose_a_quarter_less_than_evenly_spaced_codes() -> None:
    weight = normal(64, 512)
    groups = weight.view(-1, GROUP_SIZE)
    scales = groups.abs().amax(1, keepdim=True) / 7
    plain = ((groups / scales).round() * scales).view_as(weight)
    error = (round_trip(weight, Quantization.INT4) - weight).square().sum()
    assert error < 0.75 * (plain - weight).square().sum()


@KINDS
def test_zeros_stay_zeros(kind: Quantization) -> None:
    assert not round_trip(torch.zeros(3, 64), kind).any()


@KINDS
@pytest.mark.parametrize("value", [-3.0, -0.02, 1e-3, 7.0])
def test_a_group_of_one_value_keeps_it(kind: Quantization, value: float) -> None:
    weight = torch.full((2, 64), value)
    torch.testing.assert_close(round_trip(weight, kind), weight, rtol=1e-3, atol=0)


@KINDS
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e7])
def test_a_weight_that_no_scale_can_hold_is_refused(kind: Quantization, value: float) -> None:
    weight = normal(4, 64)
    weight[2, 50] = value
    with pytest.raises(NotRoundable):
        rounded(weight, kind, empty)


@KINDS
@pytest.mark.parametrize("columns", [1, 5, 31, 33, 40, 100])
def test_the_last_group_may_be_shorter(kind: Quantization, columns: int) -> None:
    weight = normal(6, columns)
    whole = torch.nn.functional.pad(weight, (0, -columns % GROUP_SIZE))
    torch.testing.assert_close(
        round_trip(weight, kind), round_trip(whole, kind)[:, :columns], rtol=0, atol=0
    )
    assert rounded(weight, kind, empty).scales.shape == (6, -(-columns // GROUP_SIZE))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_each_other_or_on_threads(
    kind: Quantization, dtype: torch.dtype
) -> None:
    weight = normal(300, 1024).to(dtype)  # of several bands
    together = round_trip(weight, kind, num_threads=3)
    assert torch.equal(together[250:], round_trip(weight[250:], kind))
    assert torch.equal(together, round_trip(weight.float(), kind))
