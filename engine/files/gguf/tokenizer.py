"""The tokenizer in a GGUF file's metadata, as a tokenizer.json.

Byte-level BPE (`gpt2`) keeps its merges in the file. SentencePiece's BPE (`llama`) has a score for
each token instead: of two neighbours, those are merged whose union has the highest, and merges in
that order are the same. Both give the ids of the tokenizer that was converted, except that GGUF has
no place for some details of Hugging Face's: whether a space is put before a text that follows a
special token (llama.cpp does so, as Llama 2), and whether special tokens take spaces beside them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.file import GgufFile, open_gguf
from penstock.engine.files.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
# Values of token_type. Unused ones fill up the vocabulary, and are in no tokenizer.json.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KINDS = ("bos", "eos", "unknown", "padding")
_HF_NAMES = {"unknown": "unk", "padding": "pad"}
# Which end an answer besides the one that the file names: its conversion kept one of several.
# Source: llama.cpp's list of the same purpose.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_turn>"),
        *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
_SPACE = "\u2581"  # what SentencePiece writes for a space
# More than any token of SentencePiece has: pairs of parts are as many.
_MAX_MERGED_CHARS = 256


def read_tokenizer(path: Path) -> str:
    """As a tokenizer.json. Raises InvalidModel."""
    gguf = open_gguf(path)
    return json.dumps(_Tokens(gguf).tokenizer(), ensure_ascii=False)


def check_tokenizer(gguf: GgufFile, vocab_size: int) -> None:
    """Raises InvalidModel where it is of an unknown kind, or not this model's."""
    tokens = _Tokens(gguf)
    tokens.check()
    if len(tokens.texts) > vocab_size:
        raise InvalidModel(
            f"{gguf.path} has a tokenizer of {len(tokens.texts)} tokens, and its model only "
            f"{vocab_size}; convert the model again",
            brief="its tokenizer has more tokens than its model",
        )


def special_tokens(gguf: GgufFile) -> dict[str, str]:
    """bos_token, eos_token ... as tokenizer_config.json has them."""
    tokens = _Tokens(gguf)
    ids = {kind: tokens.id_of(kind) for kind in _KINDS}
    return {
        f"{_HF_NAMES.get(kind, kind)}_token": tokens.texts[token_id]
        for kind, token_id in ids.items()
        if token_id is not None
    }


def end_token_ids(gguf: GgufFile) -> list[int]:
    """Every id that ends an answer, the one that the file names first."""
    tokens = _Tokens(gguf)
    named = [tokens.id_of(kind) for kind in ("eos", "eot", "eom")]
    by_text = [
        token_id
        for token_id, (text, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=True))
        if text in _ENDS and kind in (_CONTROL, _USER_DEFINED)
    ]
    return list(dict.fromkeys(each for each in (*named, *by_text) if each is not None))


