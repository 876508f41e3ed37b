"""The kernels of mixtures agree with torch, however many tokens share an expert."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import Quantization
from penstock.engine.loading.devices import check_rounding_on_gpu, kept_on_gpu
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.formats.fp8.config import Fp8
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.gpu import FusedExperts
from penstock.engine.models.parts.experts.kernels import routing
from penstock.engine.models.parts.experts.kernels.routing import route, tiles_of
from penstock.engine.models.parts.experts.layer import routes
from penstock.engine.models.parts.mlp.config import Activation
from penstock.scheduler.errors import InvalidConfig
from tests.support.kernels import DEVICE, DTYPES, TOLERANCE, error, random
from tests.support.mixtures import drawn
from tests.support.paths import MODEL_CONFIGS
from tests.support.weight_formats import coded

HIDDEN, SIZE = 40, 24  # no whole tiles
EXPERTS = Experts(hidden_size=HIDDEN, num_experts=5, num_per_token=2, size=SIZE, is_normed=True)


@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("num_experts", "each"), [(5, 2), (128, 8), (3, 3)])
def test_tokens_are_routed_as_torch_routes_them(
    num_experts: int, each: int, is_normed: bool
) -> None:
    experts = replace(EXPERTS, num_experts=num_experts, num_per_token=each, is_normed=is_normed)
    logits = random(7, num_experts).round(decimals=0)  # many are equal
    chosen, weights = routes(experts, logits)
    found = route(logits, experts)
    assert found.experts.tolist() == chosen.tolist()
    torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("num_best", "has_sigmoids"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    ("num_experts", "each", "num_groups", "num_used"),
    [(6, 2, 1, 1), (20, 5, 5, 2), (160, 6, 8, 3), (256, 8, 8, 4)],
)
def test_groups_sigmoids_and_corrections_choose_as_torch_does(
    num_experts: int,
    each: int,
    num_groups: int,
    num_used: int,
    num_best: int,
    has_sigmoids: bool,
    is_normed: bool,
) -> None:
    experts = replace(
        EXPERTS,
        num_experts=num_experts,
        num_per_token=each,
        is_normed=is_normed,
        has_sigmoids=has_sigmoids,
        has_corrections=has_sigmoids,
        num_groups=num_groups,
        num_groups_used=num_used,
        num_best=num_best,
        weight_factor=2.5,
    )
    # Many are equal, and many groups; sums that only rounding would tell apart are not among them.
    logits = random(9, num_experts).round(decimals=0).abs()
    corrections = 8.0 * (random(num_experts, seed=3) > 0) if has_sigmoids else None
    chosen, weights = routes(experts, logits, None, corrections)
    found = route(logits, experts, None, corrections)
    assert found.experts.tolist() == chosen.tolist()
    torch.testing.assert_close(found.weights, weights)


def _mixed(kind: str, num_tokens: int, num_experts: int, each: int) -> Tensor:
    """Experts of each token, (T, each) int32."""
    if kind == "one":
        return torch.full((num_tokens, each), num_experts // 2, dtype=torch.int32, device=DEVICE)
    if kind == "the last two":
        rows = torch.arange(num_tokens * each, dtype=torch.int32, device=DEVICE)
        return num_experts - 1 - rows.view(-1, each) % 2
    chosen = random(num_tokens, num_experts).topk(each).indices.int()
    if kind == "not a number":  # see the next test
        chosen[::3] = num_experts - 1
    return chosen


@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value)")  # by the interpreter
def test_a_token_without_numbers_has_the_last_expert() -> None:
    logits = random(2, 60)
    logits[0] = float("nan")
    experts = replace(EXPERTS, num_experts=60, num_per_token=4)
    found = route(logits, experts).experts.tolist()
    assert found == [[59] * 4, logits[1].topk(4).indices.tolist()]


KINDS = ("random", "one", "the last two", "not a number")
TOKENS = (1, 2, 9, 70, 700)  # 700 of 8 are two chunks of rows


@pytest.mark.parametrize(  # each kind with every second number, and each number with two kinds
    ("kind", "num_tokens"),
    [(kind, n) for i, kind in enumerate(KINDS) for j, n in enumerate(TOKENS) if (i + j) % 2 == 0],
)
@pytest.mark.parametrize(("num_experts", "each"), [(5, 2), (8, 8), (60, 4), (128, 8), (512, 8)])
def test_rows_are_sorted_into_tiles_as_torch_sorts_them(
    num_experts: int, each: int, num_tokens: int, kind: str
) -> None:
    chosen = _mixed(kind, num_tokens, num_experts, each)
    tiles = tiles_of(chosen, num_experts)
    assert tiles.rows in (16, 32, 64, 128)
    flat = chosen.flatten().long()
    assert tiles.order.tolist() == flat.sort(stable=True).indices.tolist()
    found = list(zip(*(each.tolist() for each in tiles[2:]), strict=True))
    assert len(found) <= min(len(flat), len(flat) // tiles.rows + num_experts)
    assert all(0 <= expert < num_experts for expert, _, _ in found)
    assert [tile for tile in found if tile[2]] == _tiles_by_torch(flat, num_experts, tiles.rows)


def _tiles_by_torch(experts: Tensor, num_experts: int, rows: int) -> list[tuple[int, int, int]]:
    """Expert, first row and count of each tile that has rows."""
    counts = experts.bincount(minlength=num_experts)
    starts = counts.cumsum(0) - counts
    return [
        (expert, start + done, min(rows, count - done))
        for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True))
        for done in range(0, count, rows)
    ]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "rows"),
    [(1, 128, 16), (255, 128, 16), (256, 128, 32), (512, 128, 64), (1024, 128, 128),
     (16384, 128, 128), (1024, 512, 32), (64, 8, 128)],
)  # fmt: skip
def test_a_tile_has_at_most_twice_the_rows_of_an_average_expert(
    num_tokens: int, num_experts: int, rows: int
) -> None:
    """For 8 of each token, on a Hopper, which is supposed where there is no GPU."""
    chosen = torch.zeros(num_tokens, 8, dtype=torch.int32, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "max_shared_bytes", lambda: 227 * 1024)
        patch.setattr(routing, "_sort", {(num_experts,): lambda *_, **__: None})
        assert tiles_of(chosen, num_experts).rows == rows
        patch.setattr(routing, "max_shared_bytes", lambda: 99 * 1024)
        assert tiles_of(chosen, num_experts).rows == min(rows, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 12, 70, 90, 200])
@pytest.mark.parametrize("clamp", [None, (1.702, 0.5)])  # gpt-oss's, which has biases too
@torch.inference_mode()
def test_experts_give_what_torch_gives(
    num_tokens: int, dtype: torch.dtype, clamp: tuple[float, float] | None
) -> None:
    experts = replace(EXPERTS, activation=Activation(clamp=clamp), has_biases=clamp is not None)
    layer, x = drawn(experts, dtype), random(num_tokens, HIDDEN, dtype=dtype)
    found = FusedExperts(layer)(x)
    logits = layer.router(x)  # of the same rounding, so that the same experts are chosen
    expected = drawn(experts, dtype, is_wide=True).mixed(x.float(), logits)
    assert error(found, expected) < 5 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 12, 70])
@torch.inference_mode()
def test_experts_of_deepseek_and_the_shared_one_give_what_torch_gives(
    num_tokens: int, dtype: torch.dtype
) -> None:
    experts = replace(
        EXPERTS,
        num_experts=6,
        has_sigmoids=True,
        has_corrections=True,
        num_groups=3,
        num_groups_used=2,
        num_best=2,
        weight_factor=2.5,
        shared_size=2 * SIZE,
        has_shared_gate=False,
    )
    layer, x = drawn(experts, dtype), random(num_tokens, HIDDEN, dtype=dtype)
    expected = drawn(experts, dtype, is_wide=True)(x.float())  # the router is not rounded
    assert error(FusedExperts(layer)(x), expected) < 5 * TOLERANCE[dtype]


@torch.inference_mode()
def test_experts_beside_an_mlp_give_what_torch_gives() -> None:
    layer = drawn(replace(EXPERTS, activation=Activation(is_gelu=True), is_beside_mlp=True))
    states, given = random(12, HIDDEN), random(12, HIDDEN, seed=8)
    expected = layer.with_mlp(states, given)
    found = FusedExperts(layer).with_mlp(states, given)
    assert error(found, expected) < 5 * TOLERANCE[torch.float32]


def test_a_gpu_keeps_no_codes_of_a_mixture() -> None:
    mixture = ModelConfig.from_dir(MODEL_CONFIGS / "Qwen3-30B-A3B")
    dense = ModelConfig.from_dir(MODEL_CONFIGS / "Qwen3-8B")
    shape = (Fp8((128, 128)), 2048, 2048)
    assert kept_on_gpu(mixture, DEVICE).num_bytes(*shape) is None
    assert kept_on_gpu(dense, DEVICE).num_bytes(*shape) is not None
    check_rounding_on_gpu(mixture, None)
    check_rounding_on_gpu(dense, Quantization.INT8)
    with pytest.raises(InvalidConfig, match=r"--quantization is int8, .* use --device cpu"):
        check_rounding_on_gpu(mixture, Quantization.INT8)


def test_experts_in_codes_are_refused_by_name() -> None:
    layer = drawn(EXPERTS)
    layer.gate_up = coded(8, 8)(random(5 * 2 * SIZE, HIDDEN).cpu(), None)
    with pytest.raises(UnsupportedWeightFormat, match="'int8', which the GPU's step for experts"):
        FusedExperts(layer)
