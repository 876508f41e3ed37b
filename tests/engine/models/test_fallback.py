"""Which classes of transformers are called, and which would answer wrongly and are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.engine.config import ModelImpl
from penstock.engine.hub.check import find_implementation
from penstock.engine.loading.executor import build_executor
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.fallback.check import check_model
from penstock.engine.models.fallback.model import TransformersModel
from penstock.engine.models.fallback.source import TransformersClass, UnsupportedClass
from penstock.engine.models.families.families import FAMILIES
from penstock.engine.process.phases import Phases
from tests.support.other_decoders import (
    OTHER_DECODERS,
    REFUSED_CLASSES,
    architecture_of,
    make_other,
    make_refused,
)
from tests.support.tiny_models import engine_config, make_model, save


def config_of(directory: Path, **content: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("model_type", sorted(OTHER_DECODERS.keys() - FAMILIES.keys()))
def test_a_decoder_without_a_row_is_found_among_the_classes_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    named = TransformersClass(model_type, architecture_of(model_type))
    by_class = config_of(tmp_path, architectures=[named.architecture], model_type=model_type)
    assert find_implementation(by_class) == named
    if model_type != "gpt2":  # whose file has a class that is not for answers before it
        assert find_implementation(config_of(tmp_path, model_type=model_type)) == named


def test_a_family_of_ours_is_computed_by_transformers_only_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    path = save(make_model("qwen3"), tmp_path)
    for impl in (ModelImpl.AUTO, ModelImpl.PENSTOCK):
        assert isinstance(find_implementation(path, impl), ModelConfig)
    theirs = find_implementation(path, ModelImpl.TRANSFORMERS)
    assert theirs == TransformersClass("qwen3", "Qwen3ForCausalLM")


def test_a_family_of_ours_that_we_refuse_is_not_left_to_transformers(tmp_path: Path) -> None:
    """Which ignores keys that its class does not have."""
    path = save(make_model("qwen3"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": 5.0}))
    with pytest.raises(InvalidModel, match="attn_logit_softcapping"):
        find_implementation(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "it computes attention itself"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "choose some of the keys by an index"),
        (
            {"architectures": ["BartForCausalLM"], "is_encoder_decoder": True},
            "it is the decoder beside an encoder",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention"]},
            "its layers of the kind 'linear_attention' do not attend",
        ),
        (
            {
                "architectures": ["MixtralForCausalLM"],
                "quantization_config": {"quant_method": "mxfp4"},
            },
            "in the format MXFP4; the architecture MixtralForCausalLM has no implementation of our",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_before_its_weights_are_there(
    content: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=why):
        find_implementation(config_of(tmp_path, **content))


def test_a_class_that_transformers_lacks_is_refused_by_name(tmp_path: Path) -> None:
    path = config_of(tmp_path, architectures=["FutureForCausalLM"], model_type="future")
    with pytest.raises(InvalidModel, match="names no decoder that transformers has"):
        find_implementation(path, ModelImpl.TRANSFORMERS)
    with pytest.raises(InvalidModel, match=r"FutureForCausalLM, which is not supported"):
        find_implementation(path)


@pytest.mark.parametrize("model_type", REFUSED_CLASSES)
def test_a_class_whose_answers_would_be_wrong_is_refused_by_name_when_it_is_loaded(
    model_type: str,
) -> None:
    """By what a pass through it shows, where the source and config.json do not."""
    network, why = make_refused(model_type)
    with pytest.raises(UnsupportedClass, match=why) as refused, torch.inference_mode():
        check_model(TransformersModel(network, 128), 96, 128)
    assert type(network).__name__ in str(refused.value)


def test_layers_that_attend_in_chunks_are_served_where_no_sequence_is_longer(
    tmp_path: Path,
) -> None:
    network, _ = make_refused("llama4_text")
    with torch.inference_mode():
        model = TransformersModel(network, 16)
        check_model(model, 96, 16)
    assert {layer.window for layer in model.layers.values()} == {None}


def test_windows_are_those_of_the_masks_that_a_class_makes() -> None:
    windows = {
        "gpt_oss": [9, None, 9],
        "starcoder2": [9, 9, 9],
        "cohere2": [9, None, 9],
        "olmoe": [None, None, None],
    }
    for model_type, expected in windows.items():
        with torch.inference_mode():
            model = TransformersModel(make_other(model_type), 128)
        assert [layer.window for layer in model.layers.values()] == expected
    # A window that no sequence reaches is none.
    with torch.inference_mode():
        short = TransformersModel(make_other("starcoder2"), 9)
    assert {layer.window for layer in short.layers.values()} == {None}


def test_the_check_sees_one_wrong_layer_in_half_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        network = make_other("olmoe").to(torch.bfloat16)
        model = TransformersModel(network, 128)
        check_model(model, 96, 128)
        # As if one layer's scores had another scale over the pool than the class gives.
        layer = network.model.layers[1].self_attn
        forward = layer.forward

        def scaled(*args: Any, **kwargs: Any) -> Any:
            layer.scaling = 0.2 if network.config._attn_implementation == "penstock" else 16**-0.5
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", scaled)
        with pytest.raises(UnsupportedClass, match="its logits are not those of the whole prompt"):
            check_model(model, 96, 128)


def test_the_installed_transformers_has_what_the_registry_needs() -> None:
    assert callable(transformers.AttentionInterface.register)


def test_experts_of_any_size_are_served(tmp_path: Path) -> None:
    """Torch's grouped products, which the class prefers, take rows of whole 16 bytes alone."""
    path = save(make_other("mixtral", intermediate_size=37), tmp_path)
    executor = build_executor(engine_config(path), Phases())
    assert executor.info.model_impl == "transformers"