class _Tokens:
    """texts, kinds: of each token, by its id."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self.texts: list[str] = self._list("tokens", str)
        kinds = self._list("token_type", int)
        self.kinds: list[int] = kinds or [_NORMAL] * len(self.texts)
        if len(self.kinds) != len(self.texts):
            raise self._wrong("token_type", f"a list of {len(self.texts)} numbers")

    def id_of(self, kind: str) -> int | None:
        """The id of a special token; None for a model without one."""
        token_id = self._get(f"{kind}_token_id", int)
        if token_id is None or not 0 <= token_id < len(self.texts):
            return None
        return int(token_id)

    def check(self) -> None:
        if not self.texts:
            raise InvalidModel(
                f"{self._gguf.path} has no tokenizer; convert the model again",
                brief="no tokenizer",
            )
        model = self._get("model", str)
        if model not in ("gpt2", "llama"):
            raise InvalidModel(
                f"{self._gguf.path} has a tokenizer of the kind {model!r:.40}, which is not "
                "supported; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece's "
                "BPE): use the version of the model in safetensors",
                brief=f"the tokenizer {model!r:.40} is not supported",
            )
        if model == "gpt2":
            self._pre_tokenizer()

    def tokenizer(self) -> dict[str, Any]:
        self.check()
        is_byte_level = self._get("model", str) == "gpt2"
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            **(self._byte_level() if is_byte_level else self._sentence_piece()),
        }

    def _byte_level(self) -> dict[str, Any]:
        rules = self._pre_tokenizer()
        merges = []
        for merge in self._list("merges", str):
            left, separator, right = merge.partition(" ")
            if not (left and separator and right):
                raise self._wrong("merges", "pairs of tokens")
            merges.append((left, right))
        return {
            "normalizer": rules.normalizer,
            "pre_tokenizer": rules.rules,
            "post_processor": self._post_processor(adds_bos=rules.adds_bos),
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                **_bpe(self._vocabulary(), merges),
                "ignore_merges": rules.ignores_merges,
            },
        }

    def _sentence_piece(self) -> dict[str, Any]:
        adds_space = self._get("add_space_prefix", bool, default=True)
        unknown = self.id_of("unknown")
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepend = [{"type": "Prepend", "prepend": _SPACE}] * adds_space
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * adds_space
        vocabulary = self._vocabulary()
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(adds_bos=True),
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    *strip,
                ],
            },
            "model": {
                **_bpe(vocabulary, list(self._merges_by_score(vocabulary))),
                "unk_token": None if unknown is None else self.texts[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
            },
        }

    def _merges_by_score(self, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
        """The best first; of those that make the same token, that with the better parts."""
        scores = self._list("scores", float)
        if len(scores) != len(self.texts):
            raise self._wrong("scores", f"a list of {len(self.texts)} numbers")
        merged = [
            (-scores[token_id], token_id, text)
            for text, token_id in vocabulary.items()
            if self.kinds[token_id] == _NORMAL and 1 < len(text) <= _MAX_MERGED_CHARS
        ]
        for _, _, text in sorted(merged):
            parts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            known = [pair for pair in parts if pair[0] in vocabulary and pair[1] in vocabulary]
            yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))

    def _post_processor(self, *, adds_bos: bool) -> dict[str, Any] | None:
        bos = self.id_of("bos") if self._get("add_bos_token", bool, default=adds_bos) else None
        eos = self.id_of("eos") if self._get("add_eos_token", bool, default=False) else None
        if bos is None and eos is None:
            return None
        before, after = ([self.texts[each]] if each is not None else [] for each in (bos, eos))

        def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
            def special(texts: list[str]) -> list[dict[str, Any]]:
                return [{"SpecialToken": {"id": text, "type_id": type_id}} for text in texts]

            text = {"Sequence": {"id": sequence, "type_id": type_id}}
            return [*special(before), text, *special(after)]

        specials = {self.texts[each]: each for each in (bos, eos) if each is not None}
        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": [*around("A", 0), *around("B", 1)],
            "special_tokens": {
                text: {"id": text, "ids": [token_id], "tokens": [text]}
                for text, token_id in specials.items()
            },
        }

    def _vocabulary(self) -> dict[str, int]:
        """The ids of texts: where tokens have the same, the first."""
        vocabulary: dict[str, int] = {}
        for token_id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if kind != _UNUSED:
                vocabulary.setdefault(text, token_id)
        return vocabulary

    def _added(self) -> list[dict[str, Any]]:
        """The tokens that are found in a text before anything else."""
        return [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for token_id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and text
        ]

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._get("pre", str)
        if name in (None, "default") and self._gguf.metadata.get("general.architecture") in (
            *("qwen2", "qwen3"),
        ):
            name = "qwen2"  # files from before llama.cpp wrote it
        if name not in PRE_TOKENIZERS:
            raise InvalidModel(
                f"{self._gguf.path} has {_PREFIX}pre {name!r:.40}, a way to split text into words "
                f"that is not supported; supported are {', '.join(PRE_TOKENIZERS)}: use the "
                "version of the model in safetensors, or convert it again with a newer llama.cpp",
                brief=f"the tokenizer's words, {name!r:.40}, are not supported",
            )
        return PRE_TOKENIZERS[name]

    def _get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._gguf.metadata.get(_PREFIX + key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(key, f"of the type {kind.__name__}")
        return value

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._get(key, list, default=[])
        if value and not isinstance(value[0], kind):  # all are of one type
            raise self._wrong(key, f"a list of the type {kind.__name__}")
        return list(value)

    def _wrong(self, key: str, what: str) -> InvalidModel:
        return InvalidModel(
            f"{self._gguf.path}: {_PREFIX}{key} must be {what}; convert the model again",
            brief=f"{_PREFIX}{key} is damaged",
        )


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }
