"""A model for hostile requests: a large vocabulary, a long context, and one very long token.

Most limits of a request come from the model. This one allows what a server may have to expect: 2^18
ids, and, as vocabularies that have runs of spaces or dashes do, a text of 2^25 characters, which
could fit if it were all of the longest token.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.paths import DEMO_MODEL

VOCAB_SIZE = 1 << 18
MAX_MODEL_LEN = 1 << 18
_LONG_TOKEN = "-" * 128
_SMALL = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 32, "num_hidden_layers": 1}
_HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1}


def write_model(directory: Path) -> tuple[str, ...]:
    """The demo model's tokenizer and template with other sizes; returns the flags to serve it."""
    config = _read("config.json") | _SMALL | _HEADS
    config |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    tokenizer = _read("tokenizer.json")
    words = tokenizer["model"]["vocab"]
    # No text has them, but each of their ids has a text of its own: each token is an event.
    words |= {f"<{i}>": i for i in range(len(words), VOCAB_SIZE - 1)}
    tokenizer["added_tokens"].append(
        {
            "id": VOCAB_SIZE - 1,
            "content": _LONG_TOKEN,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False),
        }
    )
    for name, content in (("config.json", config), ("tokenizer.json", tokenizer)):
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, directory)
    return (
        *(str(directory), "--load-format", "dummy", "--served-model-name", "m"),
        # Four thousand blocks are all that the scripted executor has.
        *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", "64"),
    )


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEMO_MODEL / name).read_text(encoding="utf-8"))
    return content
