"""Tokenizers in their trainers' files: SentencePiece's tokenizer.model, Mistral's tekken.json.

Both become what a GGUF file's metadata has, as llama.cpp converts them, and from there a
tokenizer.json. The rule by which tiktoken's files split text into words stands in a model's Python
code, so these are refused.
"""

import base64
import binascii
from functools import cache
from pathlib import Path
from typing import Any

from penstock.engine.errors import InvalidModel, unreadable
from penstock.engine.files.gguf.tokenizer import Words, split, tokenizer_json
from penstock.engine.files.gguf.tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Tokens,
)
from penstock.engine.files.json_file import Fields, read_object

SENTENCE_PIECE, TEKKEN = "tokenizer.model", "tekken.json"
_BPE = 2
# Each field's number, its type (* before that of a list) and its default. Source:
# sentencepiece_model.proto.
_PROTO: dict[str, dict[str, tuple[int, str, str | None]]] = {
    "Piece": {
        "piece": (1, "STRING", None),
        "score": (2, "FLOAT", None),
        "type": (3, "INT32", "1"),
    },
    "Trainer": {
        "model_type": (3, "INT32", "1"),
        "treat_whitespace_as_suffix": (24, "BOOL", None),
    },
    "Normalizer": {
        "precompiled_charsmap": (2, "BYTES", None),
        "add_dummy_prefix": (3, "BOOL", "true"),
        "remove_extra_whitespaces": (4, "BOOL", "true"),
    },
    "Model": {
        "pieces": (1, "*Piece", None),
        "trainer": (2, "Trainer", None),
        "normalizer": (3, "Normalizer", None),
    },
}
_MAX_ADDED = 100_000
_SPECIAL = {
    "bos": ("bos_token", "<s>", "<bos>"),
    "eos": ("eos_token", "</s>", "<eos>"),
    "unknown": ("unk_token", "<unk>"),
    "padding": ("pad_token", "<pad>"),
}
# Source: mistral-common's list for files of before they had one.
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


def read_tokenizer_model(directory: Path) -> tuple[str, dict[str, str]] | None:
    """Returns a tokenizer.json and its bos_token, eos_token ...; None where neither file is there,
    or SentencePiece's is of a kind that transformers must convert. Raises InvalidModel."""
    if (directory / TEKKEN).is_file():
        tokens, words = _read_tekken(directory / TEKKEN)
        return tokenizer_json(tokens, words), tokens.special()
    if (directory / SENTENCE_PIECE).is_file():
        settings = read_object(directory / "tokenizer_config.json")
        if found := _read_sentence_piece(directory / SENTENCE_PIECE, settings):
            return tokenizer_json(found, None), found.special()
    return None


def tiktoken_only(path: Path | str) -> InvalidModel:
    return InvalidModel(
        f"{path} has only tiktoken's list of tokens, without the rule that splits a text into "
        "words; copy the tokenizer.json of a converted version of the model into it",
        brief="its tokenizer is only tiktoken's list",
    )


def _read_tekken(path: Path) -> tuple[Tokens, Words]:
    fields = Fields.read(path)
    config = Fields(path, fields.mapping("config"))
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise config.wrong("pattern", "a regular expression", pattern)
    try:
        listed = fields.get("special_tokens")
        special = list(_TEKKEN_SPECIAL)
        if listed is not None:
            by_rank = {each["rank"]: each["token_str"] for each in listed}
            special = [by_rank[rank] for rank in range(len(listed))]
        num_special = config.count("default_num_special_tokens", len(special))
        special += [f"<SPECIAL_{i}>" for i in range(len(special), num_special)]
        size = config.count(
            "default_vocab_size", len(fields.get("vocab")) + num_special, least=num_special
        )
        words = [
            base64.b64decode(each["token_bytes"], validate=True)
            for each in fields.get("vocab")[: size - num_special]
        ]
    except (TypeError, KeyError, AttributeError, binascii.Error) as error:
        raise InvalidModel(
            f"{path} is not Mistral's list of tokens: {error!r}; download the model again",
            brief=f"{TEKKEN} is damaged",
        ) from None
    metadata = {
        "tokens": [*special, *map(_spelled, words)],
        "token_type": [CONTROL] * len(special) + [NORMAL] * len(words),
        "merges": _merges(words),
        **_special_ids(special),
    }
    # Its encoder takes a word that is a token as it is, and puts BOS before a text.
    return _tokens(path, metadata), Words(split(pattern), ignores_merges=True, adds_bos=True)


