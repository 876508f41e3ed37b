"""The words that an embedding model was trained to see before a text, by the text's use.

Source: `config_sentence_transformers.json`, as sentence-transformers' `encode_query` and
`encode_document` read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from penstock.engine.client import read_model_object
from penstock.server.errors import InvalidRequest

# The names for a use at sentence-transformers, Cohere, Jina and in models, in lower case.
_SAME_USE = (
    ("query", "search_query", "retrieval.query", "retrieval-query"),
    ("document", "passage", "corpus", "search_document", "retrieval.passage", "retrieval-document"),
    ("classification",),
    ("clustering", "separation"),
    ("sts", "text-matching"),
)


@dataclass(frozen=True, slots=True)
class NamedPrompts:
    """default: the name of the one that a text has without any; None for none."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Raises PenstockError for a file that is not JSON."""
        config = read_model_object(directory / "config_sentence_transformers.json")
        prompts, default = config.get("prompts"), config.get("default_prompt_name")
        given = prompts.items() if isinstance(prompts, dict) else ()
        texts = {name: text for name, text in given if isinstance(text, str)}
        return cls(texts, default if isinstance(default, str) else None)

    def named(self, name: str | None, param: str) -> str:
        """Returns what stands before a text. A use that the model knows no prompt for has the
        default. Raises InvalidRequest for a name that is neither a prompt's nor a use's."""
        default = self.texts.get(self.default or "", "")
        if name is None:
            return default
        if name in self.texts:
            return self.texts[name]
        uses = next((names for names in _SAME_USE if name.lower() in names), None)
        if uses is None or param == "prompt_name":
            known = f"has the prompts {', '.join(self.texts)}" if self.texts else "has no prompts"
            raise InvalidRequest(f"{param} is {name[:64]!r}; this model {known}", param=param)
        by_name = {known.lower(): text for known, text in self.texts.items()}
        return next((by_name[use] for use in uses if use in by_name), default)
