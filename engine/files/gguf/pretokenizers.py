"""How a byte-level tokenizer splits text before it merges bytes: `tokenizer.ggml.pre` of a GGUF
file, as the fields of a tokenizer.json that it stands for."""

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# The gap is for digits: how many together.
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(regex: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_GPT2 = _byte_level(use_regex=True)
_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2],
}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """ignores_merges: a word that is a token is that token, whatever the merges make of it.
    adds_bos: where the file does not say whether."""

    rules: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


_LLAMA3_BPE = PreTokenizer(_split(_LLAMA3), ignores_merges=True, adds_bos=True)
_SINGLE_DIGITS = PreTokenizer(_DIGITS)
# Source: llama.cpp's names for the tokenizers of models; the rules are those models' own.
PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3_BPE,
    "llama3": _LLAMA3_BPE,
    "llama-v3": _LLAMA3_BPE,
    "dbrx": PreTokenizer(_split(_LLAMA3)),
    "smaug-bpe": PreTokenizer(_split(_LLAMA3)),
    "tekken": PreTokenizer(_split(_TEKKEN), ignores_merges=True, adds_bos=True),
    "qwen2": PreTokenizer(_split(_QWEN2), normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": PreTokenizer(_split(_QWEN2)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "gpt-2": PreTokenizer(_GPT2),
}