def _merges(words: list[bytes]) -> list[str]:
    """Every pair that makes a token, in the order of tokens: that is tiktoken's algorithm."""
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = []
    for word in words:
        parts = [(word[:cut], word[cut:]) for cut in range(1, len(word))]
        known = [pair for pair in parts if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [f"{_spelled(left)} {_spelled(right)}" for left, right in known]
    return merges


def _read_sentence_piece(path: Path, settings: dict[str, Any]) -> Tokens | None:
    """settings: of tokenizer_config.json. Raises InvalidModel for what is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    if _is_tiktoken(content):
        raise tiktoken_only(path.parent)
    from google.protobuf.message import DecodeError

    model = _model_class()()
    try:
        if not (model.ParseFromString(content) and model.pieces):
            raise DecodeError("it has no tokens")
    except DecodeError as error:
        raise InvalidModel(
            f"{path} is not a SentencePiece model: {error}; download it again",
            brief=f"{SENTENCE_PIECE} is damaged",
        ) from None
    normalizer = model.normalizer
    if model.trainer.model_type != _BPE or model.trainer.treat_whitespace_as_suffix:
        return None
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        return None
    texts = [each.piece for each in model.pieces]
    if not all(isinstance(text, str) for text in texts):  # of other bytes than UTF-8's
        raise InvalidModel(
            f"{path} has tokens that are not UTF-8; download it again",
            brief=f"{SENTENCE_PIECE} is damaged",
        )
    kinds = [each.type for each in model.pieces]
    _add_tokens(texts, kinds, settings)
    scores = [each.score for each in model.pieces]
    return _tokens(
        path,
        {
            "model": "llama",  # which has scores, and no merges
            "tokens": texts,
            "token_type": kinds,
            "scores": scores + [0.0] * (len(texts) - len(scores)),
            "add_space_prefix": normalizer.add_dummy_prefix,
            "add_bos_token": settings.get("add_bos_token") is not False,
            "add_eos_token": settings.get("add_eos_token") is True,
            **_special_ids(texts, settings),
        },
    )


def _add_tokens(texts: list[str], kinds: list[int], settings: dict[str, Any]) -> None:
    """Adds those of added_tokens_decoder, which a model was trained further with."""
    added = settings.get("added_tokens_decoder")
    by_id = {
        int(key): token
        for key, token in (added.items() if isinstance(added, dict) else ())
        if key.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
    }
    for token_id, token in sorted(by_id.items())[:_MAX_ADDED]:
        if token_id >= len(texts) + _MAX_ADDED:
            break
        unused = range(len(texts), token_id + 1)
        texts += [f"<unused {each}>" for each in unused]
        kinds += [UNUSED for _ in unused]
        texts[token_id] = token["content"]
        if kinds[token_id] not in (BYTE, UNKNOWN):
            kinds[token_id] = CONTROL if token.get("special") else USER_DEFINED


def _tokens(path: Path, metadata: dict[str, Any]) -> Tokens:
    return Tokens(path, {PREFIX + name: value for name, value in metadata.items()})


def _special_ids(texts: list[str], settings: dict[str, Any] | None = None) -> dict[str, int]:
    """Under GGUF's names: the tokens that the settings name, or those with the usual texts."""
    ids = {}
    for kind, (name, *usual) in _SPECIAL.items():
        named = (settings or {}).get(name)
        text = named.get("content") if isinstance(named, dict) else named
        known = [each for each in (text, *usual) if each in texts]
        if known:
            ids[f"{kind}_token_id"] = texts.index(known[0])
    return ids


def _is_tiktoken(content: bytes) -> bool:
    """Whether its first line is a token in base64 and its rank."""
    token, _, rank = content[:100].split(b"\n")[0].partition(b" ")
    try:
        return rank.strip().isdigit() and bool(base64.b64decode(token, validate=True))
    except binascii.Error:
        return False


@cache
def _letters() -> list[str]:
    """For each byte the letter that byte-level BPE writes for it, as GPT-2 does."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def _spelled(word: bytes) -> str:
    return "".join(map(_letters().__getitem__, word))


@cache
def _model_class() -> Any:
    """The class of a parsed tokenizer.model; other fields than these are skipped. Declared anew,
    since SentencePiece's own module runs with few versions of protobuf."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="tokenizer_model.proto", package="penstock")
    for name, fields in _PROTO.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            is_list, is_message = kind.startswith("*"), kind[-1].islower()
            type_name = f"TYPE_{'MESSAGE' if is_message else kind}"
            message.field.add(
                name=field,
                number=number,
                label="LABEL_REPEATED" if is_list else "LABEL_OPTIONAL",
                type=type_name,
                type_name=f".penstock.{kind.strip('*')}" if is_message else None,
                default_value=default,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.Model"))
