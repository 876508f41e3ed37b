"""`GroupedLinear`: what its codes stand for."""

import pytest
import torch
from torch import Tensor

from penstock.engine.models.layers.grouped import GroupedLinear, packed_nibbles
from penstock.engine.models.layers.linear import PlainLinear, StackedLinear

OUT, IN, GROUP = 5, 40, 16  # the last group has 8
GROUPS = 3
E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def codes(low: int, high: int) -> Tensor:
    return torch.randint(low, high, (OUT, IN), generator=generator())


def scales() -> Tensor:
    return torch.rand(OUT, GROUPS, generator=generator()).half() + 0.5


def by_hand(numbers: Tensor) -> Tensor:
    """One weight after the other."""
    return torch.tensor(
        [
            [float(numbers[n, k]) * float(scales()[n, k // GROUP]) for k in range(IN)]
            for n in range(OUT)
        ]
    )


def test_codes_of_8_bits_are_numbers_times_the_scale_of_their_group() -> None:
    numbers = codes(-128, 128)
    linear = GroupedLinear(numbers.to(torch.int8), scales(), None, group_size=GROUP, in_features=IN)
    assert torch.equal(linear.weight(), by_hand(numbers))
    assert (linear.weight_format, linear.num_bytes) == ("int8", OUT * IN + OUT * GROUPS * 2)


def test_codes_of_4_bits_are_around_8() -> None:
    numbers = codes(0, 16)
    linear = GroupedLinear(
        packed_nibbles(numbers), scales(), None, group_size=GROUP, in_features=IN
    )
    assert torch.equal(linear.weight(), by_hand(numbers - 8))
    assert (linear.weight_format, linear.num_bytes) == ("int4", OUT * IN // 2 + OUT * GROUPS * 2)


def test_zeros_are_subtracted_from_the_codes_of_their_group() -> None:
    numbers, zeros = codes(0, 16), torch.randint(0, 16, (OUT, GROUPS), generator=generator())
    linear = GroupedLinear(
        packed_nibbles(numbers),
        scales(),
        None,
        group_size=GROUP,
        in_features=IN,
        zeros=zeros.to(torch.uint8),
    )
    shifted = numbers - zeros.repeat_interleave(GROUP, 1)[:, :IN]
    assert torch.equal(linear.weight(), by_hand(shifted))


def test_levels_are_what_codes_stand_for() -> None:
    numbers = codes(0, 16)
    linear = GroupedLinear(
        packed_nibbles(numbers), scales(), None, group_size=GROUP, in_features=IN, levels=E2M1
    )
    assert torch.equal(linear.weight(), by_hand(E2M1[numbers]))


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_weights_that_the_codes_stand_for(has_bias: bool) -> None:
    bias = torch.rand(OUT, generator=generator()) if has_bias else None
    x = torch.rand(3, IN, generator=generator())
    linear = GroupedLinear(
        codes(-128, 128).to(torch.int8), scales(), bias, group_size=GROUP, in_features=IN
    )
    assert torch.equal(linear(x), PlainLinear(linear.weight(), bias)(x))


def test_stacked_layers_give_one_result_after_the_other() -> None:
    plain = PlainLinear(torch.rand(2, IN, generator=generator()), None)
    grouped = GroupedLinear(
        codes(-128, 128).to(torch.int8), scales(), None, group_size=GROUP, in_features=IN
    )
    x = torch.rand(3, IN, generator=generator())
    stacked = StackedLinear((plain, grouped))
    assert torch.equal(stacked(x), torch.cat((plain(x), grouped(x)), dim=1))
    assert stacked.num_bytes == plain.num_bytes + grouped.num_bytes
