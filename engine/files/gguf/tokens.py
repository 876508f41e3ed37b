"""The tokens in a GGUF file's metadata, or in the same words. Needs no library of tokenizers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.errors import InvalidModel

PREFIX = "tokenizer.ggml."
# Values of token_type. Unused ones fill up the vocabulary, and are in no tokenizer.json.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_HF_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# Which end an answer besides the one that the file names: its conversion kept one of several.
# Source: llama.cpp's list of the same purpose.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_turn>", "<turn|>"),
        *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        *("<|tool_response>", "<|return|>", "<|call|>"),
    )
)
# And which do not where all of others are there: a message ends, and another follows.
_NO_ENDS = {
    "<|end|>": frozenset({"<|return|>", "<|call|>"}),  # gpt-oss
    "</s>": frozenset({"<|tool_response>"}),  # Gemma 4
}


class Tokens:
    """texts, kinds: of each token, by its id."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """path: for error messages."""
        self.path = path
        self.metadata = metadata
        self.texts: list[str] = self.values("tokens", str)
        kinds = self.values("token_type", int)
        self.kinds: list[int] = kinds or [NORMAL] * len(self.texts)
        if len(self.kinds) != len(self.texts):
            raise self.wrong("token_type", f"a list of {len(self.texts)} numbers")

    def id_of(self, kind: str) -> int | None:
        """The id of a special token; None for a model without one."""
        token_id = self.get(f"{kind}_token_id", int)
        if token_id is None or not 0 <= token_id < len(self.texts):
            return None
        return int(token_id)

    def special(self) -> dict[str, str]:
        """bos_token, eos_token ... as tokenizer_config.json has them."""
        ids = {name: self.id_of(kind) for kind, name in _HF_NAMES.items()}
        return {
            f"{name}_token": self.texts[token_id]
            for name, token_id in ids.items()
            if token_id is not None
        }

    def end_ids(self) -> list[int]:
        """Every id that ends an answer, the one that the file names first."""
        named = [self.id_of(kind) for kind in ("eos", "eot", "eom")]
        by_text = {
            text: token_id
            for token_id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if text in _ENDS and kind in (CONTROL, USER_DEFINED)
        }
        for text, others in _NO_ENDS.items():
            if others <= by_text.keys():
                by_text.pop(text, None)
        ids = (*named, *by_text.values())
        return list(dict.fromkeys(each for each in ids if each is not None))

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(PREFIX + key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(key, f"of the type {kind.__name__}")
        return value

    def values(self, key: str, kind: type) -> list[Any]:
        value = self.get(key, list, default=[])
        if value and not isinstance(value[0], kind):  # all are of one type
            raise self.wrong(key, f"a list of the type {kind.__name__}")
        return list(value)

    def wrong(self, key: str, what: str) -> InvalidModel:
        return InvalidModel(
            f"{self.path}: {PREFIX}{key} must be {what}; convert the model again",
            brief=f"{PREFIX}{key} is damaged",
        )
