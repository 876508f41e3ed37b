"""Texts have the ids that the tokenizer gives which was converted."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from gguf import GGUFWriter, TokenType
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import GemmaTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.tokenization_utils_base import generate_merges

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.file import open_gguf
from penstock.engine.files.gguf.settings import read_settings
from penstock.engine.files.gguf.tokenizer import WORDS, check_tokenizer, read_tokenizer
from penstock.engine.files.gguf.tokens import Tokens
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


@pytest.mark.parametrize("name", [name for name in WORDS if name != "pixtral"])
def test_words_are_those_that_transformers_knows_by_the_same_name(name: str) -> None:
    """It has llama.cpp's for pixtral, which is a name of Mistral's, and not the model's own."""
    theirs = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS.get(name)
    if theirs is None:
        pytest.skip("transformers does not know it")
    spec = json.loads(bare(WORDS[name].rules).to_str())["pre_tokenizer"]
    assert spec["pretokenizers"][0]["pattern"] == {"Regex": theirs}


def bare(rules: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = rules
    return tokenizer


def test_words_of_deepseek_are_split_by_three_rules() -> None:
    rules = WORDS["deepseek-v3"].rules
    words = [word for word, _ in rules.pre_tokenize_str("x=12345 \u4e2d\u6587ab 'tis")]
    chinese = "\u00e4\u00b8\u0143\u00e6\u0138\u0129"  # as the letters of its bytes
    assert words == ["x", "=", "123", "45", "\u0120", chinese, "ab", "\u0120'", "tis"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # A space belongs to a letter with a case, to signs, and to no number; not all letters have.
        ("deepseek-llm", "x=12 Ab \u03b1\n\n 3;?", "x|=|1|2| Ab| \u03b1|\n|\n| |3|;?"),
        ("deepseek-llm", "a\u4e2d\uac00\uff0c \u0567b  ", "a|\u4e2d\uac00|\uff0c| \u0567|b|  "),
        ("joyai-llm", "x=12345", "x|=|123|45"),
        (
            "kimi-k2",
            "IT's 1234\u4e2dab \u3042\u4e2d/\n",
            "IT's| |123|4|\u4e2d|ab| \u3042|\u4e2d|/\n",
        ),
        ("youtu", "IT's 12\uac00b\u3001\u4e2da //\n", "IT's| |1|2|\uac00|b|\u3001|\u4e2d|a| //\n"),
    ],
)
def test_words_of_latent_models_are_split_by_their_rules(
    name: str, text: str, expected: str
) -> None:
    """Source: llama.cpp's rules, and Kimi's own in its checkpoints."""
    words = WORDS[name].rules.pre_tokenize_str(text)
    assert "|".join(text[slice(*place)] for _, place in words) == expected


def test_kimis_ids_are_tiktokens(tmp_path: Path) -> None:
    """Its checkpoint has no other tokenizer than the ranks of tokens and a rule."""
    trained = json.loads(byte_level_bpe(WORDS["kimi-k2"].rules, True).to_str())
    pattern = trained["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    letters: Any = bytes_to_unicode
    as_bytes = {letter: byte for byte, letter in letters().items()}
    special = {each["content"]: each["id"] for each in trained["added_tokens"]}
    ranks = {
        bytes(as_bytes[letter] for letter in text): rank
        for text, rank in trained["model"]["vocab"].items()
        if text not in special
    }
    theirs = tiktoken.Encoding(
        "kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    directory = save(tmp_path, Tokenizer.from_str(json.dumps(trained)))
    converted = reread(tmp_path / "m.gguf", directory, pre="kimi-k2")
    for text in TEXTS:
        expected = theirs.encode(text, allowed_special="all")
        assert converted.encode(text, add_special_tokens=False).ids == expected, text


# Of spaces and of line ends, which are tokens of Gemma.
RUNS = [sign * length for sign in "\u2581\n" for length in range(2, 9)]


def gemma_like(*, has_merges: bool) -> tuple[dict[str, int], Tokenizer]:
    """A vocabulary in Gemma's order, special tokens, bytes, spaces, and then learned ones, and the
    tokenizer that transformers' class makes of it."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "\u2581")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("\n+|\u2581{2,}"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False)
    learner.train_from_iterator([(ROOT / "README.md").read_text(), *TEXTS], trainer)
    learned = learner.get_vocab()
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    others = [text for text in sorted(learned, key=lambda text: learned[text]) if text not in RUNS]
    if not has_merges:  # no other runs, as in Gemma
        others = [text for text in others if len(text) == 1 or text.strip("\n\u2581")]
    vocabulary = {text: i for i, text in enumerate([*special, *bytes_, *RUNS, *others])}
    if has_merges:
        merges: Any = [tuple(each) for each in json.loads(learner.to_str())["model"]["merges"]]
    else:
        merges = generate_merges(vocabulary, {text: -i for text, i in vocabulary.items()})
    theirs: Any = GemmaTokenizer(vocab=vocabulary, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": special[-2:]})
    return vocabulary, theirs._tokenizer


def write_gemma(path: Path, model: str, vocabulary: dict[str, int], merges: list[str]) -> Path:
    """As llama.cpp's converter writes the tokenizers of Gemma 3, and of Gemma 4."""
    kinds = [TokenType.NORMAL] * len(vocabulary)
    kinds[:7] = [TokenType.CONTROL] * 7
    kinds[3] = TokenType.UNKNOWN
    kinds[7:263] = [TokenType.BYTE] * 256
    texts = list(vocabulary)
    writer = GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model(model)
    if model == "llama":
        # As SentencePiece's, these are found before anything else, with spaces as in a text.
        found = slice(263, 263 + len(RUNS))
        kinds[found] = [TokenType.USER_DEFINED] * len(RUNS)
        texts[found] = [text.replace("\u2581", " ") for text in RUNS]
        writer.add_token_scores([-float(i) for i in range(len(texts))])
    else:
        writer.add_token_scores([-1000.0] * len(texts))
        writer.add_token_merges(merges)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    for kind, token_id in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{kind}_token_id")(token_id)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return path


def test_special_tokens_of_phi_3_take_the_space_after_them(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "phi3")
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "<0x0A>", "\u2581", "a", "\u2581a"]
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(each) for each in range(len(tokens))])
    special = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3]
    writer.add_token_types([*special, TokenType.BYTE, *[TokenType.NORMAL] * 3])
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    tokenizer = Tokenizer.from_str(read_tokenizer(tmp_path / "model.gguf"))
    assert tokenizer.encode("<|end|>\n a<|end|>").ids == [3, 6, 3]
    assert tokenizer.encode("</s> a<s>\n<s> a").ids == [2, 6, 1, 4, 1, 7]


