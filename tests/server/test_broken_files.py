"""Whatever is wrong with a model's files is one sentence that names the file, and status 2."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from penstock.engine.client import models_in
from penstock.engine.errors import InvalidModel
from penstock.scheduler.errors import PenstockError
from tests.support.damage import copy_with, damaged, files_of
from tests.support.serving import refusal as refusal_of_server
from tests.support.starts import CHECKPOINTS, start, write_tokenizer
from tests.support.tiny_models import make_model, save

# What is left of these may be whole too: a list of tokens, a text.
ENDS_ANYWHERE = (".model", ".jinja")


class Checkpoint:
    """One of `CHECKPOINTS`, and copies of it with another content of a file. model: what of the
    directory is served."""

    def __init__(self, kind: str, whole: Path) -> None:
        self.whole = whole
        self.model = CHECKPOINTS[kind](whole)

    def with_file(self, file: Path, content: bytes, into: Path) -> Path:
        copy = copy_with(self.whole, into, {file: content})
        return copy / self.model.relative_to(self.whole)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("model"))


def refusal(model: Path) -> str | None:
    """None for what is served. Whatever else is raised than a sentence is the test's failure."""
    try:
        start(model)
    except PenstockError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1_500, message
        return message
    return None


def test_a_whole_one_is_read(checkpoint: Checkpoint) -> None:
    assert refusal(checkpoint.model) is None


