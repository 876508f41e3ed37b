"""The comparison of a quantized model with the unquantized one."""

from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.engine.config import Quantization
from penstock.engine.memory.host import Arena
from penstock.engine.models.at_load.plan import Plan, Scheme
from penstock.engine.models.at_load.quality import compare, token_ids_of_text
from penstock.engine.models.at_load.quantize import Rounder
from penstock.engine.models.at_load.weights import QuantizedWeights
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.weights import Checkpoint
from penstock.engine.process.phases import Phases
from tests.support.paths import DEMO_MODEL
from tests.support.tiny_models import Harness, make_model, save

FLOAT32 = partial(torch.empty, dtype=torch.float32)
FAMILIES = (
    "qwen3_5",
    "qwen3_5_moe",
    *("llama3.2_tied", "qwen2", "qwen3", "mistral_window", "llama_biases", "gemma4_moe"),
    "gemma4_small_wrapped",
)


def quantized(config: ModelConfig, weights: Checkpoint, method: Quantization) -> QuantizedWeights:
    plan = Plan.of(Scheme(method, config), torch.float32)
    rounder = Rounder(weights, plan, Arena().empty, Phases(), num_threads=1)
    return QuantizedWeights(weights, plan.scheme.parts, rounder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_equals_itself(family: str, tmp_path: Path) -> None:
    directory = save(make_model(family), tmp_path)
    config = ModelConfig.from_dir(directory)
    weights = Checkpoint(directory, FLOAT32)
    quality = compare(config, weights, weights, list(range(2, 60)))
    assert (quality.kl_divergence, quality.top1_agreement) == (0.0, 1.0)
    assert quality.perplexity == quality.unquantized_perplexity
    assert quality.num_tokens == 58


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_figures_are_those_of_the_models_logits(family: str, tmp_path: Path) -> None:
    directory = save(make_model(family, vocab_size=128), tmp_path)
    config = ModelConfig.from_dir(directory)
    plain = Checkpoint(directory, FLOAT32)
    rounded = quantized(config, plain, Quantization.INT8)
    token_ids = list(range(40, 100))
    quality = compare(config, plain, rounded, token_ids)

    distributions = []
    for weights in (plain, rounded):
        harness = Harness(directory, num_sequences=1, make_linear=PlainLinear, weights=weights)
        harness.token_table[0, : len(token_ids)] = torch.tensor(token_ids)
        (logits,) = harness.run([(0, 0, len(token_ids))])
        distributions.append(logits.double().log_softmax(-1))
    reference, other = distributions
    divergence = (reference.exp() * (reference - other)).sum(-1)
    assert divergence.mean() > 0
    assert quality.kl_divergence == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert quality.kl_divergence_p99 == pytest.approx(float(divergence.quantile(0.99)), rel=1e-2)
    loss = -other[torch.arange(59), torch.tensor(token_ids[1:])].mean()
    assert quality.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)


def test_the_demo_model_loses_little() -> None:
    config = ModelConfig.from_dir(DEMO_MODEL)
    plain = Checkpoint(DEMO_MODEL, FLOAT32)
    token_ids = token_ids_of_text(DEMO_MODEL, config)
    assert len(token_ids) > 200
    int8, int4, fp8 = (
        compare(config, plain, quantized(config, plain, method), token_ids)
        for method in (Quantization.INT8, Quantization.INT4, Quantization.FP8)
    )
    assert 0 < int8.kl_divergence < 4e-4 and int8.top1_agreement > 0.985
    assert 0 < int4.kl_divergence < 0.04 and int4.top1_agreement > 0.9
    assert int8.kl_divergence < fp8.kl_divergence < int4.kl_divergence
    # Neither known by heart, as its own training text is, nor foreign to it.
    assert 3 < int4.unquantized_perplexity < 30


def test_without_a_tokenizer_of_its_own_a_model_has_no_text(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save(make_model("llama2"), tmp_path))
    assert token_ids_of_text(tmp_path, config) == []
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    assert token_ids_of_text(tmp_path, config) == []  # its ids are beyond the vocabulary