@pytest.mark.parametrize("model", ["llama", "gemma4"])
def test_gemmas_ids_are_those_of_its_class_in_transformers(tmp_path: Path, model: str) -> None:
    vocabulary, original = gemma_like(has_merges=model == "gemma4")
    merges = [" ".join(each) for each in json.loads(original.to_str())["model"]["merges"]]
    path = write_gemma(tmp_path / "m.gguf", model, vocabulary, merges)
    converted = Tokenizer.from_str(read_tokenizer(path))
    for text in [*TEXTS, "a   b\n\n\nc", "<start_of_turn>user\nHi<end_of_turn>\n"]:
        expected = original.encode(text, add_special_tokens=False).ids
        assert converted.encode(text, add_special_tokens=False).ids == expected, text
        assert converted.encode(text).ids == [2, *expected]
        for skips in (True, False):
            decoded = converted.decode(expected, skip_special_tokens=skips)
            assert decoded == original.decode(expected, skip_special_tokens=skips)


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
        ({"pre": "bloom"}, "tokenizer.ggml.pre 'bloom', a way to split text into words that"),
        ({"pre": None}, "tokenizer.ggml.pre None"),
        ({"tokens": None}, "tokenizer.ggml.token_type must be a list of 0 numbers"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of the type str"),
        ({"tokens": "all"}, "tokenizer.ggml.tokens must be of the type list"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type must be a list of 2048 numbers"),
        ({"merges": None, "pre": "kimi-k2"}, "tokenizer.ggml.merges must be pairs of tokens"),
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


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["<|return|>", "<|end|>", "<|call|>", "<|start|>"], [0, 2]),  # gpt-oss
        (["<|end|>", "<|endoftext|>", "<|call|>"], [0, 1, 2]),
        (["<eos>", "<turn|>", "</s>", "<|tool_response>"], [0, 1, 3]),  # Gemma 4
        (["<eos>", "</s>", "<end_of_turn>"], [0, 1, 2]),
    ],
)
def test_a_token_that_ends_a_message_may_not_end_an_answer(
    texts: list[str], expected: list[int]
) -> None:
    kinds = [TokenType.CONTROL] * len(texts)
    metadata = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}
    assert Tokens(Path("m.gguf"), metadata).end_ids() == expected


def test_several_chat_templates_have_their_names(tmp_path: Path) -> None:
    more = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    model = make_model("llama2", num_hidden_layers=1, vocab_size=2048)
    path = write_gguf(tmp_path / "model.gguf", model, tokenizer=DEMO_MODEL, metadata=more)
    found = read_settings(path, "tokenizer_config.json")
    original = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    assert found is not None
    assert found["chat_template"] == [
        {"name": "default", "template": original["chat_template"]},
        {"name": "tool_use", "template": "tools"},
    ]


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
