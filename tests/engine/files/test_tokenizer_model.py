"""Trainers' own tokenizer files give the ids that the libraries they were written for give."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer

from penstock.engine.errors import InvalidModel
from penstock.engine.files.tokenizer_model import _letters, read_tokenizer_model
from penstock.engine.hub.check import check_model
from penstock.server.prompt.tokenizer import PromptEncoder
from tests.support.paths import DEMO_MODEL, ROOT

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


def texts() -> list[str]:
    """Pieces of real text, and signs at random."""
    chance, whole = random.Random(0), (ROOT / "CHANGELOG.md").read_text()
    pieces = [whole[at : at + 80] for at in range(0, 40_000, 97)]
    signs = "abc  \n\t\r\u00e9\u6f22\u5b57 12,<>\U0001f642\u00a0"
    return [*pieces, *("".join(chance.choices(signs, k=20)) for _ in range(400)), "", " ", "  a"]


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece")
    train(directory)
    return directory


def train(directory: Path, **options: Any) -> None:
    """As Llama 2's was, of the project's words."""
    sentencepiece.SentencePieceTrainer.train(
        input=ROOT / "CHANGELOG.md",
        model_prefix=directory / "tokenizer",
        vocab_size=1200,
        minloglevel=2,
        **{
            "model_type": "bpe",
            "byte_fallback": True,
            "split_digits": True,
            "allow_whitespace_only_pieces": True,
            "remove_extra_whitespaces": False,
            "normalization_rule_name": "identity",
            **options,
        },
    )


def write_tekken(directory: Path, **changes: Any) -> tiktoken.Encoding:
    """Of the demo model's tokens, in the order of their merges; returns tiktoken's own reading."""
    vocabulary = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).get_vocab()
    to_byte = {letter: byte for byte, letter in enumerate(_letters())}
    spelled = sorted(
        (name for name in vocabulary if set(name) <= set(to_byte)), key=vocabulary.__getitem__
    )
    words = list(dict.fromkeys(bytes(map(to_byte.__getitem__, name)) for name in spelled))
    words = sorted(words, key=lambda word: len(word) > 1)
    content = {
        "config": {
            "pattern": PATTERN,
            "default_vocab_size": len(words) + 10,
            "default_num_special_tokens": 10,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode()}
            for rank, word in enumerate([*words, b"beyond the vocabulary's size"])
        ],
        "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(SPECIAL)],
        **changes,
    }
    (directory / "tekken.json").write_text(json.dumps(content))
    ranks = {word: rank for rank, word in enumerate(words)}
    return tiktoken.Encoding("", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def converted(directory: Path) -> tuple[Tokenizer, dict[str, str]]:
    found = read_tokenizer_model(directory)
    assert found
    return Tokenizer.from_str(found[0]), found[1]


def test_ids_and_texts_are_those_of_sentencepiece(sentence_piece: Path) -> None:
    tokenizer, special = converted(sentence_piece)
    own = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece / "tokenizer.model"))
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == own.encode(text), repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a").ids[0] == own.bos_id()
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_ids_and_texts_are_those_of_mistrals_encoder(tmp_path: Path) -> None:
    own = write_tekken(tmp_path)
    tokenizer, special = converted(tmp_path)
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [each + 10 for each in own.encode_ordinary(text)], repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]a").ids[:2] == [1, 3]
    assert tokenizer.get_vocab_size() == own.n_vocab + 10
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_tekken_files_of_before_special_tokens_were_listed_have_mistrals(tmp_path: Path) -> None:
    write_tekken(tmp_path, special_tokens=None)
    tokenizer, _ = converted(tmp_path)
    assert tokenizer.token_to_id("[TOOL_CALLS]") == 9


def test_a_template_has_the_special_tokens_of_tekken_without_a_config(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ eos_token }}")
    encoder = PromptEncoder.load(tmp_path, None)
    rendered = encoder.chat_template().render([{"role": "user", "content": "Hi"}])
    assert encoder.encode(rendered, add_special_tokens=False) == (1, 3, 2)


def test_tokens_that_were_added_later_are_found(sentence_piece: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((sentence_piece / "tokenizer.model").read_bytes())
    added = {
        "1203": {"content": "<|im_start|>", "special": True},
        "1201": {"content": "<tool>", "special": False},
    }
    settings = {"added_tokens_decoder": added, "add_bos_token": False, "eos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, special = converted(tmp_path)
    assert tokenizer.encode("<|im_start|><tool>").ids == [1203, 1201]
    assert tokenizer.decode([1203, 1201]) == "<tool>"
    assert special["eos_token"] == "<|im_start|>"


def test_unigrams_are_left_to_transformers(tmp_path: Path) -> None:
    train(tmp_path, model_type="unigram")
    assert read_tokenizer_model(tmp_path) is None


def check_or_load(directory: Path, names: list[str]) -> None:
    check_model(str(directory), directory, names)
    PromptEncoder.load(directory, None)


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken"])
def test_tiktokens_list_without_its_rule_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("IQ== 0\nIg== 1\n")
    (tmp_path / "config.json").write_bytes((DEMO_MODEL / "config.json").read_bytes())
    (tmp_path / "model.safetensors").touch()
    names = [path.name for path in tmp_path.iterdir()]
    with pytest.raises(InvalidModel, match="only tiktoken's list of tokens"):
        check_or_load(tmp_path, names)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"\n\x05broken"),
        ("tokenizer.model", b""),
        ("tekken.json", b"{}"),
        ("tekken.json", b'{"config": {"pattern": "a"}, "vocab": [{"token_bytes": "?"}]}'),
        ("tekken.json", b'{"config": {"pattern": "a"}, "vocab": 3}'),
        (
            "tekken.json",  # ids would be shifted
            b'{"config": {"pattern": "a"}, "vocab": [], '
            b'"special_tokens": [{"rank": 1, "token_str": "<s>"}]}',
        ),
        ("tekken.json", b'{"config": {"pattern": "a", "default_vocab_size": 3}, "vocab": []}'),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidModel, match=name):
        PromptEncoder.load(tmp_path, None)
