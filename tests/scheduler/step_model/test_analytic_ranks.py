"""What ranks exchange in a step, by hand and by what must hold for any number of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.amounts import Amounts
from penstock.scheduler.step_model.analytic import Exchange, Link, analytic_model
from penstock.scheduler.step_model.model import StepModel

# Llama-3.1-70B in bfloat16 on H100s.
NVLINK = Link(name="NVLink 4", latency_s=8e-6, bus_bytes_per_s=3e11)
LAYERS, HIDDEN, VOCAB = 80, 8192, 128_256
WEIGHT_BYTES, FLOPS_PER_TOKEN, KV_BYTES = 139_000_000_000, 137_000_000_000, 327_680


def exchange_of(num_ranks: int) -> Exchange:
    return Exchange(
        link=NVLINK,
        num_ranks=num_ranks,
        num_sums=1 + 2 * LAYERS,
        token_bytes=2 * HIDDEN,
        row_bytes=2 * VOCAB,
    )


def model_of(num_ranks: int, *, exchanges: bool = True) -> StepModel:
    """Of one rank, with its share of the bytes and operations."""
    return analytic_model(
        bandwidth=3.35e12,
        flops=9.89e14,
        weight_bytes=WEIGHT_BYTES // num_ranks,
        flops_per_token=FLOPS_PER_TOKEN // num_ranks,
        num_layers=LAYERS,
        exchange=exchange_of(num_ranks) if exchanges and num_ranks > 1 else None,
    )


def step_of(num_ranks: int, num_decodes: int, num_chunk: int) -> Amounts:
    """Of 1,000 positions each."""
    rows = num_decodes + (num_chunk > 0)
    return Amounts(
        num_decodes + num_chunk, WEIGHT_BYTES // num_ranks,
        1000 * num_decodes * KV_BYTES // num_ranks, 0, 0, rows, int(num_chunk > 0), rows, num_chunk,
    )  # fmt: skip


def test_what_four_ranks_exchange_is_what_the_formula_gives_by_hand() -> None:
    exchange = exchange_of(4)
    # 161 sums, a gather and a broadcast, each of two doublings of 8 us.
    assert exchange.step_s == pytest.approx(163 * 2 * 8e-6)
    # 161 x 16 KiB, of which each rank passes 2 x 3/4 over 300 GB/s.
    assert exchange.token_s == pytest.approx(13.19e-6, rel=1e-3)
    assert exchange.row_s == pytest.approx(0.641e-6, rel=1e-3)


@pytest.mark.parametrize(("num_decodes", "num_chunk"), [(1, 0), (64, 0), (300, 0), (16, 2000)])
def test_a_step_of_ranks_takes_a_rank_s_part_and_the_exchange(
    num_decodes: int, num_chunk: int
) -> None:
    exchange, step = exchange_of(4), step_of(4, num_decodes, num_chunk)
    alone_s, s = (
        model_of(4, exchanges=exchanges).time_of(step).device_s for exchanges in (False, True)
    )
    exchange_s = exchange.step_s + step.tokens * exchange.token_s + step.sampled * exchange.row_s
    assert s - alone_s == pytest.approx(exchange_s)


@given(
    num_decodes=st.integers(1, 512),
    num_chunk=st.integers(0, 8192),
    size=st.sampled_from([1, 2, 4]),
)
def test_twice_as_many_ranks_compute_faster_and_exchange_longer(
    num_decodes: int, num_chunk: int, size: int
) -> None:
    computes_s, takes_s = [], []
    for num_ranks in (size, 2 * size):
        step = step_of(num_ranks, num_decodes, num_chunk)
        computes_s.append(model_of(num_ranks, exchanges=False).time_of(step).device_s)
        takes_s.append(model_of(num_ranks).time_of(step).device_s)
    assert computes_s[1] < computes_s[0]
    shares = [
        1 - computed_s / took_s for computed_s, took_s in zip(computes_s, takes_s, strict=True)
    ]
    assert shares[1] > shares[0] >= -1e-9
    assert takes_s[1] > computes_s[0] / 2  # never as much faster as there are more devices


def test_the_steps_of_ranks_may_be_further_off_than_those_of_one_device() -> None:
    for kind in StepClass:
        one, two = (model_of(size).errors[kind] for size in (1, 2))
        assert two.bias > one.bias > 0
        assert two.num_steps == 0  # nothing was measured
