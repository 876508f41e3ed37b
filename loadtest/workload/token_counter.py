"""How many tokens a text has, by a tokenizer or by an estimate."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from penstock.scheduler.errors import InvalidConfig

TokenCounter: TypeAlias = Callable[[Sequence[str]], list[int]]
# English text has about four characters per token.
CHARACTERS_PER_TOKEN = 4
TOKENIZER_FILE = "tokenizer.json"


def estimate_tokens(texts: Sequence[str]) -> list[int]:
    """A rough number of tokens of each text, for any model."""
    return [max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in texts]


def tokenizer_counter(path: Path) -> TokenCounter:
    """A counter from a tokenizer.json, or a model's directory with one. Raises InvalidConfig.

    Special tokens around a text, such as BOS, are counted, as `vllm bench serve` does.
    """
    from tokenizers import Tokenizer

    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise InvalidConfig(
            f"--tokenizer {path} has no {TOKENIZER_FILE}; give a model's directory or that file"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower class
        raise InvalidConfig(f"--tokenizer {file} cannot be read: {error}") from error
    # The file may set truncation or padding, which would change the counts.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(list(texts))]

    return count
