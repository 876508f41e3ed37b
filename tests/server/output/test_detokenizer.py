"""Incremental detokenization gives the text that a decode of all ids gives."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.scheduler.errors import InvalidConfig
from penstock.server.output.detokenizer import StopScanner, StopStrings, TextDecoder, Vocabulary
from tests.support.paths import ROOT

STORIES = ROOT.parent / "shared" / "models" / "stories260K" / "tokenizer.json"
DEMO = ROOT / "engine" / "hub" / "demo_model" / "tokenizer.json"


def byte_level_tokenizer() -> Tokenizer:
    """Each byte is a token; a few tokens split characters, and some are added, special or not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = []
    for text in ("😀", "né", "the", "你"):
        chars = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
                 .pre_tokenize_str(text)[0][0]]  # fmt: skip
        word = chars[0]
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocab.setdefault(word[:end], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("<tool>")])
    return tokenizer


def load(path: Path) -> Tokenizer:
    if not path.exists():
        pytest.skip(f"{path.name} of {path.parent.name} is missing")
    return Tokenizer.from_file(str(path))


@pytest.fixture(scope="module", params=["byte level", "stories260K", "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte level":
        return byte_level_tokenizer()
    return load(STORIES if request.param == "stories260K" else DEMO)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


def decode_in_parts(vocabulary: Vocabulary, ids: list[int], *, is_whole: bool = True) -> list[str]:
    decoder = TextDecoder(vocabulary, is_whole=is_whole)
    return [*(decoder.feed(token_id) for token_id in ids), decoder.end()]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_parts_joined_are_the_decode_of_any_ids(
    tokenizer: Tokenizer, vocabulary: Vocabulary, data: st.DataObject
) -> None:
    top = tokenizer.get_vocab_size() - 1
    ids = data.draw(st.lists(st.integers(0, top) | st.integers(0, 258), max_size=40))
    assert "".join(decode_in_parts(vocabulary, ids)) == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
@example("😀😀 né 你好")
@example("  leading  spaces ")
def test_parts_joined_are_the_decode_of_any_text(
    tokenizer: Tokenizer, vocabulary: Vocabulary, text: str
) -> None:
    ids = tokenizer.encode(text).ids
    assert "".join(decode_in_parts(vocabulary, ids)) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_no_part_of_a_text_has_half_a_character(
    tokenizer: Tokenizer, vocabulary: Vocabulary, text: str
) -> None:
    ids = tokenizer.encode(text).ids
    replaced = tokenizer.decode(ids).count("\ufffd")
    assert "".join(decode_in_parts(vocabulary, ids)).count("\ufffd") == replaced


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_that_continues_keeps_its_first_space(
    tokenizer: Tokenizer, vocabulary: Vocabulary, data: st.DataObject
) -> None:
    before = tokenizer.encode("the", add_special_tokens=False).ids
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=10))
    whole = tokenizer.decode(before + ids)
    parts = decode_in_parts(vocabulary, ids, is_whole=False)
    assert tokenizer.decode(before) + "".join(parts) == whole


def test_a_split_emoji_is_returned_once_it_is_complete() -> None:
    tokenizer = byte_level_tokenizer()
    vocab = tokenizer.get_vocab()
    word = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀")[0][0]
    ids = [vocab[char] for char in word]
    assert decode_in_parts(Vocabulary(tokenizer), ids) == ["", "", "", "😀", ""]


def test_an_incomplete_character_becomes_one_replacement_at_the_end() -> None:
    tokenizer = byte_level_tokenizer()
    word = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀")[0][0]
    ids = [tokenizer.get_vocab()[char] for char in word[:3]]
    assert decode_in_parts(Vocabulary(tokenizer), ids) == ["", "", "", "\ufffd"]


def test_an_id_outside_the_vocabulary_adds_nothing() -> None:
    assert decode_in_parts(Vocabulary(byte_level_tokenizer()), [99_999]) == ["", ""]


def test_spelling_gives_raw_bytes_and_the_names_of_special_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.get_vocab()
    spelling = Vocabulary(tokenizer).spelling
    assert spelling(ids["<|end|>"]) == b"<|end|>"
    assert spelling(ids["ð"]) == b"\xf0"
    assert spelling(ids["the"]) == b"the"


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(InvalidConfig, match="WordPiece"):
        Vocabulary(tokenizer)


# Stop strings.


def stopped_text(text: str, stops: list[str], *, includes_stop: bool) -> tuple[str, bool]:
    """The reference: slow and obvious."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(len(stop) for stop in found)
            return text[: end if includes_stop else end - longest], True
    return text, False


def scan(parts: list[str], stops: list[str], *, includes_stop: bool) -> tuple[str, bool]:
    scanner = StopScanner(StopStrings(stops), includes_stop=includes_stop)
    out = ""
    for part in parts:
        out += scanner.feed(part)
        if scanner.stop:
            return out, True
    return out + scanner.end(), False


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.text("ab", max_size=5), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    includes_stop=st.booleans(),
)
def test_the_first_stop_string_ends_the_text_however_it_is_divided(
    parts: list[str], stops: list[str], includes_stop: bool
) -> None:
    expected = stopped_text("".join(parts), stops, includes_stop=includes_stop)
    assert scan(parts, stops, includes_stop=includes_stop) == expected


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.text("abc", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(
    parts: list[str], stops: list[str]
) -> None:
    scanner = StopScanner(StopStrings(stops), includes_stop=False)
    seen, sent = "", ""
    for part in parts:
        seen += part
        sent += scanner.feed(part)
        if scanner.stop:
            return
        held = seen[len(sent) :]
        assert not held or any(stop.startswith(held) for stop in stops), json.dumps([seen, held])
