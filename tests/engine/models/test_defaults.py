"""A config.json that lacks a key is read as one that has transformers' own default of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from tests.support.tiny_models import ALL_FAMILIES, made_config

# Sizes of tensors: one that is read otherwise than it was meant has another shape, and is refused.
_SIZES = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "global_head_dim"),
        *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "per_layer_config"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "linear_conv_kernel_dim", "use_double_wide_mlp"),
    }
)
# Names rather than settings; the longest sequence, which --max-model-len says too; and what ends an
# answer, which transformers believes of any model.
_NAMES = frozenset(
    {
        *("architectures", "model_type", "dtype", "transformers_version"),
        *("max_position_embeddings", "eos_token_id"),
    }
)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_missing_key_has_the_default_of_transformers(family: str, tmp_path: Path) -> None:
    config = made_config(family)
    config.save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    text = whole.get("text_config", whole)
    made_by: Any = type(config.get_text_config())
    compared = 0
    for key in sorted(text.keys() - _SIZES - _NAMES):
        rest = {name: value for name, value in text.items() if name != key}
        try:
            theirs = made_by.from_dict(dict(rest)).to_dict()
        except Exception:  # its validation raises errors of several kinds
            continue
        if key not in theirs:
            continue
        found = _read(tmp_path, whole, rest)
        expected = _read(tmp_path, whole, {**rest, key: theirs[key]})
        if found is not None and expected is not None:
            assert found == expected, f"without {key}, not as with {theirs[key]}"
            compared += 1
    assert compared > 5


def _read(path: Path, whole: dict[str, Any], text: dict[str, Any]) -> ModelConfig | None:
    """With these settings of the text model; None where they are refused."""
    content = {**whole, "text_config": text} if "text_config" in whole else text
    (path / "config.json").write_text(json.dumps(content))
    try:
        return ModelConfig.from_dir(path)
    except InvalidModel:
        return None
