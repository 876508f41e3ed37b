"""What cannot be served is named, before its weights are read, with what is supported."""

import json
import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.hub.check import check_directory
from penstock.engine.hub.hub import open_model
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families.families import FAMILIES
from penstock.engine.models.weights import Checkpoint
from tests.support.tiny_models import make_model, save

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def model(directory: Path, *files: str, **changes: Any) -> Path:
    """A model of empty files, but for config.json; a change to `...` removes the key."""
    directory.mkdir(exist_ok=True, parents=True)
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    for file in files:
        (directory / file).write_bytes(b"\2" + b"\0" * 7 + b"{}")  # safetensors of nothing
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(InvalidModel) as refused:
        check_directory(directory)
    return str(refused.value)


def test_a_complete_model_passes(tmp_path: Path) -> None:
    directory = model(tmp_path, "model.safetensors", "tokenizer.json")
    assert check_directory(directory).family == "llama"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "eetq"}, "EETQ"),
        ({"quant_method": "fbgemm_fp8"}, "FBGEMM FP8"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "quip"}, "QuIP"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "of the future"}, "of the future"),
        ("awq", "unknown"),
    ],
)
def test_a_quantized_checkpoint_is_refused_by_its_format(
    tmp_path: Path, settings: object, name: str
) -> None:
    message = refusal(model(tmp_path, "model.safetensors", quantization_config=settings))
    assert f"the format {name}, which is not supported" in message
    assert "float32, float16 or bfloat16" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["FutureForCausalLM"], "num_local_experts": 8},
            "FutureForCausalLM (a mixture of experts)",
        ),
        ({"architectures": ["FutureForCausalLM"]}, "FutureForCausalLM, which is not supported"),
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}},
            "(a vision model)",
        ),
        ({"architectures": ["DistilBertForMaskedLM"]}, "(an encoder, which generates no text)"),
        (
            {"architectures": ["ElectraModel"], "model_type": "electra"},
            "(an encoder, which generates no text)",
        ),
        (
            {"architectures": ["LlamaForTokenClassification"]},
            "(a classifier, which generates no text), which is not supported; supported are "
            "GteForSequenceClassification, BertForSequenceClassification",
        ),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "(an encoder-decoder)",
        ),
        (
            {
                "architectures": ["FutureForCausalLM"],
                "num_local_experts": 32,
                "quantization_config": {"quant_method": "mxfp4"},
            },
            "FutureForCausalLM (a mixture of experts, with MXFP4 weights)",
        ),
        ({"architectures": ..., "model_type": "future"}, "the architecture future,"),
        ({"architectures": None, "model_type": ...}, "names no architecture and no model_type"),
    ],
)
def test_another_family_is_refused_by_its_name_and_kind(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    message = refusal(model(tmp_path, "model.safetensors", **changes))
    assert expected in message
    nearest, others = message.split("supported are ")[1].split(" and ", 1)
    is_decoder = not expected.startswith(("(an encoder,", "(a classifier,"))
    assert ("LlamaForCausalLM" in nearest) == is_decoder
    assert ("BertModel" in nearest) == expected.startswith("(an encoder,")
    assert re.fullmatch(r"\d+ more, which docs/families.md lists", others)


def test_a_refused_architecture_is_told_those_with_the_nearest_names(tmp_path: Path) -> None:
    message = refusal(model(tmp_path, "model.safetensors", architectures=["Qwen5ForCausalLM"]))
    assert re.search(r"supported are Qwen\w+, Qwen\w+, ", message)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 8),
        ("attn_logit_softcapping", 50.0),
        ("residual_multiplier", 0.22),
        ("use_bidirectional_attention", True),
        ("sliding_window", 4096),
        ("sparse_attention_config", {"block_size": 64}),
        ("position_embedding_type", "alibi"),
        ("some_future_setting", 0.5),
    ],
)
def test_a_key_that_is_not_understood_is_refused_by_name(
    tmp_path: Path, key: str, value: object
) -> None:
    directory = model(tmp_path, "model.safetensors", "tokenizer.json", **{key: value})
    assert key in refusal(directory)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_a_key_that_is_off_is_accepted_whatever_it_is(tmp_path: Path, value: object) -> None:
    keys = ("num_experts", "attn_logit_softcapping", "some_future_setting")
    files = ("model.safetensors", "tokenizer.json")
    assert check_directory(model(tmp_path, *files, **dict.fromkeys(keys, value)))


def test_what_checkpoints_note_about_their_training_is_accepted(tmp_path: Path) -> None:
    notes = {
        "_name_or_path": "meta-llama/Llama-3.1-8B",
        "transformers_version": "4.43.0",
        "torch_dtype": "bfloat16",
        "attention_dropout": 0.1,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "unsloth_version": "2024.9",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "finetuned": True},
    }
    assert check_directory(model(tmp_path, "model.safetensors", "tokenizer.json", **notes))


def test_a_text_model_of_another_family_is_refused_with_the_model_around_it(
    tmp_path: Path,
) -> None:
    names = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    directory = model(tmp_path, "model.safetensors", **names, text_config={"model_type": "bert"})
    assert "with the text model 'bert', which is not supported" in refusal(directory)


