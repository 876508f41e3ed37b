"""Texts have the ids that the tokenizer gives which was converted."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.file import open_gguf
from penstock.engine.files.gguf.settings import read_settings
from penstock.engine.files.gguf.tokenizer import WORDS, check_tokenizer, read_tokenizer
from tests.support.gguf_files import write_gguf
from tests.support.paths import DEMO_MODEL, ROOT, STORIES
from tests.support.tiny_models import make_model

TEXTS = [
    "",
    " ",
    "Once upon a time",
    "  two  spaces\n\n\tand a tab \n",
    "I'm sure they'LL don't, WE'VE 3 33 333 33333 3.5e-7 x=1;",
    "naïve café e\u0301 Straße 日本語のテキスト हिन्दी ไทย \U0001f642\u200d\U0001f32b\ufe0f ½ ²",
    "def f(x):\r\n    return {'a': [1, 2], \"b\": x**2}  # $%&!!??\r\n",
    "<|im_start|>user\nHello<|im_end|>\n<s> a</s> b<unk> <|endoftext|>",
    "a\u00a0b\u3000c\u2028d\x00\x7f\ufffd",
    "ALLCAPS CamelCaseWords snake_case_words 1st 2ND",
]


def ids(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in TEXTS]


def written(path: Path, directory: Path, **metadata: Any) -> Path:
    model = make_model("llama2", num_hidden_layers=1, vocab_size=2048)
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return write_gguf(path, model, tokenizer=directory, metadata=keys)


def reread(path: Path, directory: Path, **metadata: Any) -> Tokenizer:
    return Tokenizer.from_str(read_tokenizer(written(path, directory, **metadata)))


DIRECTORIES = pytest.mark.parametrize(
    "directory",
    [
        DEMO_MODEL,
        pytest.param(
            STORIES, marks=pytest.mark.skipif(not STORIES.exists(), reason="no trained model")
        ),
    ],
    ids=["byte-level", "SentencePiece"],
)


@DIRECTORIES
def test_ids_and_texts_are_those_of_the_original(tmp_path: Path, directory: Path) -> None:
    original = Tokenizer.from_file(str(directory / "tokenizer.json"))
    converted = reread(tmp_path / "model.gguf", directory)
    assert ids(converted) == ids(original)
    for each in ids(original):
        for skips in (True, False):
            decoded = converted.decode(each, skip_special_tokens=skips)
            assert decoded == original.decode(each, skip_special_tokens=skips)


@DIRECTORIES
def test_the_file_is_the_original_in_every_field(tmp_path: Path, directory: Path) -> None:
    original = json.loads((directory / "tokenizer.json").read_text())
    found = json.loads(read_tokenizer(written(tmp_path / "model.gguf", directory)))
    for spec in (original, found):
        merges = [m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"]]
        spec["model"]["merges"] = merges
    assert found == original


def byte_level_bpe(rules: Any, ignore_merges: bool, normalizer: Any = None) -> Tokenizer:
    """Trained on this repository's README, by these rules."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = rules
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(ROOT / "README.md").read_text(), *TEXTS], trainer)
    return tokenizer


