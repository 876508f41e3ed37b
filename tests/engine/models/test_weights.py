"""Checkpoints and configs: what is read, and the errors if it cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.hub.hub import open_model
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.weights import Checkpoint
from tests.support.paths import DEMO_MODEL
from tests.support.tiny_models import Harness, make_model, save


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(make_model("llama2"), tmp_path / "tiny")


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config |= changes
    kept = {name: value for name, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(kept))


def logits(path: Path) -> torch.Tensor:
    return Harness(path).run([(0, 0, 9)])[0]


def test_shards_give_the_logits_of_one_file(tiny: Path, tmp_path: Path) -> None:
    sharded = save(make_model("llama2"), tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(sharded), logits(tiny))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_disk_is_widened(tiny: Path, dtype: torch.dtype) -> None:
    expected = logits(tiny)
    file = tiny / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    torch.testing.assert_close(logits(tiny), expected, atol=0.3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_float16_cannot_hold_is_refused_with_a_type_that_can(
    tiny: Path, dtype: torch.dtype
) -> None:
    file = tiny / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = -70_000
    save_file(tensors, file)
    message = r"'model\.layers\.1\.mlp\.up_proj\.weight'.* 7.*65504; use --dtype bfloat16"
    with pytest.raises(InvalidModel, match=message):
        Harness(tiny, dtype=torch.float16)
    assert Harness(tiny, dtype=torch.bfloat16).run([(0, 0, 9)])[0].isfinite().all()


def test_a_weight_that_is_not_finite_in_the_checkpoint_is_not_blamed_on_float16(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][3] = float("nan")  # what a start does not check
    save_file(tensors, file)
    assert Harness(tiny, dtype=torch.float16).run([(0, 0, 9)])[0].isnan().any()


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(InvalidModel, match=r"lack the tensor 'model\.norm\.weight'"):
        logits(tiny)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded = save(make_model("llama2"), tmp_path, max_shard_size="100KB")
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(InvalidModel, match=shard.name):
        Checkpoint(sharded, torch.empty)


@pytest.mark.parametrize("size", [48, 128])
def test_an_unexpected_shape_is_named(tiny: Path, size: int) -> None:
    edit_config(tiny, intermediate_size=size)
    with pytest.raises(InvalidModel, match="has the shape"):
        logits(tiny)


def test_a_file_that_is_not_safetensors_is_named(tiny: Path) -> None:
    (tiny / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(InvalidModel, match="not a readable safetensors file"):
        logits(tiny)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported are LlamaFor"),
        ({"hidden_size": ...}, "lacks the field 'hidden_size'"),
        ({"num_hidden_layers": "many"}, "'num_hidden_layers' must be a positive integer"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "'ntk' rope scaling; supported are"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'short_factor' must be 8 positive"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters lacks the field 'factor'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": "4"}},
            "rope_parameters: 'factor' must be a positive number, not '4'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ between layers"),
        ({"rope_parameters": "linear"}, "must be an object or null, not 'linear'"),
        ({"rope_parameters": ..., "rope_theta": "big"}, "'rope_theta' must be a positive number"),
        ({"rope_parameters": {"rope_theta": 1}}, "'rope_theta' must be more than 1, not 1"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            r"'high_freq_factor' \(4\) must be more than 'low_freq_factor' \(4\)",
        ),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' must be a positive number, not -1"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": "4096"},
            "'sliding_window' must be a positive integer",
        ),
        ({"is_causal": False}, "is_causal: false"),
        ({"head_dim": 15}, "head_dim is 15; it must be even"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]},
            "for each of 3 layers",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked_attention"] * 3},
            "other kinds are not supported",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks the field 'factor'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config"),
        ({"quantization": {"bits": 4}}, "has a quantization, "),
        ({"num_experts": 8}, "num_experts: 8, .* only null or 0 or 1 is"),
        ({"num_local_experts": 8}, "num_local_experts: 8"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping: 50\.0"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping: 30\.0"),
        ({"residual_multiplier": 0.22}, "residual_multiplier: 0.22"),
        ({"attention_multiplier": 1.0}, "attention_multiplier: 1.0, .* only null or 0.25 is"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar: 256, .* only null or 16 is"),
        ({"clip_qkv": 8}, "clip_qkv: 8, .* only null is"),
        ({"alibi": True}, "alibi: true"),
        ({"rope_interleaved": True}, "rope_interleaved: true"),
        ({"logit_scale": "big"}, 'logit_scale: "big"'),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor rotates 3 of a head's 16"),
        ({"use_qk_norm": True}, "use_qk_norm: true"),
        ({"no_rope_layers": [1, 1, 0]}, r"no_rope_layers: \[1, 1, 0\]"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rotary positions with llama_4_scaling_beta: 0.1",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types other than 'full_attention'"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "layer_types other than 'sliding_attention'",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": "9",
            },
            "'sliding_window' must be a positive integer",
        ),
    ],
)
def test_a_config_that_cannot_be_served_says_why(
    tiny: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(tiny, **changes)
    with pytest.raises(InvalidModel, match=message):
        ModelConfig.from_dir(tiny)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 0, "num_local_experts": 1, "attn_logit_softcapping": None},
        {"attn_logit_softcapping": 0.0, "final_logit_softcapping": None, "clip_qkv": None},
        {"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0},
        {"attention_multiplier": 0.25, "query_pre_attn_scalar": 16.0},  # head_dim is 16
        {"use_qk_norm": False, "no_rope_layers": [1, 1, 1], "partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0}},
        {"layer_types": ["full_attention"] * 3, "quantization_config": None},
        {"hidden_activation": "silu", "rope_interleaved": False, "logit_scale": None},
    ],
)
def test_a_key_at_the_value_that_changes_nothing_is_accepted(
    tiny: Path, changes: dict[str, Any]
) -> None:
    before = ModelConfig.from_dir(tiny)
    edit_config(tiny, **changes)
    assert ModelConfig.from_dir(tiny) == before


def test_qwen3_may_say_that_it_normalizes_queries_and_keys(tmp_path: Path) -> None:
    path = save(make_model("qwen3"), tmp_path)
    before = ModelConfig.from_dir(path)
    edit_config(path, use_qk_norm=True)
    assert ModelConfig.from_dir(path) == before


@pytest.mark.parametrize("name", ["Granite", "Gemma2", "Cohere", "SmolLM3", "Mixtral"])
def test_another_architectures_settings_are_not_taken_for_llamas(tiny: Path, name: str) -> None:
    theirs = getattr(transformers, f"{name}Config")().to_dict()
    ours = json.loads((tiny / "config.json").read_text())
    edit_config(tiny, **(theirs | ours))
    with pytest.raises(InvalidModel, match="supported"):
        ModelConfig.from_dir(tiny)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_an_invalid_config_json_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidModel, match=r"config\.json does not exist"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidModel, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_end_tokens_are_those_of_generation_config(tiny: Path) -> None:
    edit_config(tiny, eos_token_id=2)
    (tiny / "generation_config.json").unlink(missing_ok=True)
    assert ModelConfig.from_dir(tiny).eos_token_ids == (2,)
    (tiny / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert ModelConfig.from_dir(tiny).eos_token_ids == (2, 7)


def test_mistrals_default_window_is_that_of_transformers(tiny: Path) -> None:
    edit_config(tiny, architectures=["MistralForCausalLM"], sliding_window=...)
    assert ModelConfig.from_dir(tiny).windows == (transformers.MistralConfig().sliding_window,) * 3


def test_yarn_lengthens_the_context_by_its_factor(tiny: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    edit_config(tiny, rope_parameters=..., rope_scaling=yarn, max_position_embeddings=128)
    assert ModelConfig.from_dir(tiny).max_model_len == 400
    edit_config(tiny, max_position_embeddings=512)
    assert ModelConfig.from_dir(tiny).max_model_len == 512


def test_float8_weights_are_refused_even_if_the_config_does_not_mention_them(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(InvalidModel, match="only float32, float16 and bfloat16"):
        Harness(tiny)


def theta_of(path: Path) -> float:
    rope = ModelConfig.from_dir(path).attentions[0].rope
    assert rope is not None
    return rope.theta


def test_rope_theta_is_read_in_both_spellings(tiny: Path) -> None:
    edit_config(tiny, rope_parameters={"rope_theta": 5.0, "rope_type": "default"})
    assert theta_of(tiny) == 5.0
    edit_config(tiny, rope_parameters=..., rope_theta=7.0)
    assert theta_of(tiny) == 7.0


def test_the_older_name_of_a_kind_may_stand_beside_the_newer(tiny: Path) -> None:
    both = {"rope_type": "linear", "type": "linear", "factor": 2.0}  # as transformers saves it
    edit_config(tiny, rope_parameters=both)
    rope = ModelConfig.from_dir(tiny).attentions[0].rope
    assert rope is not None and rope.kind == "linear"


def test_scaling_in_both_spellings_is_refused_where_they_differ(tiny: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    edit_config(tiny, rope_parameters={"rope_theta": 5.0, "rope_type": "default"})
    edit_config(tiny, rope_scaling=yarn)  # as many a model's page says it
    with pytest.raises(InvalidModel, match="delete rope_scaling"):
        ModelConfig.from_dir(tiny)
    older = {"type": "yarn", **yarn}
    del older["rope_type"]
    edit_config(tiny, rope_parameters={"rope_theta": 5.0, **yarn}, rope_scaling=older)
    assert ModelConfig.from_dir(tiny).max_model_len == 400
    assert theta_of(tiny) == 5.0


def test_a_local_directory_is_used_as_it_is() -> None:
    files = open_model(str(DEMO_MODEL))
    assert (files.directory, files.download) == (DEMO_MODEL, None)


def test_a_name_that_is_neither_a_directory_nor_an_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="check the path"):
        open_model(str(tmp_path / "no" / "such" / "model"))
