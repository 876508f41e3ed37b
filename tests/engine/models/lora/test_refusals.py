"""What an adapter may not be, each refused by name."""

import itertools
import json
import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.errors import AdapterRefused
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.lora.peft import PeftConfig
from penstock.engine.models.lora.weights import adapter_digest, read_adapter
from penstock.engine.models.parts.adapter import Adapter
from penstock.engine.step.adapter_commands import answer_to
from penstock.engine.step.model_info import LoadedAdapter
from penstock.scheduler.errors import PenstockError
from tests.support.adapters import change_settings, save_adapter
from tests.support.tiny_models import CPU, make_model, save

MAX_RANK = 8
_FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelConfig]:
    model = make_model("llama2")
    return model, ModelConfig.from_dir(save(model, tmp_path_factory.mktemp("base")))


@pytest.fixture
def adapter(base: tuple[Any, ModelConfig], tmp_path: Path) -> Path:
    return save_adapter(base[0], tmp_path / "adapter")


def read(adapter: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Adapter:
    adapter_digest(adapter)
    return read_adapter(adapter, config, dtype, CPU, MAX_RANK)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    "DoRA": ({"use_dora": True}, "use_dora means DoRA"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "bias of layers": ({"lora_bias": True}, "lora_bias means biases"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save means whole modules"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out means transposed"),
    "tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices means changed token"),
    "parameters": ({"target_parameters": ["mlp.experts.up"]}, "target_parameters means"),
    "aLoRA": ({"alora_invocation_tokens": [5]}, r"invocation tokens \(aLoRA\)"),
    "another base": ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter"),
    "unknown": ({"use_new_product": {"a": 1}}, "use_new_product is not known here"),
    "rank": ({"r": 9}, "has rank 9, and --max-lora-rank is 8; start the server with .* 9"),
    "rank pattern": ({"rank_pattern": {"up_proj": 64}}, "up_proj has rank 64"),
    "no number": ({"r": "x"}, "'r' must be a positive integer"),
    "bad pattern": ({"rank_pattern": {"up_proj": 1.5}}, "rank_pattern"),
    "bad alphas": ({"alpha_pattern": {"up_proj": 10**400}}, "alpha_pattern"),
    "bad layers' pattern": ({"layers_pattern": 5}, "layers_pattern"),
    "bad layers": ({"layers_to_transform": ["a"]}, "layers_to_transform"),
    "other layers": ({"target_modules": ["c_attn"]}, "of no layer of this model|names no layer"),
    "more layers in the file": ({"target_modules": ["q_proj"]}, "which is of no layer of this"),
    "a wrong rank": ({"r": 5}, r"shape \(4, 64\), and \(5, 64\) is what"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_computed_are_refused_by_name(
    case: str, base: tuple[Any, ModelConfig], adapter: Path
) -> None:
    settings, reason = SETTINGS[case]
    with pytest.raises(PenstockError, match=reason):
        read(change_settings(adapter, **settings), base[1])


# On the name of a layer `re` backtracks through it for minutes: each part may end anywhere.
_EXPONENTIAL = r"(\w+\.?)+!"
_PATTERNS: dict[str, Callable[[str], Any]] = {
    "target_modules": lambda pattern: pattern,
    "exclude_modules": lambda pattern: pattern,
    "layers_pattern": lambda pattern: [pattern],
    "rank_pattern": lambda pattern: {pattern: 4},
    "alpha_pattern": lambda pattern: {pattern: 4},
}


_INVALID = {
    "cut off": ("(", ""),
    "nested": ("(" * 5000 + ")" * 5000, "maximum recursion depth"),
    "repeated": ("a{1,99999999999}", "the repetition number"),
}


@pytest.mark.parametrize(
    ("field", "pattern", "reason"),
    [
        pytest.param(
            field, pattern, f"has what is no regular expression: {reason}", id=f"{field}-{name}"
        )
        for field in _PATTERNS
        for name, (pattern, reason) in _INVALID.items()
    ]
    # Two seconds each; all fields are matched by the same process.
    + [
        (field, _EXPONENTIAL, "takes more than 2 s or 256 MiB to match")
        for field in ("target_modules", "rank_pattern")
    ],
)
def test_a_pattern_that_cannot_be_matched_in_time_is_refused_by_file_and_field(
    field: str, pattern: str, reason: str, base: tuple[Any, ModelConfig], adapter: Path
) -> None:
    file = change_settings(adapter, **{field: _PATTERNS[field](pattern)}) / "adapter_config.json"
    with pytest.raises(AdapterRefused) as refused:
        read(adapter, base[1])
    assert str(refused.value).startswith(f"{file}: {field} {reason}")


def test_what_a_pattern_of_layers_makes_of_their_number_need_not_be_one(
    base: tuple[Any, ModelConfig], adapter: Path
) -> None:
    for pattern in ("layers|(x)", "(?#"):
        change_settings(adapter, layers_pattern=pattern, layers_to_transform=[0])
        with pytest.raises(AdapterRefused):
            read(adapter, base[1])


_FIELDS = (
    *("peft_type", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "use_dora"),
    *("init_lora_weights", "modules_to_save", "layer_replication", "revision", "\ud800", ""),
)
_HUGE = 10**400
_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, _HUGE, 1.5, 1e308, "", "x", "\ud800", "(\ud800", "q_proj", "(?P=a)"),
    *([], [None], [[]], [_HUGE], [0], [-1], [True], ["\ud800"], [""], ["(", "x"]),
    *({}, {"": None}, {"\ud800": 1}, {"q_proj": []}, {"q_proj": _HUGE}, {"q_proj": -_HUGE}),
    *({"q_proj": True}, {"q_proj": 0}, {"q_proj": 1e-320}, {"q_proj": "\ud800"}, {".*": 4}),
)


@pytest.mark.parametrize("field", _FIELDS)
def test_whatever_a_field_holds_it_is_understood_or_refused(field: str, adapter: Path) -> None:
    """Anything else would end the engine. The refusal can be sent."""
    names = [f"model.layers.{i}.self_attn.{each}" for i in range(2) for each in ("q_proj", "x")]
    original = (adapter / "adapter_config.json").read_text()
    for value, layers in itertools.product(_VALUES, (None, [0])):
        change_settings(adapter, **{"layers_to_transform": layers} | {field: value})
        loaded: Future[LoadedAdapter] = Future()
        try:
            config = PeftConfig(adapter, MAX_RANK)
            config.match(names)
            for name in filter(config.applies_to, names):
                assert 1 <= config.rank(name) <= MAX_RANK and math.isfinite(config.scale(name))
        except PenstockError as error:
            loaded.set_exception(error)
            assert answer_to(1, loaded).message.encode()
        (adapter / "adapter_config.json").write_text(original)


def test_a_config_of_more_than_a_mebibyte_is_refused_unread(
    base: tuple[Any, ModelConfig], adapter: Path
) -> None:
    change_settings(adapter, revision="x" * (1 << 20))
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json has more than 1048576 bytes"):
        read(adapter, base[1])


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "DoRA": (
        lambda t: t.update({f"{_FIRST}.lora_magnitude_vector": torch.ones(64)}),
        "of DoRA, which is not supported",
    ),
    "an output layer": (
        lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}),
        "of a changed output layer",
    ),
    "embeddings": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4)}),
        "of changed token embeddings",
    ),
    "a bias": (lambda t: t.update({f"{_FIRST}.lora_B.bias": torch.ones(64)}), "of biases of LoRA"),
    "another family": (
        lambda t: t.update(
            {"base_model.model.transformer.h.0.c_attn.lora_A.weight": torch.ones(4)}
        ),
        "of no layer of a Llama-like model",
    ),
    "a missing one": (lambda t: t.pop(f"{_FIRST}.lora_B.weight"), "lacks the tensor"),
    "another shape": (
        lambda t: t.update({f"{_FIRST}.lora_B.weight": torch.ones(80, 4)}),
        r"has the shape \(80, 4\), and \(64, 4\)",
    ),
    "one more layer": (
        lambda t: t.update({_FIRST.replace(".0.", ".9.") + ".lora_A.weight": torch.ones(4, 64)}),
        "is of no layer of this model",
    ),
    "integers": (
        lambda t: t.update({f"{_FIRST}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}),
        "only float32, float16 and bfloat16",
    ),
    "not a number": (lambda t: t[f"{_FIRST}.lora_A.weight"].fill_(torch.nan), "not finite"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_computed_are_refused_by_name(
    case: str, base: tuple[Any, ModelConfig], adapter: Path
) -> None:
    change, reason = TENSORS[case]
    file = adapter / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(PenstockError, match=reason):
        read(adapter, base[1])


def test_a_number_that_float16_cannot_hold_is_refused(
    base: tuple[Any, ModelConfig], adapter: Path
) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors[f"{_FIRST}.lora_A.weight"][0, 0] = 1e6
    save_file(tensors, file)
    with pytest.raises(PenstockError, match=r"not finite in torch\.float16"):
        read(adapter, base[1], torch.float16)


def test_pickled_weights_are_refused_unread(base: tuple[Any, ModelConfig], adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(PenstockError, match="is pickled, and unpickling may run any code"):
        read(adapter, base[1])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_directory_without_one_of_the_files_is_refused(
    name: str, base: tuple[Any, ModelConfig], adapter: Path
) -> None:
    (adapter / name).unlink()
    with pytest.raises(PenstockError, match=f"has no {name}"):
        read(adapter, base[1])


def test_an_adapter_of_another_base_is_refused(
    base: tuple[Any, ModelConfig], tmp_path: Path
) -> None:
    other = save_adapter(make_model("qwen3"), tmp_path)
    with pytest.raises(PenstockError, match="load it with its own base model"):
        read(other, base[1])


def test_targets_may_be_a_pattern_or_all_linear_layers(
    base: tuple[Any, ModelConfig], adapter: Path
) -> None:
    for targets in ("all-linear", r".*\.(q|k|v|o|gate|up|down)_proj"):
        changed = read(change_settings(adapter, target_modules=targets), base[1])
        assert len(changed.changes) == 3 * 7


def test_the_digest_is_of_both_files(adapter: Path) -> None:
    digests = {adapter_digest(adapter)}
    change_settings(adapter, lora_alpha=5)
    digests.add(adapter_digest(adapter))
    file = adapter / "adapter_model.safetensors"
    tensors = {name: tensor * 2 for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    digests.add(adapter_digest(adapter))
    assert len(digests) == 3
    assert json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] == 5
