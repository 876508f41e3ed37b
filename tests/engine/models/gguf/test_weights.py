"""Logits of a GGUF file are those of the model that it was made of."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from penstock.engine.config import LoadFormat
from penstock.engine.executors.loading import weight_bytes
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.gguf.check import check_gguf
from penstock.engine.models.gguf.weights import GgufWeights
from penstock.engine.models.layers.grouped import GroupedLinear, StackedLinear
from penstock.engine.models.layers.kept import AsStored
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.llama import LlamaModel
from penstock.engine.native.packing import FORMATS
from tests.support.gguf_files import TypeOf, load_transformers, plain, quantized, write_gguf
from tests.support.paths import STORIES
from tests.support.tiny_models import FAMILIES, Harness, make_model

PROMPT = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(1))
# The metadata has no place for these settings of YaRN.
WRITTEN = [family for family in FAMILIES if family not in ("llama_yarn", "qwen2_window")]


def logits(path: Path, prompt: Tensor = PROMPT, **options: Any) -> Tensor:
    harness = Harness(path, num_sequences=1, make_linear=PlainLinear, **options)
    harness.token_table[0, : len(prompt)] = prompt
    return harness.run([(0, 0, len(prompt))])[0]


def kept_formats(keeps_codes: bool) -> AsStored:
    return AsStored(FORMATS if keeps_codes else ())


def source(path: Path, dtype: torch.dtype = torch.float32, *, keeps_codes: bool) -> GgufWeights:
    return GgufWeights(path, partial(torch.empty, dtype=dtype), kept_formats(keeps_codes).num_bytes)


@pytest.mark.parametrize("family", WRITTEN)
def test_logits_of_every_family_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    path = write_gguf(tmp_path / "model.gguf", model)
    assert check_gguf(path) == ModelConfig.from_dir(path)
    with torch.inference_mode():
        expected = model(PROMPT.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=0)


def test_a_model_in_several_files_is_read_as_one(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", make_model("qwen3"))
    first = write_gguf(tmp_path / "parts.gguf", make_model("qwen3"), num_parts=3)
    assert first.name == "parts-00001-of-00003.gguf"
    assert torch.equal(logits(first), logits(whole))
    first.with_name("parts-00002-of-00003.gguf").unlink()
    with pytest.raises(InvalidModel, match=r"parts-00002-of-00003\.gguf does not exist"):
        check_gguf(first)


def dequantized(model: Any, type_of: TypeOf) -> Any:
    """The model with its weights rounded as the file has them, by llama.cpp's package."""
    architecture = gguf.MODEL_ARCH.QWEN2  # whose heads are not permuted
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        kind = type_of(str(names.get_name(name, try_suffixes=(".weight", ".bias"))))
        if parameter.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Type.F16
        packed = gguf.quants.quantize(parameter.data.numpy(), kind)
        parameter.data = torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())
    return model


@pytest.mark.parametrize(
    "kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
)
@pytest.mark.parametrize("keeps_codes", [True, False])
def test_quantized_weights_are_computed_as_the_numbers_they_stand_for(
    tmp_path: Path, kind: Type, keeps_codes: bool
) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("qwen2"), quantized(kind))
    model = dequantized(make_model("qwen2"), quantized(kind))
    with torch.inference_mode():
        expected = model(PROMPT.unsqueeze(0)).logits[0]
    found = logits(path, kept=kept_formats(keeps_codes))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_rows_of_llama_are_put_back_in_every_format(tmp_path: Path) -> None:
    model = make_model("llama2")
    plainly = source(write_gguf(tmp_path / "a.gguf", model), keeps_codes=True)
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(
        plainly.read((64, 64), f"{name}.weight"), model.state_dict()[f"{name}.weight"]
    )
    coded = source(write_gguf(tmp_path / "b.gguf", model, quantized(Type.Q4_0)), keeps_codes=True)
    linear = coded.quantized((64, 64), None, name)
    assert isinstance(linear, GroupedLinear)
    weight = model.state_dict()[f"{name}.weight"].numpy()
    rounded = gguf.quants.dequantize(gguf.quants.quantize(weight, Type.Q4_0), Type.Q4_0)
    assert torch.equal(linear.weight(), torch.from_numpy(rounded))


def test_layers_of_different_types_are_stacked(tmp_path: Path) -> None:
    def type_of(name: str) -> Type:
        kinds = {"attn_q": Type.Q4_0, "attn_k": Type.Q4_0, "attn_v": Type.Q5_0}
        return kinds.get(name.split(".")[-2], Type.Q8_0) if "norm" not in name else Type.F32

    model = make_model("qwen2")
    path = write_gguf(tmp_path / "model.gguf", model, type_of)
    prefix = "model.layers.0.self_attn."
    names = (f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj")
    bias = torch.arange(128.0)
    stacked = source(path, keeps_codes=True).quantized((128, 64), bias, *names)
    assert isinstance(stacked, StackedLinear)
    both, last = stacked.parts
    assert isinstance(both, GroupedLinear) and isinstance(last, PlainLinear)
    assert both.bits == 4 and both.out_features == 96
    assert torch.equal(stacked(torch.zeros(1, 64))[0], bias)


def test_a_layer_without_codes_is_plain(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("qwen2"), quantized(Type.Q5_1))
    assert source(path, keeps_codes=True).quantized((64, 64), None, "lm_head") is None


def test_what_dequantized_weights_cost_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("llama2"), quantized(Type.Q5_0))
    with caplog.at_level(logging.INFO):
        source(path, torch.bfloat16, keeps_codes=True)
    [line] = caplog.messages
    assert line.startswith("20 matrices (20 of Q5_0) are dequantized to bfloat16: they take 0.0")


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0, Type.Q5_0])
@pytest.mark.parametrize("family", ["llama2", "qwen2"])
@pytest.mark.parametrize("keeps_codes", [True, False])
def test_the_memory_of_weights_is_known_before_they_are_read(
    tmp_path: Path, family: str, kind: Type, keeps_codes: bool
) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model(family), quantized(kind))
    config, dtype = ModelConfig.from_dir(path), torch.bfloat16
    kept = kept_formats(keeps_codes)
    foretold = weight_bytes(config, LoadFormat.AUTO, path, dtype, kept=kept)
    model = Harness(path, dtype=dtype, make_linear=PlainLinear, kept=kept).model
    assert isinstance(model, LlamaModel)
    is_copy = not config.tied_embeddings or (keeps_codes and kind is Type.Q8_0)
    embedding = model.embedding.nbytes if is_copy else 0
    assert foretold == model.step_weight_bytes + embedding


@pytest.mark.parametrize(("dtype", "what"), [("float32", "not finite"), ("float16", "65504")])
def test_numbers_that_cannot_be_held_are_refused(tmp_path: Path, dtype: str, what: str) -> None:
    model = make_model("llama2")
    model.model.norm.weight.data[3] = float("nan") if dtype == "float32" else 1e5
    weights = source(
        write_gguf(tmp_path / "model.gguf", model), getattr(torch, dtype), keeps_codes=True
    )
    with pytest.raises(InvalidModel, match=f"'model.norm.weight' in .* {what}"):
        weights.read((64,), "model.norm.weight")


@pytest.mark.skipif(not STORIES.exists(), reason="no trained model beside the checkout")
def test_logits_of_a_trained_model_are_those_of_its_safetensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", load_transformers(STORIES), plain, tokenizer=STORIES)
    prompt = torch.tensor([1, 403, 407, 261, 378, 300, 20, 77])
    assert torch.equal(logits(path, prompt), logits(STORIES, prompt))
