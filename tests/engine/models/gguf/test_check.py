"""What of GGUF cannot be served is named by its header alone; what can be is configured right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from penstock.engine.files.gguf.file import open_gguf
from penstock.engine.hub.gguf import check_gguf
from penstock.engine.hub.hub import open_model
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.parts.attention.rope import RopeConfig
from tests.support.changed_models import changed
from tests.support.gguf_files import WRITTEN, write_gguf
from tests.support.paths import DEMO_MODEL
from tests.support.tiny_models import make_model, save


def written(path: Path, family: str = "llama2", **metadata: Any) -> Path:
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return write_gguf(path / "model.gguf", make_model(family), metadata=keys)


def refusal(path: Path) -> InvalidModel:
    with pytest.raises(InvalidModel) as refused:
        check_gguf(path)
    assert str(path) in str(refused.value)
    return refused.value


@pytest.mark.parametrize("family", WRITTEN)
def test_the_configuration_is_that_of_config_json(tmp_path: Path, family: str) -> None:
    """But Llama 3's scaling of frequencies, which GGUF has as the factors that follow of it, what
    tokens of images attend to in Gemma 4, and what a Mistral without a window, a text model of
    images and GLM-4.7-Flash are called."""
    model = make_model(family, **WRITTEN[family])
    original = ModelConfig.from_dir(save(model, tmp_path))
    found = check_gguf(write_gguf(tmp_path / "model.gguf", model))
    of_original, of_found = original.attentions[0].rope, found.attentions[0].rope
    assert of_original is not None and of_found is not None
    if of_original.kind == "llama3":
        assert of_found.kind == "longrope"
        assert of_found.divisors[0] == 1 and of_found.divisors[-1] == pytest.approx(8)
    if of_original.kind == "longrope":
        assert of_found.attention_factor == pytest.approx(of_original.attention_factor)
        assert of_found.divisors == pytest.approx(of_original.divisors)
        assert of_found.long_divisors == pytest.approx(of_original.long_divisors)
    if of_original.kind in ("llama3", "longrope"):
        found = changed(found, mixer={"rope": of_original})
    if family == "gemma4_unified_wrapped":
        original = changed(original, mixer={"has_spans": False})
    assert replace(found, family=original.family, is_wrapped=original.is_wrapped) == original
    assert found.family in (original.family, "llama", "gemma4_text", "deepseek_v3")


def test_rope_scaling_of_older_files_is_linear(tmp_path: Path) -> None:
    config = check_gguf(written(tmp_path, llama__rope__scale_linear=4.0))
    assert config.attentions[0].rope == RopeConfig(theta=10000.0, kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("metadata", "expected", "brief"),
    [
        (
            {"general__architecture": "gemma2"},
            "has the architecture 'gemma2', which is not supported; supported in GGUF are llama,",
            "gemma2 is not supported",
        ),
        ({"general__architecture": 7}, "has the architecture 7", "7 is not supported"),
        ({"general__type": "mmproj"}, "is a GGUF file of the type 'mmproj'", "not a model"),
        ({"llama__expert_count": 8}, "has num_experts: 8", "num_experts"),
        ({"llama__block_count": 2**31}, "'num_hidden_layers' must be at most 10,000", "most"),
        ({"llama__block_count": "two"}, "'num_hidden_layers' must be a positive integer", "must"),
        ({"llama__block_count": 5}, "lacks the tensor 'blk.3.", "18 of its tensors are missing"),
        ({"llama__embedding_length": None}, "lacks the field 'hidden_size'", "lacks"),
        ({"llama__embedding_length": 128}, "of the shape (", "has an unexpected shape"),
        ({"llama__attention__key_length": 8}, "keys of 8 and values of 16", "keys"),
        ({"llama__attention__head_count": 8}, "of the shape (", "has an unexpected shape"),
        ({"llama__attention__value_length": 8}, "keys of 16 and values of 8", "keys"),
        ({"llama__rope__dimension_count": 8}, "rotates 8 of a head's 16", "rotates 8"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "llama.rope.scaling.attn_factor", "attn_"),
        ({"llama__attention__causal": False}, "is_causal: false", "is_causal"),
        ({"llama__rope__scaling__type": "longrope"}, "'short_factor' must be 8", "short_factor"),
        ({"llama__residual_scale": 0.5}, "residual_multiplier: 0.5", "residual"),
        ({"split__count": 3}, "is a part of a model in 3 files", "a part of a model"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, metadata: dict[str, Any], expected: str, brief: str
) -> None:
    error = refusal(written(tmp_path, **metadata))
    assert expected in str(error)
    assert brief in error.brief


@pytest.mark.parametrize(
    ("family", "metadata", "expected"),
    [
        ("olmo3", {"attention__sliding_window_pattern": 0}, "the pattern 0 of layers with a"),
        ("olmo3", {"attention__sliding_window_pattern": [True] * 3}, "for 3 layers, and 2 layers"),
        ("gemma4", {"attention__head_count_kv": [1, 2]}, "head_count_kv for 2 layers, and 3"),
        ("gemma4", {"attention__key_length": 16}, "of 16 and values of 32"),
        ("gemma4_moe", {"feed_forward_length": None}, "lacks the field 'intermediate_size'"),
        ("granite", {"rope__scaling__finetuned": False}, "layers without rotary positions"),
        ("qwen3", {"rope__dimension_count": 8}, "only models of qwen3 that rotate all of them"),
        ("phi4_mini", {"rope__dimension_count": 5}, "partial_rotary_factor rotates 5"),
        ("phi4_mini", {"rope__dimension_count": "8"}, "rotates '8' of a head's 16"),
    ],
)
def test_what_layers_have_is_checked(
    tmp_path: Path, family: str, metadata: dict[str, Any], expected: str
) -> None:
    model = make_model(family, **WRITTEN[family])
    plain = write_gguf(tmp_path / "plain.gguf", model)
    name = open_gguf(plain).metadata["general.architecture"]
    keys = {f"{name}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    assert expected in str(refusal(write_gguf(tmp_path / "model.gguf", model, metadata=keys)))


def test_gemma_4s_share_of_a_head_is_in_the_factors_of_its_frequencies(tmp_path: Path) -> None:
    def with_factors(*factors: float) -> Any:
        values = np.array(factors, np.float32)
        return lambda tensors: {**tensors, "rope_freqs.weight": values}

    for num in range(1, 16):  # of 16 pairs
        factors = with_factors(*[1.0] * num, *[1e30] * (16 - num))
        path = write_gguf(tmp_path / f"{num}.gguf", make_model("gemma4"), arrange=factors)
        rope = check_gguf(path).layers[-1].attention
        assert rope is not None and rope.rope is not None and rope.rope.kind == "proportional"
        assert int(rope.rope.share * 32 // 2) == num
    other = with_factors(*[1.0] * 8, *[2.0] * 8)
    path = write_gguf(tmp_path / "other.gguf", make_model("gemma4"), arrange=other)
    assert "other than ones, and then numbers that stop a rotation" in str(refusal(path))


def test_a_tensor_that_the_architecture_does_not_compute_is_refused(tmp_path: Path) -> None:
    """A Llama whose keys are normalized, which llama.cpp would compute."""
    qwen = write_gguf(tmp_path / "qwen.gguf", make_model("qwen3"))
    content = qwen.read_bytes().replace(b"qwen3", b"llama")
    qwen.with_name("m.gguf").write_bytes(content)
    error = refusal(tmp_path / "m.gguf")
    assert "has the tensor 'blk.0.attn_q_norm.weight', which changes what" in str(error)


def test_a_type_that_is_not_supported_is_named_before_anything_is_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("a", np.zeros((1, 292), dtype=np.uint8), raw_dtype=Type.Q8_K)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    error = refusal(tmp_path / "model.gguf")
    assert "has its tensor 'a' in the type Q8_K, which is not supported" in str(error)
    assert "use another quantization of the model, such as Q4_K_M or Q8_0" in str(error)
    assert error.brief == "Q8_K tensors are not supported"


def test_a_directory_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("qwen3"), num_parts=2)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"a vision tower")
    assert open_model(str(tmp_path)).directory == path
    assert open_model(str(path)).directory == path
    other = write_gguf(tmp_path / "other.gguf", make_model("llama2"))
    with pytest.raises(InvalidModel, match=r"has 2 GGUF models; name one of its files"):
        open_model(str(tmp_path))
    assert open_model(str(other)).directory == other


def test_safetensors_are_preferred_to_gguf_beside_them(tmp_path: Path) -> None:
    for file in DEMO_MODEL.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.gguf").write_bytes(b"anything")
    assert open_model(str(tmp_path)).directory == tmp_path


def test_a_file_that_does_not_exist_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"nowhere\.gguf does not exist; check the path"):
        open_model(str(tmp_path / "nowhere.gguf"))
    with pytest.raises(InvalidModel, match=r"nowhere\.gguf does not exist; check the path"):
        open_model("nowhere.gguf")
