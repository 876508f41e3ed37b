"""The kernels of mixtures agree with torch, however many tokens share an expert."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import Quantization
from penstock.engine.loading.devices import check_experts_on_gpu, kept_on_gpu
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.formats.fp8.config import Fp8
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.gpu import FusedExperts
from penstock.engine.models.parts.experts.kernels.routing import (
    FEW_ROWS,
    MANY_ROWS,
    route,
    tiles_of,
)
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
    found = route(logits, each, is_normed=is_normed)
    assert found.experts.tolist() == chosen.tolist()
    torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, FEW_ROWS), (9, FEW_ROWS), (70, MANY_ROWS)])
def test_every_row_is_in_one_tile_with_others_of_its_expert(num_tokens: int, rows: int) -> None:
    chosen = routes(EXPERTS, random(num_tokens, 5))[0].int()
    tiles = tiles_of(chosen, 5)
    assert tiles.rows == rows
    order, found = tiles.order.tolist(), []
    for expert, first, count in zip(
        tiles.experts.tolist(), tiles.firsts.tolist(), tiles.counts.tolist(), strict=True
    ):
        assert count <= rows
        taken = order[first : first + count]
        assert {chosen.flatten().tolist()[row] for row in taken} <= {expert}
        found += taken
    assert sorted(found) == list(range(2 * num_tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 12, 70])
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
    check_experts_on_gpu(mixture, None)
    check_experts_on_gpu(dense, Quantization.INT8)
    with pytest.raises(InvalidConfig, match=r"--quantization is int8, .* use --device cpu"):
        check_experts_on_gpu(mixture, Quantization.INT8)


def test_experts_in_codes_are_refused_by_name() -> None:
    layer = drawn(EXPERTS)
    layer.gate_up = coded(8, 8)(random(5 * 2 * SIZE, HIDDEN).cpu(), None)
    with pytest.raises(UnsupportedWeightFormat, match="'int8', which the GPU's step for experts"):
        FusedExperts(layer)
