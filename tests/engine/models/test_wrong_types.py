"""Keys of a wrong type or an absurd size in a model's JSON files: refused at the start, by file and
key, and never a traceback."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.hub.check import check_directory
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.scheduler.errors import InvalidConfig, PenstockError
from penstock.server.config import PoolerConfig
from penstock.server.output.pooling import Pooler
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from tests.support.paths import DEMO_MODEL

SIZES = [0, -1, 10**18, 1e18, float("nan"), float("inf"), float("-inf"), 10**400, 1e-320]
WRONG: list[Any] = ["", "text", True, False, 7, 1.5, [], [None], [[]], ["a"], {}, {"a": []}]
VALUES = [*SIZES, *WRONG]

COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "is_causal")
OTHERS = (
    *("architectures", "model_type", "hidden_act", "hidden_activation", "eos_token_id"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps", "layer_types"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "no_rope_layers"),
    *("num_experts", "logit_scale", "clip_qkv", "partial_rotary_factor", "quantization_config"),
    *("matryoshka_dimensions", "is_matryoshka", "original_max_position_embeddings"),
    *("vision_config", "is_encoder_decoder"),
)
OF_FAMILIES = {
    "Phi3ForCausalLM": ("partial_rotary_factor", "rope_scaling", "sliding_window"),
    "SmolLM3ForCausalLM": ("no_rope_layers", "no_rope_layer_interval", "layer_types"),
    "Ministral3ForCausalLM": ("rope_parameters",),
    "GraniteForCausalLM": (
        *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    ),
    "Olmo3ForCausalLM": ("rope_parameters", "layer_types", "sliding_window", "rope_theta"),
    "SeedOssForCausalLM": ("attention_bias", "attention_out_bias"),
    "Exaone4ForCausalLM": ("sliding_window", "sliding_window_pattern"),
    "Gemma4ForCausalLM": (
        *("rope_parameters", "layer_types", "sliding_window", "global_head_dim", "top_k_experts"),
        *("num_global_key_value_heads", "attention_k_eq_v", "per_layer_config", "enable_moe_block"),
        *("num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
        *("use_bidirectional_attention", "final_logit_softcapping", "use_double_wide_mlp"),
    ),
    "Gemma3ForCausalLM": (
        *("rope_parameters", "rope_scaling", "rope_local_base_freq", "query_pre_attn_scalar"),
        *("sliding_window_pattern", "use_bidirectional_attention", "final_logit_softcapping"),
    ),
    "Gemma3ForConditionalGeneration": ("text_config", "tie_word_embeddings", "eos_token_id"),
    "Mistral3ForConditionalGeneration": ("text_config",),
}
ROPE = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("attention_factor", "truncate", "partial_rotary_factor", "short_factor", "long_factor"),
)
TOKENIZER = ("chat_template", "bos_token", "eos_token", "additional_special_tokens")


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    shutil.copy(DEMO_MODEL / "tokenizer_config.json", tmp_path)
    return tmp_path


def edit(directory: Path, file: str, **changes: object) -> None:
    path = directory / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content | changes))


def load_all(directory: Path) -> None:
    """What a start reads of a model before its weights."""
    check_directory(directory)
    GenerationDefaults.load(directory)
    Pooler.load(directory, PoolerConfig())
    PromptEncoder.load(directory, None)


def refuses_or_accepts(directory: Path, file: str, key: str) -> None:
    message = file
    try:
        load_all(directory)
    except PenstockError as error:
        message = str(error)
    assert len(message) < 1_000 and "\n" not in message
    assert file in message or key in message


def config_keys() -> Iterator[tuple[dict[str, object], str]]:
    for key in (*COUNTS, *FLAGS, *OTHERS):
        yield {}, key
    for family in ("Mistral", "Qwen3"):
        for key in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
            extra = {"sliding_window": 8, "use_sliding_window": True} if family == "Qwen3" else {}
            yield extra | {"architectures": [f"{family}ForCausalLM"]}, key
    for family, keys in OF_FAMILIES.items():
        activation = "gelu_pytorch_tanh" if family.startswith("Gemma") else "silu"
        for key in keys:
            yield {"hidden_act": activation, "architectures": [family]}, key


@pytest.mark.parametrize(("extra", "key"), list(config_keys()))
def test_no_value_in_config_json_is_a_traceback(
    demo: Path, extra: dict[str, object], key: str
) -> None:
    for value in VALUES:
        edit(demo, "config.json", **(extra | {key: value}))
        refuses_or_accepts(demo, "config.json", key)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "longrope"])
@pytest.mark.parametrize("key", ROPE)
def test_no_value_in_rope_scaling_is_a_traceback(demo: Path, kind: str, key: str) -> None:
    good = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 1024}
    good |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    good |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    for value in VALUES:
        edit(demo, "config.json", rope_parameters=good | {key: value})
        refuses_or_accepts(demo, "config.json", key)


@pytest.mark.parametrize(
    "key", ["eos_token_id", "temperature", "top_p", "top_k", "repetition_penalty"]
)
def test_no_value_in_generation_config_is_a_traceback(demo: Path, key: str) -> None:
    for value in VALUES:
        edit(demo, "generation_config.json", **{key: value})
        refuses_or_accepts(demo, "generation_config.json", key)


@pytest.mark.parametrize("key", TOKENIZER)
def test_no_value_in_tokenizer_config_is_a_traceback(demo: Path, key: str) -> None:
    several = [[{"name": "default", "template": value}] for value in VALUES]
    for value in [*VALUES, *several, [{"name": "default"}], [{"name": []}]]:
        edit(demo, "tokenizer_config.json", **{key: value})
        refuses_or_accepts(demo, "tokenizer_config.json", key)


def test_no_value_in_the_files_of_a_pooler_is_a_traceback(demo: Path) -> None:
    for value in VALUES:
        for modules in (value, [value], [{"type": value}], [{"type": "a.Pooling", "path": value}]):
            (demo / "modules.json").write_text(json.dumps(modules))
            refuses_or_accepts(demo, "modules.json", "modules")
        (demo / "modules.json").write_text("[]")
        edit(demo, "1_Pooling/config.json", pooling_mode=value, pooling_mode_mean_tokens=value)
        refuses_or_accepts(demo, "1_Pooling/config.json", "pooling_mode")


@pytest.mark.parametrize(
    "content", ["", "{", "null", "7", '"a"', "[]", "[" * 100_000, '{"a": ' + "9" * 5_000 + "}"]
)
@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_file_that_holds_no_object_is_named(demo: Path, file: str, content: str) -> None:
    (demo / file).write_text(content)
    with pytest.raises(PenstockError, match=file.removesuffix(".json")):
        load_all(demo)
    (demo / file).write_bytes(b"\xff\xfe{}")
    with pytest.raises(PenstockError, match=file.removesuffix(".json")):
        load_all(demo)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("generation_config.json", "eos_token_id", "2"),
        ("generation_config.json", "eos_token_id", [2, None]),
        ("config.json", "eos_token_id", True),
        ("config.json", "architectures", "LlamaForCausalLM"),
        ("config.json", "architectures", [7]),
        ("config.json", "model_type", {}),
        ("config.json", "hidden_act", ["silu"]),
        ("config.json", "tie_word_embeddings", "false"),
        ("config.json", "attention_bias", 1),
        ("config.json", "rms_norm_eps", float("inf")),
        ("config.json", "rms_norm_eps", float("nan")),
        ("config.json", "rms_norm_eps", 1e-320),
        ("config.json", "rope_theta", 10**400),
        ("config.json", "layer_types", [["full_attention"]]),
        *(("config.json", key, value) for key in COUNTS for value in ("8", 0, -1, 10**18, 2.5)),
        *(("config.json", key, "yes") for key in FLAGS),
    ],
)
def test_the_engine_refuses_it(demo: Path, file: str, key: str, value: object) -> None:
    edit(demo, "config.json", rope_parameters=None)
    edit(demo, file, **{key: value})
    with pytest.raises(InvalidModel, match=f"{file}: '{key}'"):
        ModelConfig.from_dir(demo)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", 1e18),
        ("top_k", 1.5),
        ("top_k", 10**18),
        ("top_p", True),
        ("top_p", [0.9]),
        ("repetition_penalty", 0),
    ],
)
def test_the_server_refuses_it(demo: Path, key: str, value: object) -> None:
    edit(demo, "generation_config.json", **{key: value})
    with pytest.raises(InvalidConfig, match=f"generation_config.json: '{key}'"):
        GenerationDefaults.load(demo)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chat_template", {"default": "x"}),
        ("chat_template", ["x"]),
        ("chat_template", [{"name": "default", "template": 7}]),
        ("eos_token", 2),
        ("bos_token", {"content": None}),
    ],
)
def test_a_tokenizers_settings_are_refused_by_name(demo: Path, key: str, value: object) -> None:
    edit(demo, "tokenizer_config.json", **{key: value})
    with pytest.raises(InvalidConfig, match=f"tokenizer_config.json: '{key}'"):
        PromptEncoder.load(demo, None)


def test_an_end_token_outside_of_the_vocabulary_has_no_effect_and_is_warned_of(
    demo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(demo, "generation_config.json", eos_token_id=[2, 2048])
    assert ModelConfig.from_dir(demo).eos_token_ids == (2,)
    assert "eos_token_id 2048" in caplog.text and "outside of the vocabulary" in caplog.text
