"""Checkpoints of Qwen3.5 in every format, dense and mixtures: the numbers that their codes stand
for, and the answers of transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.formats.config import QuantizationConfig
from penstock.engine.models.layers.linear import PlainLinear, StoredLinear
from penstock.engine.models.weights import Checkpoint
from tests.support.compiler import needs_compiler
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.tiny_models import Harness, make_model, save

TOLERANCE = 1e-4
PROMPT = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(1))
# Parts of whole groups and blocks, on two ranks too, and of whole words of AWQ's.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "intermediate_size": 128,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_num_value_heads": 8,
    }
}
SIZES["qwen3_5_moe"] = SIZES["qwen3_5"] | {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
# As the published ones: few rows, of which a state forgets or keeps what it has.
GATES = ("in_proj_a", "in_proj_b")
PLAIN = ("lm_head", "shared_expert_gate", *GATES)
# Others are made as these are, and read by the same lines.
QUICK = {"fp8-block", "ct-fp8-channel", "ct-w4a16", "awq", "gptq4", "gptq-act-order"}
all_formats = pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS],
)
families = pytest.mark.parametrize("family", SIZES)
on_both_paths = pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=needs_compiler)], ids=["torch", "compiled"]
)


def saved(path: Path, name: str, family: str, plain: tuple[str, ...] = PLAIN) -> Any:
    model = make_model(family, **SIZES[family])
    return save_quantized(model, path, FORMATS[name], plain, has_experts="moe" in family)


@torch.inference_mode()
def check_logits(model: Any, path: Path, *, native: bool) -> None:
    harness = Harness(path, native=native, has_codes=native)
    harness.token_table[0, : PROMPT.shape[1]] = PROMPT[0]
    found = harness.run([(0, 0, 17)]) + harness.run([(0, 17, 6)])
    found += harness.run([(0, 23, 1)], num_decodes=1)
    expected = model(PROMPT).logits[0]
    torch.testing.assert_close(torch.cat(found), expected, atol=TOLERANCE, rtol=0)


def read(path: Path, shape: tuple[int, int], *names: str) -> Tensor:
    checkpoint = Checkpoint(path, torch.empty, ModelConfig.from_dir(path).quantization)
    linear: StoredLinear | None = checkpoint.quantized(shape, None, *names)
    assert linear is not None, names
    weight = torch.empty(shape)
    linear.write_weight(weight)
    return weight


@families
@pytest.mark.parametrize("name", FORMATS)
def test_gated_delta_nets_and_experts_have_the_values_that_their_codes_stand_for(
    name: str, family: str, tmp_path: Path
) -> None:
    layer = saved(tmp_path, name, family).model.layers[0]
    net, prefix = layer.linear_attn, "model.layers.0"
    inputs = torch.cat([net.in_proj_qkv.weight, net.in_proj_z.weight])
    names = [f"{prefix}.linear_attn.in_proj_{each}" for each in ("qkv", "z")]
    assert torch.equal(read(tmp_path, (768, 64), *names), inputs)
    output = read(tmp_path, (64, 256), f"{prefix}.linear_attn.out_proj")
    assert torch.equal(output, net.out_proj.weight)
    if family == "qwen3_5_moe":
        experts = [f"{prefix}.mlp.experts.{number}" for number in range(6)]
        gates = [f"{each}.{part}_proj" for each in experts for part in ("gate", "up")]
        found = read(tmp_path, (6 * 64, 64), *gates)
        assert torch.equal(found, layer.mlp.experts.gate_up_proj.flatten(0, 1))
        found = read(tmp_path, (6 * 64, 32), *(f"{each}.down_proj" for each in experts))
        assert torch.equal(found, layer.mlp.experts.down_proj.flatten(0, 1))


@families
@on_both_paths
@all_formats
def test_the_logits_are_those_of_transformers_with_the_same_values(
    name: str, native: bool, family: str, tmp_path: Path
) -> None:
    check_logits(saved(tmp_path, name, family), tmp_path, native=native)


@on_both_paths
@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor", "ct-w8a8", "awq", "gptq-act-order"])
def test_gates_of_states_may_be_quantized_too(name: str, native: bool, tmp_path: Path) -> None:
    """Of FP8 in blocks, those of beta and those of the decay are in blocks of their own."""
    check_logits(saved(tmp_path, name, "qwen3_5", ("lm_head",)), tmp_path, native=native)


@on_both_paths
@pytest.mark.parametrize("plain", ["in_proj_z", "in_proj_qkv", "out_proj"])
@pytest.mark.parametrize("name", ["fp8-block", "gptq4"])
def test_any_matrix_of_a_delta_net_may_be_plain(
    name: str, plain: str, native: bool, tmp_path: Path
) -> None:
    model = saved(tmp_path, name, "qwen3_5", (*PLAIN, plain))
    check_logits(model, tmp_path, native=native)


@families
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["fp8-block", "awq"])
def test_the_bytes_that_config_json_implies_are_those_of_the_layers(
    name: str, num_ranks: int, family: str, tmp_path: Path
) -> None:
    saved(tmp_path, name, family)
    settings = json.loads((tmp_path / "config.json").read_text())
    key = "modules_to_not_convert"
    settings["quantization_config"][key] = [*GATES, "mlp.gate", "shared_expert_gate", "lm_head"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    whole = ModelConfig.from_dir(tmp_path)
    shard = Shard(whole, 1, num_ranks)
    checkpoint = Checkpoint(
        tmp_path, torch.empty, whole.quantization, shard if num_ranks > 1 else None
    )
    held = LlamaModel(
        shard.config,
        checkpoint,
        PlainLinear,
        max_model_len=64,
        device=torch.device("cpu"),
        shard=shard,
    )
    assert shard.config.step_weight_bytes(4) == held.step_weight_bytes
    assert shard.config.expert_bytes(4) == held.expert_bytes


# As published: Qwen's FP8 and GPTQ, and what LLM Compressor's examples for the family write.
_PREFIX = "model.language_model.layers.0"
PUBLISHED: dict[str, dict[str, Any]] = {
    "FP8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            "model.language_model.embed_tokens",
            f"{_PREFIX}.linear_attn.conv1d",
            f"{_PREFIX}.linear_attn.in_proj_a",
            f"{_PREFIX}.linear_attn.in_proj_b",
            f"{_PREFIX}.mlp.gate",
            f"{_PREFIX}.mlp.shared_expert_gate",
            "model.visual.blocks.0.attn.qkv",
            "mtp.fc",
        ],
    },
    "GPTQ": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "dynamic": {
            "lm_head": {},
            "model.language_model.embed_tokens": {},
            "-:.*attn.*": {},
            "-:.*shared_expert.*": {},
            "-:.*mtp.*": {},
            "-:.*visual.*": {},
        },
    },
    "compressed-tensors": FORMATS["ct-w4a16"].settings
    | {
        "ignore": [
            "re:.*lm_head",
            "re:model.visual.*",
            "re:.*mlp.gate$",
            "re:.*shared_expert_gate$",
            "re:.*linear_attn.*",
        ]
    },
}


OF_DELTA_NETS = [
    f"linear_attn.{each}" for each in ("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj")
]


def quantized_names(config: QuantizationConfig) -> set[str]:
    names = {
        *OF_DELTA_NETS,
        *("self_attn.q_proj", "mlp.experts.3.up_proj", "mlp.shared_expert.up_proj"),
        *("mlp.gate", "mlp.shared_expert_gate"),
    }
    return {name for name in names if config.scheme_of(f"model.layers.0.{name}") is not None}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("FP8", {"linear_attn.in_proj_b"}),
        (
            "GPTQ",
            {*OF_DELTA_NETS, "self_attn.q_proj", "mlp.shared_expert.up_proj"},
        ),
        ("compressed-tensors", {*OF_DELTA_NETS}),
    ],
)
def test_what_published_checkpoints_leave_plain_is_understood(
    name: str, plain: set[str], tmp_path: Path
) -> None:
    path = save(make_model("qwen3_5_moe_wrapped"), tmp_path)
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = PUBLISHED[name]
    (path / "config.json").write_text(json.dumps(settings))
    found = ModelConfig.from_dir(path).quantization
    assert found is not None
    everything = quantized_names(replace(found, ignored=(), groups=found.groups[-1:]))
    left = {"mlp.shared_expert_gate", "mlp.gate"} if name != "GPTQ" else {"mlp.shared_expert_gate"}
    assert everything - quantized_names(found) == plain | left


@needs_compiler
def test_a_checkpoint_with_an_encoder_is_read_by_the_names_of_its_text_model(
    tmp_path: Path,
) -> None:
    sizes = SIZES["qwen3_5_moe"]
    model = make_model("qwen3_5_moe_wrapped", **sizes)
    plain = (*PLAIN, "visual", "attn", "shared_expert")
    settings = FORMATS["gptq4"].settings | {"dynamic": PUBLISHED["GPTQ"]["dynamic"]}
    quantized = replace(FORMATS["gptq4"], settings=settings)
    save_quantized(model, tmp_path, quantized, plain, has_experts=True)
    check_logits(model, tmp_path, native=True)
