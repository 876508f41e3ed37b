"""The words that a model was trained to see around a text: before one that it embeds, by the text's
use, as sentence-transformers reads them from `config_sentence_transformers.json`; and around a
query and a document, as a chat template has them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from penstock.engine.client import ModelInfo, read_model_object
from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.prompt.tokenizer import (
    ChatTemplate,
    IsolatedTemplate,
    PromptEncoder,
    SpecialTokens,
)

# The names for a use at sentence-transformers, Cohere, Jina and in models, in lower case.
_SAME_USE = (
    ("query", "search_query", "retrieval.query", "retrieval-query"),
    ("document", "passage", "corpus", "search_document", "retrieval.passage", "retrieval-document"),
    ("classification",),
    ("clustering", "separation"),
    ("sts", "text-matching"),
)
# Qwen3-Reranker's. Source: its model card.
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>'
    'user\n<Instruct>: {{ instruction or "Given a web search query, retrieve relevant passages '
    'that answer the query" }}\n<Query>: {{ messages[-2].content }}\n<Document>: {{ '
    "messages[-1].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
# They stand for the texts while a template is rendered.
_FIRST, _SECOND = "\ue000", "\ue001"


@dataclass(frozen=True, slots=True)
class NamedPrompts:
    """texts: by name. default: what stands before a text without any."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str = ""

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Raises PenstockError for a file that is not JSON."""
        config = read_model_object(directory / "config_sentence_transformers.json")
        given = config.get("prompts")
        named = given.items() if isinstance(given, dict) else ()
        texts = {name: text for name, text in named if isinstance(text, str)}
        return cls(texts, texts.get(str(config.get("default_prompt_name")), ""))

    def named(self, name: str | None, param: str) -> str:
        """Returns what stands before a text. A use that the model knows no prompt for has the
        default. Raises InvalidRequest for a name that is neither a prompt's nor a use's."""
        if name is None or name in self.texts:
            return self.default if name is None else self.texts[name]
        uses = next((names for names in _SAME_USE if name.lower() in names), None)
        if uses is None or param == "prompt_name":
            known = f"has the prompts {', '.join(self.texts)}" if self.texts else "has no prompts"
            raise InvalidRequest(f"{param} is {name[:64]!r}; this model {known}", param=param)
        by_name = {known.lower(): text for known, text in self.texts.items()}
        return next((by_name[use] for use in uses if use in by_name), self.default)


@dataclass(frozen=True, slots=True)
class PairFormat:
    """template None: the tokenizer joins two texts, as cross-encoders are trained."""

    encoder: PromptEncoder
    template: ChatTemplate | IsolatedTemplate | None

    @classmethod
    def of(cls, encoder: PromptEncoder, directory: Path, info: ModelInfo) -> Self | None:
        """None for a model that scores nothing. A chat template without the role of a document is
        that of the model it was made of."""
        if len(info.labels) != 1:
            return None
        source = encoder.template_source or ""
        if '"document"' in source or "'document'" in source:
            return cls(encoder, encoder.chat_template())
        named = read_model_object(directory / "config.json").get("architectures")
        is_causal = "ForCausalLM" in str(named)  # it scores by the logits of its answer
        return cls(encoder, ChatTemplate(_QWEN3, {}) if is_causal else None)

    def around(self, instruction: str | None) -> tuple[tuple[str, str, str], SpecialTokens]:
        """Returns the words before the first text, after it and before the second, and the special
        tokens around what these make. Raises InvalidRequest."""
        if self.template is None:
            if instruction is not None:
                raise UnsupportedParameter("instruction", "this model was trained without any")
            return ("", "", ""), self.encoder.special_tokens(are_two=True)
        messages: list[Any] = [{"role": "system", "content": instruction}] if instruction else []
        messages += [{"role": "query", "content": _FIRST}, {"role": "document", "content": _SECOND}]
        given: dict[str, Any] = {"instruction": instruction} if instruction else {}
        before, _, rest = self.template.render(messages, **given).partition(_FIRST)
        between, _, after = rest.partition(_SECOND)
        line = between.rfind("\n") + 1  # where no token spans
        ids = self.encoder.encode(after, add_special_tokens=False)
        return (before, between[:line], between[line:]), SpecialTokens(after=ids)
