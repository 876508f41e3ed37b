"""What is near a served format and is not served is refused by its name, before tensors are read;
tensors that do not fit their format are named."""

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
from tests.support.quantized_checkpoints import FORMATS, compressed, save_quantized
from tests.support.tiny_models import Harness, make_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4}
TRANSFORMS = {"config_groups": {"R1": {"type": "hadamard"}}}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def parse(directory: Path, **keys: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(CONFIG | keys))
    return ModelConfig.from_dir(directory)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ with checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 2}}}, "GPTQ of 2 bits"),
        (AWQ | {"version": "gemv"}, "AWQ with version 'gemv'"),
        (AWQ | {"bits": 8}, "AWQ with bits 8"),
        (AWQ | {"zero_point": False}, "AWQ with zero_point False"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 with fmt 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt 'W4A8_AWQ'"),
        ({"quant_method": "modelopt"}, "ModelOpt"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors of no groups"),
        (compressed("marlin-24", **INT4), "compressed-tensors marlin-24"),
        (
            compressed("pack-quantized", **INT4)
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors sparse-24-bitmask",
        ),
        (
            compressed("pack-quantized", **INT4) | {"transform_config": TRANSFORMS},
            "compressed-tensors with transforms",
        ),
        (
            compressed("pack-quantized", **INT4, actorder="group"),
            "compressed-tensors pack-quantized with actorder 'group'",
        ),
        (
            compressed("pack-quantized", **INT4 | {"num_bits": 3}),
            "compressed-tensors pack-quantized of 3 bits, int, strategy 'group'",
        ),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="token"),
            "compressed-tensors float-quantized of 8 bits, float, strategy 'token'",
        ),
    ],
)
def test_a_variant_that_is_not_served_is_refused_by_its_name(
    settings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel) as refused:
        parse(tmp_path, quantization_config=settings)
    assert f"in the format {name}, which is not supported; use a version" in str(refused.value)


def test_mlx_is_refused_by_its_name(tmp_path: Path) -> None:
    settings = {"group_size": 64, "bits": 4}
    with pytest.raises(InvalidModel, match="the format MLX"):
        parse(tmp_path, quantization=settings, quantization_config=settings)