def save(directory: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_the_words_of_qwen_are_those_of_its_class_in_transformers(tmp_path: Path) -> None:
    theirs: Any = Qwen2Tokenizer()._tokenizer
    original = byte_level_bpe(theirs.pre_tokenizer, False, theirs.normalizer)
    directory = save(tmp_path, original)
    converted = reread(tmp_path / "m.gguf", directory, pre="qwen2", add_bos_token=False)
    assert ids(converted) == ids(original)


def test_the_words_of_llama_3_are_those_of_its_conversion_in_transformers(tmp_path: Path) -> None:
    converter: Any = TikTokenConverter
    pattern = converter().pattern
    spec = json.loads(reread(tmp_path / "rules.gguf", DEMO_MODEL, pre="llama-bpe").to_str())
    assert spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": pattern}
    assert WORDS["llama-bpe"].ignores_merges
    rules = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    original = byte_level_bpe(rules, True)
    directory = save(tmp_path, original)
    converted = reread(tmp_path / "m.gguf", directory, pre="llama-bpe", add_bos_token=True)
    assert ids(converted) == [[0, *each] for each in ids(original)]


@pytest.mark.parametrize("name", WORDS)
def test_every_kind_of_words_gives_back_the_text(tmp_path: Path, name: str) -> None:
    converted = reread(tmp_path / "m.gguf", DEMO_MODEL, pre=name, add_bos_token=False)
    for text in TEXTS:
        expected = converted.normalizer.normalize_str(text) if converted.normalizer else text
        found = converted.decode(converted.encode(text).ids, skip_special_tokens=False)
        assert found == expected


def read_both(path: Path) -> None:
    read_settings(path, "generation_config.json")
    read_tokenizer(path)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"model": "t5"}, "a tokenizer of the kind 't5', which is not supported; supported are"),
        ({"model": None}, "a tokenizer of the kind None"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre 'kimi-k2', a way to split text into words that"),
        ({"pre": None}, "tokenizer.ggml.pre None"),
        ({"tokens": None}, "tokenizer.ggml.token_type must be a list of 0 numbers"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of the type str"),
        ({"tokens": "all"}, "tokenizer.ggml.tokens must be of the type list"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type must be a list of 2048 numbers"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges must be pairs of tokens"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id must be of the type int"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_refused(
    tmp_path: Path, metadata: dict[str, Any], expected: str
) -> None:
    path = written(tmp_path / "model.gguf", DEMO_MODEL, **metadata)
    with pytest.raises(InvalidModel) as refused:
        read_both(path)
    assert expected in str(refused.value) and str(path) in str(refused.value)


def test_more_tokens_than_the_model_has_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", DEMO_MODEL)
    with pytest.raises(InvalidModel, match=r"a tokenizer of 2048 tokens, and its model only 2000"):
        check_tokenizer(open_gguf(path), vocab_size=2000)


def test_qwen_files_of_before_words_had_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = make_model("qwen2", num_hidden_layers=1, vocab_size=2048)
    write_gguf(path, model, tokenizer=DEMO_MODEL, metadata={"tokenizer.ggml.pre": None})
    assert json.loads(read_tokenizer(path))["normalizer"] == {"type": "NFC"}


def test_settings_are_those_of_the_original(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", DEMO_MODEL)
    original = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    found = read_settings(path, "tokenizer_config.json")
    assert found == {name: original[name] for name in ("eos_token", "pad_token", "chat_template")}
    assert read_settings(path, "modules.json") is None


def test_every_token_that_ends_an_answer_is_known(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", DEMO_MODEL, eot_token_id=17)
    found = read_settings(path, "generation_config.json")
    assert found == {"eos_token_id": [2, 17, 0]}  # named, and <|endoftext|>


def test_defaults_of_sampling_are_read(tmp_path: Path) -> None:
    model = make_model("llama2", num_hidden_layers=1)
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    path = write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    found = read_settings(path, "generation_config.json")
    assert found == {"eos_token_id": [2], "temperature": 0.6, "top_k": 20}


def test_unused_tokens_are_no_text_and_user_defined_ones_are(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "a", "[PAD2]", "<think>"])
    writer.add_token_scores([0.0, -1.0, 0.0, 0.0])
    kinds = [TokenType.UNKNOWN, TokenType.NORMAL, TokenType.UNUSED, TokenType.USER_DEFINED]
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    tokenizer = Tokenizer.from_str(read_tokenizer(tmp_path / "model.gguf"))
    assert tokenizer.encode("a<think>a").ids == [1, 3, 1]
    assert tokenizer.decode([1, 3, 1]) == "a<think>a"
    assert tokenizer.token_to_id("[PAD2]") is None
    assert 0 in tokenizer.encode("[PAD2]").ids


def test_thousands_of_special_tokens_are_added_together(tmp_path: Path) -> None:
    specials = [f"<unused{i}>" for i in range(12_000)]  # one by one they take half a minute
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", *specials])
    writer.add_token_scores([0.0] * (1 + len(specials)))
    writer.add_token_types([TokenType.UNKNOWN] + [TokenType.CONTROL] * len(specials))
    writer.add_unk_token_id(0)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    began_s = time.process_time()
    tokenizer = Tokenizer.from_str(read_tokenizer(path))
    assert time.process_time() - began_s < 10
    assert tokenizer.encode("<unused7><unused11999>").ids == [1 + 7, 1 + 11_999]


def test_a_first_token_may_have_signs_that_a_template_reads(tmp_path: Path) -> None:
    tokens = list(
        Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        .get_vocab(with_added_tokens=True)
        .items()
    )
    texts = [text for text, _ in sorted(tokens, key=lambda each: each[1])]
    texts[1] = "$A:1"
    converted = reread(
        tmp_path / "m.gguf", DEMO_MODEL, tokens=texts, bos_token_id=1, add_bos_token=True
    )
    found = converted.encode("a", "b")
    assert found.ids[0] == 1 and found.tokens[0] == "$A:1"
    assert found.type_ids == [0, 0, 1, 1]
