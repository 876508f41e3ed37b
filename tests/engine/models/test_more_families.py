"""The families that differ more from Llama: as transformers computes them, and with the same bits
alone and in company."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.loading.devices import log_text_only
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.families import FAMILIES as ROWS
from penstock.scheduler.errors import InvalidConfig
from tests.support.compiler import HAS_COMPILER
from tests.support.executors import cpu_executor
from tests.support.published import PUBLISHED
from tests.support.tiny_models import (
    LATENT_FAMILIES,
    MORE_FAMILIES,
    Harness,
    engine_config,
    made_config,
    make_model,
    save,
)

PROMPT_LEN = 50  # beyond every window, and every length that a scaling of positions starts from
CHUNK = 7
TOLERANCE = 1e-4


def made(name: str, directory: Path) -> tuple[Path, Tensor, Tensor]:
    model = make_model(name)
    prompts = torch.randint(3, 96, (2, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return save(model, directory), model(prompts).logits, prompts


@pytest.fixture(params=[*MORE_FAMILIES, *LATENT_FAMILIES], scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(a directory with the model, transformers' logits of two prompts, the prompts)"""
    return made(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["torch", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param == "native" and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    return bool(request.param == "native")


def harness(path: Path, prompts: Tensor, **options: Any) -> Harness:
    made = Harness(path, **options)
    made.token_table[: len(prompts), :PROMPT_LEN] = prompts
    return made


def in_chunks(made: Harness) -> Tensor:
    """The logits of the first prompt, in chunks, and then token by token beside the second."""
    logits = [made.run([(0, start, CHUNK)])[0] for start in range(0, 35, CHUNK)]
    for position in range(35, PROMPT_LEN):
        row = (0, position, 1), (1, position - 35, 1)
        logits.append(made.run(row, num_decodes=2 if position > 35 else 0)[0])
    return torch.cat(logits)


def test_in_chunks_and_in_company_the_logits_are_those_of_transformers(
    family: Any, native: bool
) -> None:
    path, expected, prompts = family
    found = in_chunks(harness(path, prompts, native=native))
    torch.testing.assert_close(found, expected[0], atol=TOLERANCE, rtol=0)
    whole = harness(path, prompts, native=native).run([(0, 0, PROMPT_LEN), (1, 0, 20)])
    torch.testing.assert_close(whole[0], expected[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whole[1], expected[1, :20], atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_step_gives_the_same_bits_alone_in_chunks_and_in_company(
    family: Any, dtype: torch.dtype
) -> None:
    path, _, prompts = family
    alone = harness(path, prompts, native=True, dtype=dtype, threads=1).run([(0, 0, PROMPT_LEN)])
    assert torch.equal(in_chunks(harness(path, prompts, native=True, dtype=dtype)), alone[0])


@pytest.mark.parametrize("name", ROWS)
def test_a_familys_defaults_are_those_of_transformers(name: str) -> None:
    theirs = transformers.AutoConfig.for_model(name)
    theirs.allow_global_per_layer_attribute_access = True  # of those that differ between layers
    ropes = theirs.rope_parameters
    for key, value in ROWS[name].defaults.items():
        if key == "rope_theta":
            assert ropes.get("full_attention", ropes)["rope_theta"] == value
        else:
            assert getattr(theirs, key) == value, key


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("gemma-4")])
def test_gemma_4s_matrices_have_the_shapes_that_transformers_gives_them(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    ours = ModelConfig.from_dir(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model: Any = transformers.Gemma4ForCausalLM(config.get_text_config())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected = {
        f"model.layers.{index}.{matrix}.weight": shape
        for index in range(ours.num_layers)
        for matrix, shape, _ in ours.layers[index].tensors.quantizable()
        if ".experts." not in f".{matrix}"  # which it has in one tensor
    }
    assert {name: shapes.get(name) for name in expected} == expected
    scalars = sum(name.endswith("layer_scalar") for name in shapes)
    assert ours.num_parameters == sum(p.numel() for p in model.parameters()) + scalars
    # As a newer transformers writes it, with the layers that differ, or with all.
    for is_explicit in (False, True):
        config.get_text_config().serialize_explicit_per_layer_config = is_explicit
        config.save_pretrained(tmp_path)
        written = config.to_dict()["text_config"]["per_layer_config"]
        assert (len(written) == ours.num_layers) is is_explicit
        assert ModelConfig.from_dir(tmp_path) == ours


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_text_model_has_the_same_logits_without_the_encoder_around_it(
    tmp_path: Path, prefix: str
) -> None:
    model = make_model("gemma3_wrapped")
    path = save(model, tmp_path / "both")
    tensors = load_file(path / "model.safetensors")
    named = {re.sub(r"^.*language_model\.(model\.)?", prefix, n): t for n, t in tensors.items()}
    assert len(named) == len(tensors) and any(name.startswith(prefix) for name in named)
    save_file(named, path / "model.safetensors")
    alone: Any = transformers.Gemma3ForCausalLM(model.config.text_config)
    alone.model.load_state_dict(model.model.language_model.state_dict())
    text = save(alone, tmp_path / "text")
    prompts = torch.arange(3, 3 + PROMPT_LEN)[None]
    found = [harness(each, prompts).run([(0, 0, PROMPT_LEN)])[0] for each in (path, text)]
    assert torch.equal(*found)
    both, only = ModelConfig.from_dir(path), ModelConfig.from_dir(text)
    assert (both.is_wrapped, only.is_wrapped) == (True, False)
    assert both.num_parameters == only.num_parameters


def test_beyond_the_length_it_was_trained_on_longrope_has_its_long_factors(tmp_path: Path) -> None:
    """Where sequences cannot be so long, its short ones, as transformers has for short prompts."""
    model = make_model("phi4_mini")
    path = save(model, tmp_path)
    prompts = torch.arange(3, 3 + 24)[None]
    with torch.inference_mode():
        expected = model(prompts).logits[0]
    made = Harness(path, max_len=32)
    made.token_table[:1, :24] = prompts
    torch.testing.assert_close(made.run([(0, 0, 24)])[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("trained", "length"), [(32, 80), (96, 80)])
def test_dynamic_rope_has_the_logits_of_transformers_at_its_longest_length(
    tmp_path: Path, trained: int, length: int
) -> None:
    """Within the length that was trained on, at any."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model = make_model("llama2", rope_parameters=rope, max_position_embeddings=trained)
    path = save(model, tmp_path)
    config = ModelConfig.from_dir(path)
    assert (config.max_model_len, config.longest) == (trained, 4 * trained)
    assert config.rotates_otherwise(length) is (trained < length)
    prompts = torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(prompts).logits[0]
    made = Harness(path, max_len=length)
    made.token_table[:1, :length] = prompts
    for start in range(0, length, 16):
        found = made.run([(0, start, 16)])[0]
        torch.testing.assert_close(found, expected[start : start + 16], atol=TOLERANCE, rtol=0)


def test_dynamic_rope_is_served_at_a_length_beyond_what_was_trained_on(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    path = save(make_model("llama2", rope_parameters=rope, max_position_embeddings=32), tmp_path)
    for asked, served in ((None, 32), (80, 80)):
        executor = cpu_executor(engine_config(path, max_model_len=asked), path)
        assert executor.info.max_model_len == served
    with pytest.raises(InvalidConfig, match="at most 128 positions"):
        cpu_executor(engine_config(path, max_model_len=129), path)


def test_a_llama_that_rotates_a_part_of_a_head_is_computed_as_phi_3_is(tmp_path: Path) -> None:
    """transformers' own Llama ignores that key, and rotates all."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    model = make_model("phi4_mini", rope_parameters=rope)
    path = save(model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    heads = config["hidden_size"] // config["num_attention_heads"]
    kv_size = heads * config["num_key_value_heads"]
    split = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), [config["hidden_size"], kv_size, kv_size]),
        "gate_up_proj": (("gate_proj", "up_proj"), config["intermediate_size"]),
    }
    for name in list(tensors):
        for fused, (names, sizes) in split.items():
            if f".{fused}." in name:
                parts = torch.split(tensors.pop(name), sizes)
                for each, part in zip(names, parts, strict=True):
                    tensors[name.replace(fused, each)] = part.contiguous()
    save_file(tensors, path / "model.safetensors")
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (path / "config.json").write_text(json.dumps(config))
    assert_equal_logits(model, path)


_SLIDING, _FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # A window that no layer has: then no layer has rotary positions either.
        ("exaone4", {"sliding_window": 9, "layer_types": [_FULL, _FULL]}),
        # layer_types has windows, and the flag says no.
        (
            "smollm3",
            {
                "use_sliding_window": False,
                "sliding_window": 5,
                "layer_types": [_SLIDING, _FULL, _SLIDING],
            },
        ),
        # Half of all pairs, rather than of the dimensions.
        (
            "llama2",
            {
                "rope_parameters": {
                    "rope_type": "proportional",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
        # Trained on fewer positions than a turn of the fastest pair takes.
        (
            "llama2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 50.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 1,
                }
            },
        ),
    ],
)
def test_settings_that_nobody_publishes_mean_what_they_mean_to_transformers(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(family, **options)
    assert_equal_logits(model, save(model, tmp_path))


def test_a_trained_length_beside_the_scaling_counts_more_than_one_in_it(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
    model = make_model("llama2", rope_parameters=rope, original_max_position_embeddings=16)
    path = save(model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["rope_parameters"]["original_max_position_embeddings"] == 16
    config["rope_parameters"]["original_max_position_embeddings"] = 64
    (path / "config.json").write_text(json.dumps(config))
    assert_equal_logits(model, path)


def test_the_share_of_pairs_may_stand_beside_the_older_name_of_their_kind(tmp_path: Path) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = make_model("llama2", rope_parameters=rope)
    path = save(model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config["rope_scaling"] = {"type": "proportional"}
    (path / "config.json").write_text(json.dumps(config))
    assert_equal_logits(model, path)


def test_gemma_3_with_capped_logits_has_those_of_transformers(tmp_path: Path) -> None:
    model = make_model("gemma3", final_logit_softcapping=2.0)
    assert_equal_logits(model, save(model, tmp_path))


def assert_equal_logits(model: Any, path: Path) -> None:
    prompts = torch.arange(3, 3 + 24)[None]
    with torch.inference_mode():
        expected = model(prompts).logits[0]
    for native in (False, True) if HAS_COMPILER else (False,):
        made = Harness(path, native=native)
        made.token_table[:1, :24] = prompts
        found = made.run([(0, 0, 24)])[0]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("family", "is_wanted", "warnings"),
    [("gemma3_wrapped", False, 1), ("gemma3_wrapped", True, 0), ("gemma3", False, 0)],
)
def test_a_start_warns_that_images_are_refused_unless_that_is_wanted(
    family: str,
    is_wanted: bool,
    warnings: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made_config(family).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        config = engine_config(tmp_path, language_model_only=is_wanted)
        log_text_only(config, ModelConfig.from_dir(tmp_path))
    assert caplog.text.count("--language-model-only") == warnings


def test_the_weights_say_whether_the_output_layer_is_tied(tmp_path: Path) -> None:
    """transformers' defaults of a model of images, and of the text model in it, contradict."""
    path = save(make_model("mistral_small_wrapped"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert not ModelConfig.from_dir(path).head.is_tied
    (path / "model.safetensors").unlink()
    assert ModelConfig.from_dir(path).head.is_tied


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gemma-3-4b-it", 3.88),
        ("gemma-4-31B-it", 30.70),
        ("gemma-4-26B-A4B-it", 25.23),
        ("gemma-4-E2B-it", 4.63),
        ("Mistral-Small-3.1-24B", 23.57),
        ("Phi-4-mini", 3.84),
    ],
)
def test_a_published_config_gives_the_size_of_the_text_model(
    name: str, billions: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = ModelConfig.from_dir(tmp_path)
    assert config.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
