"""A tokenizer for weights that are made up too: any text in, something to read out.

Each byte is a word, and every further id is spelled `<id>`, so that no two answers look the same.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.config import LoadFormat

# What any tokenizer is read from.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def needs_dummy_tokenizer(directory: Path, load_format: LoadFormat) -> bool:
    """Where weights are made up, and no tokenizer lies beside config.json."""
    return load_format is LoadFormat.DUMMY and not any(
        (directory / name).exists() for name in _FILES
    )


def dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """Of exactly so many words. With fewer than 256 some bytes are all spelled by the first."""
    # In the order of what is most of use in a small vocabulary: space, then visible ASCII.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda word: (word != "Ġ", word))
    words = [*alphabet, *(f"<{i}>" for i in range(len(alphabet), vocab_size))][:vocab_size]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
