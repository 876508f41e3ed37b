"""Every quantized format gives the numbers that it stands for, and the answers of transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.layers.linear import StoredLinear
from penstock.engine.models.weights import Checkpoint, RandomWeights
from tests.support.compiler import needs_compiler
from tests.support.paths import DEMO_MODEL
from tests.support.quantized_checkpoints import FORMATS, QuantizedFormat, fp8, gptq, save_quantized
from tests.support.tiny_models import Harness, make_model

TOLERANCE = 1e-4
# Groups of 32 fit it, and stacked parts of 64, 32 and 32 rows fit blocks of 32.
SIZES = {"intermediate_size": 96, "head_dim": 16}
PROMPT = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))


def saved(path: Path, quantized: QuantizedFormat, family: str = "llama2", **options: Any) -> Any:
    model = make_model(family, **SIZES)
    return save_quantized(model, path, quantized, **options)


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(PROMPT).logits[0]
    return logits


def our_logits(path: Path, *, native: bool = False) -> Tensor:
    harness = Harness(path, native=native, has_codes=native)
    harness.token_table[:1, : PROMPT.shape[1]] = PROMPT
    return harness.run([(0, 0, PROMPT.shape[1])])[0]


def read(path: Path, shape: tuple[int, int], *names: str) -> StoredLinear:
    checkpoint = Checkpoint(path, torch.empty, ModelConfig.from_dir(path).quantization)
    linear = checkpoint.quantized(shape, None, *names)
    assert linear is not None
    return linear


def weight_of(linear: StoredLinear, columns: int) -> Tensor:
    weight = torch.empty(linear.out_features, columns)
    linear.write_weight(weight)
    return weight


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_has_the_values_that_its_codes_stand_for(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, FORMATS[name])
    attention = model.model.layers[1].self_attn
    qkv = [f"model.layers.1.self_attn.{each}_proj" for each in "qkv"]
    linear = read(tmp_path, (192, 64), *qkv)
    assert linear.weight_format == FORMATS[name].weight_format
    expected = [each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(weight_of(linear, 64), torch.cat(expected))
    down = read(tmp_path, (64, 96), "model.layers.0.mlp.down_proj")
    assert torch.equal(weight_of(down, 96), model.model.layers[0].mlp.down_proj.weight)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("name", FORMATS)
def test_the_logits_are_those_of_transformers_with_the_same_values(
    name: str, native: bool, tmp_path: Path
) -> None:
    expected = logits_of(saved(tmp_path, FORMATS[name], "qwen3_bias"))
    found = our_logits(tmp_path, native=native)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["fp8-tensor", "ct-w4a16", "awq"])
def test_layers_that_are_not_quantized_stay_plain_whether_or_not_config_json_names_them(
    name: str, tmp_path: Path
) -> None:
    plain = ("lm_head", "layers.0", "k_proj", "up_proj")
    model = saved(tmp_path, FORMATS[name], plain=plain)
    checkpoint = Checkpoint(tmp_path, torch.empty, ModelConfig.from_dir(tmp_path).quantization)
    assert checkpoint.quantized((64, 64), None, "model.layers.0.self_attn.o_proj") is None
    qkv = read(tmp_path, (192, 64), *(f"model.layers.1.self_attn.{each}_proj" for each in "qkv"))
    assert qkv.weight_format == "stacked"
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model), atol=TOLERANCE, rtol=0)


def test_each_group_of_layers_has_its_own_format(tmp_path: Path) -> None:
    settings = FORMATS["ct-w4a16"].settings | {"format": "mixed-precision"}
    groups = [
        group_of("ct-fp8-channel") | {"targets": ["re:.*self_attn.*"]},
        group_of("ct-w8a16") | {"targets": ["model.layers.2.mlp.up_proj"]},
        group_of("ct-w4a16"),
    ]
    settings = settings | {"config_groups": dict(enumerate(groups))}

    packs = {"self_attn": "ct-fp8-channel", "layers.2.mlp.up_proj": "ct-w8a16"}
    model = make_model("llama2", **SIZES)
    mixed = QuantizedFormat("mixed", settings, FORMATS["ct-w4a16"].pack, "int4")
    by_layer = {part: FORMATS[each].pack for part, each in packs.items()}
    save_quantized(model, tmp_path, mixed, packs=by_layer)

    attention = read(tmp_path, (64, 64), "model.layers.0.self_attn.o_proj")
    gate_up = ("model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj")
    stacked = read(tmp_path, (192, 64), *gate_up)
    assert (attention.weight_format, stacked.weight_format) == ("fp8", "stacked")
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model), atol=TOLERANCE, rtol=0)


def group_of(name: str) -> dict[str, Any]:
    settings = FORMATS[name].settings
    group: dict[str, Any] = settings["config_groups"]["group_0"]
    return group | {"format": settings["format"]}


def test_dynamic_settings_of_gptq_change_and_exclude_layers(tmp_path: Path) -> None:
    dynamic = {"+:.*down_proj": {"bits": 8, "group_size": 32}, "-:.*layers\\.1\\..*": {}}
    four = FORMATS["gptq4"]
    quantized = QuantizedFormat("GPTQ", four.settings | {"dynamic": dynamic}, four.pack, "int4")
    model = make_model("llama2", **SIZES)
    packs = {"down_proj": gptq(8, 32)}
    save_quantized(model, tmp_path, quantized, plain=("lm_head", "layers.1."), packs=packs)
    assert read(tmp_path, (64, 96), "model.layers.0.mlp.down_proj").weight_format == "int8"
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model), atol=TOLERANCE, rtol=0)
    config = ModelConfig.from_dir(tmp_path)
    assert config.quantization is not None
    assert config.quantization.scheme_of("model.layers.1.mlp.down_proj") is None


@needs_compiler
def test_layers_that_are_stacked_may_have_different_orders_and_the_log_says_what_that_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packs = {"k_proj": gptq(4, 16, order_seed=2), "up_proj": gptq(4, 16, order_seed=3)}
    model = saved(tmp_path, FORMATS["gptq-act-order"], packs=packs)
    found = our_logits(tmp_path, native=True)
    torch.testing.assert_close(found, logits_of(model), atol=TOLERANCE, rtol=0)
    messages = [each for each in caplog.messages if "order their columns differently" in each]
    assert len(messages) == 2 * 3


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_of_0_borrows_from_its_neighbour_in_version_1(bits: int, tmp_path: Path) -> None:
    settings = FORMATS["gptq-asym"].settings | {"bits": bits}
    quantized = QuantizedFormat("GPTQ", settings, gptq(bits, 16, symmetric=False), "int4")
    model = make_model("llama2", **SIZES)
    q_proj = model.model.layers[0].self_attn.q_proj
    q_proj.weight.data[::3].abs_()
    save_quantized(model, tmp_path, quantized)
    linear = read(tmp_path, (64, 64), "model.layers.0.self_attn.q_proj")
    assert torch.equal(weight_of(linear, 64), q_proj.weight)


def test_a_symmetric_layer_may_have_the_zeros_of_version_2_and_say_version_1(
    tmp_path: Path,
) -> None:
    model = saved(tmp_path, replace(FORMATS["gptq-v2"], settings=FORMATS["gptq4"].settings))
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model), atol=TOLERANCE, rtol=0)


@needs_compiler
@pytest.mark.parametrize("name", ["gptq4", "gptq-act-order", "gptq-asym", "awq"])
def test_trained_weights_have_the_logits_of_their_values(name: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    save_quantized(model, tmp_path, FORMATS[name])
    found = our_logits(tmp_path, native=True)
    torch.testing.assert_close(found, logits_of(model), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("block", [(48, 32), (128, 128)])
def test_blocks_that_do_not_fit_stacked_layers_keep_their_values(
    block: tuple[int, int], tmp_path: Path
) -> None:
    settings = FORMATS["fp8-block"].settings | {"weight_block_size": list(block)}
    pack = fp8(block, "weight_scale_inv")
    model = saved(tmp_path, QuantizedFormat("FP8", settings, pack, "fp8"))
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model), atol=TOLERANCE, rtol=0)


def test_the_bytes_that_config_json_implies_are_those_of_the_layers(tmp_path: Path) -> None:
    names = ("fp8-block", "fp8-tensor", "ct-w4a16-asym", "ct-w8a16", "awq", "gptq8", "ct-nvfp4")
    for name in names:
        path = tmp_path / name
        saved(path, FORMATS[name])
        config, dtype_bytes = ModelConfig.from_dir(path), 4
        held = Harness(path).model
        assert isinstance(held, LlamaModel)
        assert config.step_weight_bytes(dtype_bytes) == held.step_weight_bytes, name
        embedding = config.vocab_size * config.hidden_size * dtype_bytes
        assert config.weight_bytes(dtype_bytes) == held.step_weight_bytes + embedding
        widened = config.weight_bytes(dtype_bytes, AsStored().num_bytes)
        assert widened == dtype_bytes * config.num_parameters


@pytest.mark.parametrize("name", FORMATS)
def test_a_made_up_layer_has_the_format_and_bytes_of_one_that_is_read(
    name: str, tmp_path: Path
) -> None:
    saved(tmp_path, FORMATS[name])
    config = ModelConfig.from_dir(tmp_path)
    qkv = [f"model.layers.1.self_attn.{each}_proj" for each in "qkv"]
    linear = read(tmp_path, (192, 64), *qkv)
    made_up = RandomWeights(torch.empty, config.quantization).quantized((192, 64), None, *qkv)
    assert made_up is not None
    assert made_up.weight_format == linear.weight_format
    assert made_up.num_bytes == linear.num_bytes
    assert 0.015 < float(weight_of(made_up, 64).std()) < 0.025
    plain = RandomWeights(torch.empty, config.quantization)
    assert plain.quantized((96, 64), None, "lm_head") is None


def test_scales_of_a_kv_cache_have_no_effect_and_are_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(tmp_path, FORMATS["modelopt-nvfp4"])
    caplog.set_level("INFO")
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model), atol=TOLERANCE, rtol=0)
    assert "scales for a quantized KV cache, which have no effect" in caplog.text

    caplog.clear()
    file = saved(tmp_path / "fp8", FORMATS["fp8-tensor"]) and tmp_path / "fp8/model.safetensors"
    our_logits(tmp_path / "fp8")
    assert not caplog.text
    save_file(load_file(file) | {"model.layers.0.self_attn.k_scale": torch.ones(1)}, file)
    our_logits(tmp_path / "fp8")
    assert "scales for a quantized KV cache" in caplog.text


def test_modelopts_settings_may_be_one_level_deeper(tmp_path: Path) -> None:
    modelopt = FORMATS["modelopt-fp8"]
    settings = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}
    model = saved(tmp_path, replace(modelopt, settings=settings))
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model), atol=TOLERANCE, rtol=0)


def test_a_checkpoint_whose_kv_cache_alone_is_quantized_is_plain(tmp_path: Path) -> None:
    settings = FORMATS["ct-w4a16"].settings
    group = {"targets": ["re:.*k_proj"], "weights": None, "output_activations": {"num_bits": 8}}
    changes = {"config_groups": {"group_0": group}, "kv_cache_scheme": {"num_bits": 8}}
    only_kv = replace(FORMATS["ct-w4a16"], settings=settings | changes)
    model = saved(tmp_path, only_kv, plain=("proj", "lm_head"))
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model), atol=TOLERANCE, rtol=0)


def test_float8_powers_of_two_are_scales_too(tmp_path: Path) -> None:
    model = saved(tmp_path, FORMATS["fp8-block"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("weight_scale_inv"):
            tensors[name] = tensor.to(torch.float8_e8m0fnu)
    save_file(tensors, file)
    o_proj = "model.layers.0.self_attn.o_proj"
    stored, scales = tensors[f"{o_proj}.weight"], tensors[f"{o_proj}.weight_scale_inv"].float()
    expected = stored.float() * scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(weight_of(read(tmp_path, (64, 64), o_proj), 64), expected)
    assert not torch.equal(expected, model.model.layers[0].self_attn.o_proj.weight)
