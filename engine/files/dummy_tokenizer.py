"""A tokenizer for dummy weights (`--load-format dummy`): it encodes any text and decodes any id.

Each byte is a token, and every further id decodes to `<id>`, so different ids give different text.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.config import LoadFormat
from penstock.engine.files.gguf.file import is_gguf

# Any of these is a tokenizer.
_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tokenizer_config.json")


def needs_dummy_tokenizer(directory: Path, load_format: LoadFormat) -> bool:
    """Whether weights are random and the directory has no tokenizer."""
    return load_format is LoadFormat.DUMMY and not (
        is_gguf(directory) or any((directory / name).exists() for name in _FILES)
    )


def dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """With exactly vocab_size tokens. With fewer than 256, the first stands for several bytes."""
    # The most useful first, for a small vocabulary: space, then visible ASCII.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda word: (word != "Ġ", word))
    words = [*alphabet, *(f"<{i}>" for i in range(len(alphabet), vocab_size))][:vocab_size]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