def test_what_modelopt_does_not_serve_is_refused_in_its_own_file_too(tmp_path: Path) -> None:
    content = {"quantization": {"quant_algo": "MIXED_PRECISION"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(InvalidModel, match=r"hf_quant_config.json has a quantization, .*MIXED_PR"):
        parse(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GPTQ | {"group_size": 0}, "'group_size' must be a positive integer, not 0"),
        (GPTQ | {"dynamic": {"+:x": 4}}, "'dynamic' must be objects by regular expression"),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"has 're:\(', which is no regular expression"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"'weight_block_size' must be two positive integers, such as \[128, 128\], not \[128\]",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": "W4A16"}},
            "'config_groups.group_0' must be an object, not 'W4A16'",
        ),
        (compressed("pack-quantized", **INT4) | {"ignore": "lm_head"}, "'ignore' must be a list"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=message):
        parse(tmp_path, quantization_config=settings)


Q = "model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Tensor]], Any]


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(f"{Q}.{name}")


def with_value(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.{name}"] = change(tensors[f"{Q}.{name}"]).contiguous()

    return apply


def nan(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor.float(), torch.nan).to(tensor.dtype)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8-tensor", without("weight_scale"), "lack the tensor '{}.weight_scale'"),
        ("fp8-tensor", with_value("weight_scale", nan), "'{}.weight_scale' .*not finite"),
        ("fp8-tensor", with_value("weight", nan), "'{}.weight' .*has numbers that are NaN"),
        (
            "fp8-tensor",
            with_value("weight_scale", lambda scale: scale.repeat(7)),
            r"'{}.weight_scale' .*has the shape \(7,\), which does not fit the \(64, 1\)",
        ),
        (
            "fp8-block",
            with_value("weight_scale_inv", lambda scale: scale[:1]),
            r"'{}.weight_scale_inv' .*has the shape \(1, 2\), which does not fit the \(2, 2\)",
        ),
        (
            "fp8-block",
            with_value("weight", lambda weight: weight[:32]),
            r"'{}.weight_scale_inv' .*has the shape \(2, 2\), which does not fit the \(1, 2\)",
        ),
        (
            "fp8-tensor",
            with_value("weight", lambda weight: weight[:32]),
            "'{}', .* have 160 rows in all, not the 192 that config.json implies",
        ),
        (
            "fp8-tensor",
            with_value("weight", lambda weight: weight.view(torch.uint8)),
            r"'{}.weight' .*is torch.uint8; the quantization implies torch.float8_e4m3fn",
        ),
        (
            "fp8-tensor",
            with_value("weight", lambda weight: weight[:0]),
            "'{}', .* have 128 rows in all, not the 192",
        ),
        (
            "ct-w4a16",
            with_value("weight_packed", lambda packed: packed[0]),
            "'{}.weight_packed' .*has 1 dimensions, not 2",
        ),
        ("ct-w4a16", without("weight_scale"), "lack the tensor '{}.weight_scale'"),
        (
            "ct-w4a16",
            with_value("weight_scale", lambda scale: scale.int()),
            r"'{}.weight_scale' .*is torch.int32; the quantization implies torch.float32 or",
        ),
        (
            "ct-w4a16",
            with_value("weight_packed", lambda packed: packed[:, :4]),
            r"'{}.weight_packed' .*has the shape \(64, 4\), which does not fit the \(64, 8\)",
        ),
        (
            "ct-w4a16",
            with_value("weight_shape", lambda shape: shape * 2),
            r"'{}.weight_shape' .*is \[128, 128\], not \[64, 64\]",
        ),
        (
            "ct-w4a16-asym",
            with_value("weight_zero_point", lambda zeros: zeros[:2]),
            "'{}.weight_zero_point' .*has the shape",
        ),
        ("ct-w4a16-asym", without("weight_zero_point"), "lack the tensor '{}.weight_zero_point'"),
        ("awq", without("qzeros"), "lack the tensor '{}.qzeros'"),
        ("awq", with_value("qweight", lambda packed: packed[:8]), r"'{}.qweight' .*the shape \(8,"),
        (
            "gptq4",
            with_value("qzeros", lambda zeros: zeros + 1),
            "'{}.qzeros' .*has zeros other than 8, so the layer is not symmetric",
        ),
        (
            "gptq4",
            with_value("g_idx", torch.zeros_like),
            "'{}.g_idx' .*has groups of other sizes than the 16 of config.json",
        ),
        (
            "ct-mxfp4",
            with_value("weight_scale", lambda scale: torch.full_like(scale, 255)),
            "'{}.weight_scale' .*not finite",
        ),
        (
            "ct-nvfp4",
            with_value("weight_global_scale", torch.zeros_like),
            "'{}.weight_global_scale' .*not finite",
        ),
        (
            "modelopt-nvfp4",
            with_value("weight_scale", lambda scale: scale.float()),
            r"'{}.weight_scale' .*is torch.float32; the quantization implies torch.float8_e4m3fn",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_its_format_is_named(
    name: str, change: Change, message: str, tmp_path: Path
) -> None:
    save_quantized(make_model("llama2", intermediate_size=96), tmp_path, FORMATS[name])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(InvalidModel, match=message.format(Q)):
        Harness(tmp_path)


def test_a_quantized_layer_that_no_group_has_is_named(tmp_path: Path) -> None:
    save_quantized(make_model("llama2", intermediate_size=96), tmp_path, FORMATS["ct-w4a16"])
    config = json.loads((tmp_path / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["targets"] = ["re:.*mlp.*"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match=f"the layer '{Q}' .*none of its groups has it"):
        Harness(tmp_path)
