"""`suffix`: an answer between two texts, for models that were trained to fill in the middle.

Such a model has marker tokens. The prompt is put together as prefix, suffix, middle, and the answer
is the middle. Source: Bavarian et al. 2022 (arXiv:2207.14255).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from tokenizers import Tokenizer

# prefix, suffix, middle; in the words of CodeLlama, DeepSeek Coder, StarCoder and its kin, Qwen
# Coder and CodeGemma.
_MARKERS = (
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - it is theirs
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
)
# Tokens that such models write after a middle: its end, padding, or the beginning of another file.
_ENDS = (
    "▁<EOT>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
    "<|repo_name|>",
)
# After it sentencepiece treats a text as a continuation: alone, it would put a space before it.
_ANCHOR = "☺"


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """How this model fills in the middle. end_ids: tokens that end the middle. adds_space: the
    tokenizer puts one before a text."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    end_ids: tuple[int, ...]
    adds_space: bool

    @classmethod
    def detect(cls, tokenizer: Tokenizer, *, adds_space: bool) -> Self | None:
        """None where the vocabulary has no markers."""
        for names in _MARKERS:
            prefix_id, suffix_id, middle_id = ids = _ids_of(tokenizer, names)
            if prefix_id is not None and suffix_id is not None and middle_id is not None:
                every = (*ids, *_ids_of(tokenizer, _ENDS))
                return cls(
                    prefix_id=prefix_id,
                    suffix_id=suffix_id,
                    middle_id=middle_id,
                    end_ids=tuple(i for i in every if i is not None),
                    adds_space=adds_space,
                )
        return None

    def encode(
        self, encode: Callable[[str], tuple[int, ...]], prefix: str, suffix: str
    ) -> tuple[int, ...]:
        """The prompt whose answer belongs between. encode: makes a text's ids, no special ones."""
        if self.adds_space:
            after = encode(_ANCHOR + suffix)[len(encode(_ANCHOR)) :]
        else:
            after = encode(suffix)
        return (self.prefix_id, *encode(prefix), self.suffix_id, *after, self.middle_id)


def _ids_of(tokenizer: Tokenizer, names: tuple[str, ...]) -> list[int | None]:
    return [tokenizer.token_to_id(name) for name in names]
