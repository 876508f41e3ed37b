"""Tensors of a checkpoint that its config.json does not imply."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.undeclared import check_tensors
from tests.support.executors import cpu_executor
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.tiny_models import ALL_FAMILIES, engine_config, make_model, save

Tensors = dict[str, Tensor]


def check(path: Path) -> None:
    check_tensors(path, ModelConfig.from_dir(path))


def add_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def set_keys(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_what_transformers_saves_of_a_family_has_no_other_tensors(
    family: str, tmp_path: Path
) -> None:
    check(save(make_model(family), tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_has_no_other_tensors(name: str, tmp_path: Path) -> None:
    save_quantized(make_model("llama2", intermediate_size=128), tmp_path, FORMATS[name])
    check(tmp_path)


@pytest.mark.parametrize(
    ("family", "lost", "message"),
    [
        ("qwen2", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "q_proj.bias"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "q_norm.weight"),
        ("llama2", {"num_hidden_layers": 2}, "'model.layers.2.*whose num_hidden_layers is 2"),
    ],
)
def test_a_setting_that_config_json_has_lost_ends_the_start(
    family: str, lost: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save(make_model(family), tmp_path)
    set_keys(path, **lost)
    with pytest.raises(InvalidModel, match=message):
        cpu_executor(engine_config(path), path)


def test_a_bias_beside_codes_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    save_quantized(make_model("llama2"), tmp_path, FORMATS["gptq4"])
    bias = "model.layers.1.self_attn.q_proj.bias"
    add_tensors(tmp_path, lambda tensors: tensors.update({bias: torch.zeros(64)}))
    check(tmp_path)
    add_tensors(tmp_path, lambda tensors: tensors[bias].fill_(0.5))
    with pytest.raises(InvalidModel, match=rf"{bias}.*as attention_bias or mlp_bias would"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "tables of rotary positions"),
        ("mtp.layers.0.mlp.up_proj.weight", "layers that draft"),
        ("model.layers.0.self_attn.k_scale", "scales of a quantized KV cache"),
        ("model.layers.2.mlp.down_proj.bias", "biases that are zero"),
    ],
)
def test_what_changes_no_answer_is_named_in_the_log(
    name: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(make_model("llama2"), tmp_path)
    add_tensors(path, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with caplog.at_level("INFO"):
        check(path)
    assert f"1 tensors have no effect: {why}" in caplog.text
    assert repr(name) in caplog.text


def test_a_layer_after_the_others_has_no_effect_if_it_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek's and GLM's, which have all tensors of a layer, and some more."""
    path = save(make_model("glm4_moe"), tmp_path)
    own = {"model.layers.3.mlp.gate.weight": torch.zeros(6, 64)}
    add_tensors(path, lambda tensors: tensors.update(own))
    with pytest.raises(InvalidModel, match="whose num_hidden_layers is 3"):
        check(path)
    both = {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}
    add_tensors(path, lambda tensors: tensors.update(both))
    with caplog.at_level("INFO"):
        check(path)
    assert "2 tensors have no effect: layers that draft" in caplog.text


def test_an_output_layer_that_is_tied_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(make_model("llama3.2_tied"), tmp_path)
    add_tensors(path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(96, 64)}))
    with caplog.at_level("INFO"):
        check(path)
    assert "which config.json ties to the embedding ('lm_head.weight')" in caplog.text


def test_encoders_beside_a_text_model_are_named_and_its_own_unknown_tensors_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(make_model("gemma3_wrapped"), tmp_path)
    with caplog.at_level("INFO"):
        check(path)
    assert "encoders of images or sound" in caplog.text
    names = load_file(path / "model.safetensors")
    norm = next(name for name in names if name.endswith("layers.1.self_attn.q_norm.weight"))
    other = norm.replace("q_norm", "v_norm")
    add_tensors(path, lambda tensors: tensors.update({other: torch.ones(4)}))
    with pytest.raises(InvalidModel, match=r"v_norm\.weight"):
        check(path)
