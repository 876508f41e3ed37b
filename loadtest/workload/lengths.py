"""How many tokens a text has: by its tokenizer, by the server, or by a guess."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from penstock.scheduler.errors import InvalidConfig

Count: TypeAlias = Callable[[Sequence[str]], list[int]]
# English text has about four characters a token.
CHARACTERS_PER_TOKEN = 4
TOKENIZER_FILE = "tokenizer.json"


def estimate(texts: Sequence[str]) -> list[int]:
    """About how many tokens each text has, whatever the model."""
    return [max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in texts]


def tokenizer_count(path: Path) -> Count:
    """Counts by a tokenizer.json, or by the one in a model's directory. Raises InvalidConfig.

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
    # A file may cut or pad what it encodes, which would make every text as long as that.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(list(texts))]

    return count