def test_a_key_of_a_text_config_is_refused_as_one_of_any_other(tmp_path: Path) -> None:
    names = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    text = {"attn_logit_softcapping": 30.0}
    directory = model(tmp_path, "model.safetensors", **names, text_config=text)
    assert "text_config has attn_logit_softcapping: 30.0" in refusal(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_architectures_the_model_type_tells_the_family(tmp_path: Path, family: str) -> None:
    files = ("model.safetensors", "tokenizer.json")
    named = {"architectures": ..., "model_type": family}
    # Of the demo model's three layers, one must have attention.
    kinds: dict[str, Any] = {"num_key_value_heads": 2}
    if family.startswith("qwen3_5"):
        kinds["full_attention_interval"] = 3
    if FAMILIES[family].head_dim_key == "qk_rope_head_dim":  # whose heads all have the same keys
        kinds = {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 10_000.0}}
    if family == "deepseek_v2":  # of which transformers has no default
        kinds["num_experts_per_tok"] = 2
    directory = model(tmp_path, *files, **named, **kinds)
    assert check_directory(directory).family == family


@pytest.mark.parametrize(
    ("files", "expected", "without_config"),
    [
        (("pytorch_model.bin",), "PyTorch's pickled weights", None),
        (("pytorch_model-00001-of-00002.bin",), "PyTorch's pickled weights", None),
        (
            ("consolidated.safetensors", "params.json"),
            "original format of Mistral or Meta",
            None,
        ),
        (("adapter_config.json", "adapter_model.safetensors"), "a LoRA adapter", None),
        (("model.onnx",), "ONNX", None),
        (("other.safetensors",), "neither model.safetensors nor", "has no config.json"),
        ((), "has no weights", "is empty"),
    ],
)
def test_weights_in_another_format_are_named(
    tmp_path: Path, files: tuple[str, ...], expected: str, without_config: str | None
) -> None:
    directory = model(tmp_path, *files)
    message = refusal(directory)
    assert expected in message and "safetensors" in message
    (directory / "config.json").unlink()
    message = refusal(directory)
    assert (without_config or expected) in message and "safetensors" in message


def test_a_file_of_another_kind_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(
        InvalidModel, match=r"model\.bin' is not a directory; name .* or a GGUF file"
    ):
        open_model(str(file))


def test_a_directory_above_the_models_says_which_was_meant(tmp_path: Path) -> None:
    model(tmp_path / "Qwen" / "Qwen3-0.6B", "model.safetensors")
    assert "its directory Qwen/Qwen3-0.6B has one" in refusal(tmp_path)


def test_a_directory_without_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    assert "has no config.json" in refusal(tmp_path)


def test_a_missing_shard_is_found_before_any_is_read(tmp_path: Path) -> None:
    directory = model(tmp_path, "model-00001-of-00002.safetensors", "tokenizer.json")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert "lacks model-00002-of-00002.safetensors" in refusal(directory)


def test_a_model_without_a_tokenizer_is_refused_and_dummy_weights_need_none(
    tmp_path: Path,
) -> None:
    directory = model(tmp_path, "model.safetensors")
    assert "no tokenizer" in refusal(directory)
    assert check_directory(directory, needs_weights=False).family == "llama"


@pytest.mark.parametrize(
    "index",
    [
        {},
        [],
        {"weight_map": None},
        {"weight_map": []},
        {"weight_map": "model.safetensors"},
        {"weight_map": {"a": 1}},
        {"weight_map": {"a": ["model.safetensors"]}},
        {"weight_map": {"a": "../../model.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
    ],
)
def test_an_index_of_wrong_types_is_refused(tmp_path: Path, index: object) -> None:
    directory = model(tmp_path, "tokenizer.json", "model.safetensors.index.json")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in refusal(directory)


NAMES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_a_regular_file_is_named_and_never_opened(tmp_path: Path, name: str) -> None:
    directory = model(tmp_path / "model", "model.safetensors", "tokenizer.json")
    file = directory / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    assert f"{file} is a FIFO" in refusal(directory)
    file.unlink()
    file.symlink_to("/dev/zero")
    assert f"{file} is a device" in refusal(directory)
    file.unlink()
    file.symlink_to("nowhere")
    assert f"{file} is a link to nowhere, which does not exist" in refusal(directory)
    file.unlink()
    file.mkdir()
    assert f"{file} is a directory" in refusal(directory)


def test_a_file_that_nobody_reads_may_be_anything(tmp_path: Path) -> None:
    directory = model(tmp_path, "model.safetensors", "tokenizer.json")
    os.mkfifo(directory / "notes.txt")
    (directory / "training.json").symlink_to("nowhere")
    assert check_directory(directory).family == "llama"


def test_a_socket_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model(tmp_path, "model.safetensors", "tokenizer.json")
    monkeypatch.chdir(directory)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("generation_config.json")
        assert stat.S_ISSOCK((directory / "generation_config.json").stat().st_mode)
        assert "is a socket" in refusal(directory)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 0.5, -1])
def test_a_truncated_safetensors_file_is_named(tmp_path: Path, kept: float) -> None:
    directory = save(make_model("llama2"), tmp_path)
    file = directory / "model.safetensors"
    content = file.read_bytes()
    end = int(len(content) * kept) if isinstance(kept, float) else kept
    file.write_bytes(content[:end])
    with pytest.raises(InvalidModel, match=r"model\.safetensors is not a readable"):
        Checkpoint(directory, torch.empty)
    (directory / "tokenizer.json").write_text("{}")
    assert "model.safetensors is not a readable" in refusal(directory)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, name: str, number: float) -> None:
    directory = save(make_model("llama2"), tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors[name].fill_(number)
    save_file(tensors, directory / "model.safetensors")
    checkpoint = Checkpoint(directory, torch.empty)
    with pytest.raises(InvalidModel, match=f"{name}.*not finite"):
        checkpoint.read(tuple(tensors[name].shape), name)


def test_a_size_that_no_memory_holds_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    directory = save(make_model("llama2"), tmp_path)
    checkpoint = Checkpoint(directory, torch.empty)
    with pytest.raises(InvalidModel, match="has the shape"):
        checkpoint.read((2**24, 2**22), "model.embed_tokens.weight")