def test_a_file_that_ends_too_early_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for number, file in enumerate(files_of(checkpoint.whole)):
        content = (checkpoint.whole / file).read_bytes()
        size = len(content.rstrip())
        for end in (0, 1, 9, size // 2, size - 1):
            model = checkpoint.with_file(file, content[:end], tmp_path / f"{number}-{end}")
            message = refusal(model)
            if message is None:
                assert file.suffix in ENDS_ANYWHERE, (file, end)
            else:
                assert str(file) in message, (file, end, message)
    problems = [each.problem for each in models_in(tmp_path)]
    assert all("\n" not in problem for problem in problems if problem) and any(problems)


@pytest.mark.parametrize(
    "numbers", [range(6), pytest.param(range(6, 150), marks=pytest.mark.slow)], ids=str
)
def test_a_file_that_is_damaged_is_a_sentence_or_is_read(
    checkpoint: Checkpoint, tmp_path: Path, numbers: range
) -> None:
    files = files_of(checkpoint.whole)
    num_refused = 0
    for number in numbers:
        chosen = random.Random(number)
        file = chosen.choice(files)
        content = damaged(checkpoint.whole / file, chosen)
        model = checkpoint.with_file(file, content, tmp_path / str(number))
        num_refused += refusal(model) is not None
        shutil.rmtree(tmp_path / str(number))
    assert num_refused > len(numbers) // 5


def dropped(tensors: dict[str, Any], name: str) -> None:
    del tensors[name]


def set_to(value: Callable[[Any], Any]) -> Callable[[dict[str, Any], str], None]:
    def change(tensors: dict[str, Any], name: str) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return change


CHANGES = {
    "missing": (dropped, "lack"),
    "of one dimension": (set_to(lambda tensor: tensor.flatten()), "shape"),
    "of no dimension": (set_to(lambda tensor: tensor.flatten()[0].clone()), "shape"),
    "of three dimensions": (set_to(lambda tensor: tensor[None]), "shape"),
    "without rows": (set_to(lambda tensor: tensor[:0]), "shape"),
    "with a row more": (set_to(lambda tensor: torch.cat((tensor, tensor[:1]))), "shape"),
    "transposed": (set_to(lambda tensor: tensor.t()), "shape"),
    "integers": (set_to(lambda tensor: tensor.to(torch.int8)), "int8"),
    "FP8 without scales": (set_to(lambda tensor: tensor.to(torch.float8_e4m3fn)), "float8"),
    "complex": (set_to(lambda tensor: tensor.to(torch.complex64)), "complex"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("single", "model.layers.1.mlp.up_proj.weight"),
        ("single", "model.embed_tokens.weight"),
        ("hybrid", "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"),
        ("transformers", "model.layers.1.self_attn.k_proj.weight"),
        ("transformers", "model.layers.1.mlp.experts.2.down_proj.weight"),
    ],
)
def test_a_tensor_that_is_not_what_config_json_implies_is_named(
    kind: str, name: str, change: str, tmp_path: Path
) -> None:
    model = CHECKPOINTS[kind](tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    make, word = CHANGES[change]
    make(tensors, name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = refusal(model)
    assert message is not None and word in message and str(tmp_path) in message, message
    # transformers names its own stack of the experts, in which it is.
    assert name.removeprefix("model.language_model.") in message or "experts" in name, message


def test_a_shard_that_lacks_a_tensor_of_the_index_is_named(tmp_path: Path) -> None:
    model = CHECKPOINTS["sharded"](tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    with safe_open(shards[0], "pt") as first:
        name = min(first.keys())
    index = tmp_path / "model.safetensors.index.json"
    map_of_tensors = json.loads(index.read_text())
    map_of_tensors["weight_map"][name] = shards[1].name
    index.write_text(json.dumps(map_of_tensors))
    message = refusal(model)
    assert message is not None and name in message and shards[1].name in message


@pytest.mark.parametrize(
    "names", [("tokenizer.model",), ("tokenizer.model", "tokenizer_config.json")]
)
def test_unigrams_in_a_tokenizer_model_alone_are_converted(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """By transformers, which finds the class by config.json."""
    save(make_model("llama2", vocab_size=400), tmp_path)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a house by the sea", "nineteen eighty-four"] * 99),
        model_prefix=tmp_path / "tokenizer",
        vocab_size=40,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    if "tokenizer_config.json" in names:
        (tmp_path / "tokenizer_config.json").write_text("{}")
    assert refusal(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "file", "content"),
    [
        ("single", "chat_template.jinja", b"{% for m in messages %}{{ m"),
        ("single", "chat_template.jinja", b"{{ " + b"(" * 5_000 + b"1" + b")" * 5_000 + b" }}"),
        ("single", "tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a\\nb": "x"}}}'),
        ("sharded", "model.safetensors.index.json", b'{"weight_map": {"a": 1}}'),
        ("gguf", "model.gguf", b"GGUF\3\0\0\0" + b"\xff" * 7 + b"\x7f" + b"\xff" * 7 + b"\x7f"),
        ("tekken", "tekken.json", b'{"config": {"pattern": "("}, "vocab": []}'),
        ("sentencepiece", "tokenizer.model", b"IQ== 0\nIg== 1\n"),
    ],
)
def test_the_server_says_it_in_its_last_line_and_ends_with_status_2(
    kind: str, file: str, content: bytes, tmp_path: Path
) -> None:
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    whole.mkdir()
    model = CHECKPOINTS[kind](whole).relative_to(whole)
    copy_with(whole, copy, {Path(file): content})
    message = refusal_of_server(str(copy / model), "--device", "cpu")
    assert str(copy) in message


@pytest.mark.slow
def test_tensors_that_only_the_engine_reads_end_the_server_alike(tmp_path: Path) -> None:
    write_tokenizer(save(make_model("llama2", vocab_size=256), tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal_of_server(str(tmp_path), "--device", "cpu")
    assert "model.norm.weight" in message and "shape" in message


def test_what_a_start_reads_is_all_that_is_damaged(tmp_path: Path) -> None:
    """A check of these tests: where no file is damaged, none is refused, and `start` does raise."""
    assert refusal(CHECKPOINTS["single"](tmp_path)) is None
    (tmp_path / "config.json").unlink()
    with pytest.raises(InvalidModel, match=r"config\.json"):
        start(tmp_path)
