"""How many tokens a text has, by a tokenizer or by an estimate."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from penstock.scheduler.errors import InvalidConfig

TokenCounter: TypeAlias = Callable[[Sequence[str]], list[int]]
# English text has about four characters per token.
CHARACTERS_PER_TOKEN = 4
TOKENIZER_FILE = "tokenizer.json"
_HUB_ID = r"[\w.-]+/[\w.-]+"


def estimate_tokens(texts: Sequence[str]) -> list[int]:
    """A rough number of tokens of each text, for any model."""
    return [max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in texts]


def tokenizer_counter(path: Path | None) -> TokenCounter:
    """A counter from a tokenizer.json, a model's directory with one, or a hub id; without a path,
    an estimate. Raises InvalidConfig.

    Special tokens around a text, such as BOS, are counted, as `vllm bench serve` does.
    """
    if path is None:
        return estimate_tokens
    from tokenizers import Tokenizer

    file = _find(path)
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


def _find(path: Path) -> Path:
    """The file itself; of a hub id, the hub's, downloaded if it is not here."""
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.is_file():
        return file
    if not re.fullmatch(_HUB_ID, str(path)) or path.exists():
        raise InvalidConfig(
            f"--tokenizer {path} has no {TOKENIZER_FILE}; give a model's directory, that file or "
            "a hub id"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(path), TOKENIZER_FILE))
    except Exception as error:  # the hub's client also raises errors of its transport
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InvalidConfig(
            f"--tokenizer {path} is no directory here and cannot be downloaded from Hugging Face "
            f"({reason}); give a directory that has a {TOKENIZER_FILE}"
        ) from error
