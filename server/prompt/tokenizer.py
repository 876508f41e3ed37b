"""Text to token ids: the tokenizer and the chat template in a model's directory or GGUF file.

`tokenizer.json` is read with the tokenizers library itself, and chat templates are rendered as
`transformers` renders them, but without it: importing that takes the server process six seconds
torch. The engine converts SentencePiece's and Mistral's files; only others need transformers.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Template, meta
from tokenizers import Encoding, Tokenizer

from penstock.engine.client import (
    LoadFormat,
    convert_tokenizer,
    load_dummy_tokenizer,
    read_model_object,
)
from penstock.scheduler.errors import InvalidConfig, PenstockError
from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.prompt.infill import Infill
from penstock.server.prompt.sandboxed_template import (
    MAX_CPU_S,
    TemplateFailed,
    TemplateTooCostly,
    render,
)
from penstock.server.prompt.template_files import DEFAULT, WITH_TOOLS, template_sources
from penstock.server.prompt.timed_template import RENDER_ERRORS, environment, timed
from penstock.server.tools.prompting import Message

logger = logging.getLogger("penstock")

# In a process of its own, where the longest conversations are rendered too.
_MAX_CPU_S_OF_OWN = 4
# The characters of a library's error that are told.
_MAX_REASON = 500
# Tokenizers of unlike ids, or rules, divide it into unlike ids.
_SAMPLE = (
    "The quick brown fox didn't jump  twice in 20250.\ndef area(self):\n\tif w <= 0:\n        "
    "return self._height**2\nGröße, 東京の天気, мир, مرحبا, 🦊🏽"
)
# The bounds of the request's fields of these names, whose defaults they are.
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "repetition_penalty": (1e-6, 10),
}
_SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token"),
    *("cls_token", "mask_token"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Defaults from generation_config.json; None where it has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    @classmethod
    def load(cls, directory: Path) -> "GenerationDefaults":
        """Raises PenstockError for a value that a request could not have either."""
        path = directory / "generation_config.json"
        values = read_model_object(path)
        for name, (least, most) in _BOUNDS.items():
            value, kinds = values.get(name), int if name == "top_k" else (int, float)
            if value is None:
                continue
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not (is_number and least <= value <= most):
                kind = "an integer" if name == "top_k" else "a number"
                raise InvalidConfig(
                    f"{path}: {name!r} must be {kind} from {least:g} to {most:g}, not {value!r:.80}"
                )
        return cls(**{name: values.get(name) for name in _BOUNDS})


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """num_first: how many of those between two texts are of the first one's segment; None where a
    model is told no segments."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    num_first: int | None = None


class PromptEncoder:
    """Text and conversations to token ids. Its methods may run in any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: "Mapping[str, ChatTemplate] | None",
        special_tokens: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """templates: by name. settings: of tokenizer_config.json."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._templates = dict(templates or {})
        self._special_tokens = dict(special_tokens or {})
        self.settings = dict(settings or {})
        self.vocabulary = Vocabulary(tokenizer)
        self.max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        self.infill = Infill.detect(tokenizer, adds_space=self.vocabulary.num_stripped > 0)

    @classmethod
    def load(
        cls,
        directory: Path,
        chat_template: Path | None,
        load_format: LoadFormat = LoadFormat.AUTO,
    ) -> "PromptEncoder":
        """chat_template: a file to use in place of the model's own. Raises PenstockError."""
        settings = read_model_object(directory / "tokenizer_config.json")
        sources = template_sources(directory, settings, chat_template)
        tokenizer, special_tokens = _load_tokenizer(directory, load_format)
        special_tokens |= _special_tokens(directory, settings)
        templates = {
            name: ChatTemplate(source.text, special_tokens, f"the chat template in {source.where}")
            for name, source in sources.items()
        }
        return cls(tokenizer, templates, special_tokens, settings)

    def check_alike(self, draft_model: Path, load_format: LoadFormat) -> None:
        """Raises InvalidConfig where that model's ids are of other tokens."""
        other, _ = _load_tokenizer(draft_model, load_format)
        own_ids, ids = (
            each.encode(_SAMPLE, add_special_tokens=False).ids for each in (self._tokenizer, other)
        )
        if ids != own_ids:
            raise InvalidConfig(
                f"--speculative-config: the draft model {draft_model} has another tokenizer than "
                "the served model; name one with the same"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A plain text, with the special tokens (BOS) that the tokenizer puts around one. Raises
        InvalidRequest, as do all that encode.

        No other thread runs while the ids become Python's: 25 ms for 2^18 of them.
        """
        return tuple(_encoding(self._tokenizer, text, add_special_tokens=add_special_tokens).ids)

    def count(self, text: str) -> int:
        """The tokens of a text, without special ones around it; cheaper than its ids."""
        return len(_encoding(self._tokenizer, text, add_special_tokens=False))

    def encode_prompt(
        self, prompt: str | list[int], *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """A text, or ids as they are."""
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens=add_special_tokens)
        return tuple(prompt)

    def special_tokens(self, *, are_two: bool = False) -> "SpecialTokens":
        """Those around a text, or around two and between them, without which others can be cut."""
        encoding = self._tokenizer.encode("a", "a" if are_two else None)
        ids, texts, segments = encoding.ids, encoding.sequence_ids, encoding.type_ids
        first = [index for index, text in enumerate(texts) if text == 0] or [len(ids)]
        second = [index for index, text in enumerate(texts) if text == 1] or first
        between = slice(first[-1] + 1, second[0])
        names = str(self.settings.get("model_input_names") or "token_type_ids")
        is_told = "token_type_ids" in names and second[0] < len(ids) and segments[second[0]] > 0
        return SpecialTokens(
            before=tuple(ids[: first[0]]),
            between=tuple(ids[between]),
            after=tuple(ids[second[-1] + 1 :]),
            num_first=segments[between].count(0) if is_told else None,
        )

    def encode_infill(
        self, prefixes: list[str], suffix: str, *, add_special_tokens: bool = True
    ) -> list[tuple[int, ...]]:
        """Prompts whose answers stand between each prefix and the suffix. Raises
        UnsupportedParameter for a model that cannot fill in."""
        if self.infill is None:
            hint = "the model's vocabulary has no tokens to fill in the middle; leave it out"
            raise UnsupportedParameter("suffix", hint)
        bos = self._tokenizer.encode("").ids[:1] if add_special_tokens else []
        encode = partial(self.encode, add_special_tokens=False)
        return [(*bos, *self.infill.encode(encode, prefix, suffix)) for prefix in prefixes]

    def encode_within(self, word: str) -> set[tuple[int, ...]]:
        """A word as it may occur in an answer: at its beginning, and after a space."""
        texts = (word.lstrip(), f" {word.lstrip()}")
        return {self.encode(text, add_special_tokens=False) for text in texts} - {()}

    def ids_of_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Finds those texts that are a single token."""
        ids = {text: self._tokenizer.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in ids.items() if token_id is not None}

    def token_names(self, token_ids: Iterable[int]) -> list[str]:
        """As the tokenizer's own file spells them."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    @property
    def template_source(self) -> str | None:
        """Of conversations without tools."""
        template = self._template(has_tools=False)
        return template.source if template else None

    @property
    def tool_template_source(self) -> str | None:
        """Of those with tools: mostly the same."""
        template = self._template(has_tools=True)
        return template.source if template else None

    def try_out_templates(self) -> None:
        """See `ChatTemplate.try_out`."""
        for template in self._templates.values():
            template.try_out()

    def chat_template(
        self, source: str | None = None, *, has_tools: bool = False
    ) -> "ChatTemplate | IsolatedTemplate":
        """The model's own, or what a client has sent: one, or the name of one of the model's.
        Raises InvalidRequest. has_tools: whether the conversation has any."""
        if source is not None and source not in self._templates:
            return IsolatedTemplate(source, self._special_tokens)
        template = self._templates[source] if source else self._template(has_tools=has_tools)
        if template is None:
            others = f" but those named {', '.join(self._templates)}" if self._templates else ""
            raise InvalidRequest(
                f"this model has no chat template{others}, so it cannot serve chats; use "
                "/v1/completions, or start the server with --chat-template FILE",
                code="no_chat_template",
            )
        return template.isolated if template.is_runaway else template

    def _template(self, *, has_tools: bool) -> "ChatTemplate | None":
        default = self._templates.get(DEFAULT)
        return self._templates.get(WITH_TOOLS, default) if has_tools else default


class ChatTemplate:
    """A Jinja template under the rules of `transformers.apply_chat_template`."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], name: str = "the chat template"
    ) -> None:
        """name: for error messages. Raises InvalidConfig where it is not valid Jinja."""
        self.source = source
        rules = environment()
        try:
            self._template: Template = timed(rules, source)
            known = meta.find_undeclared_variables(rules.parse(source))
        # Python compiles what Jinja makes of it, and has limits of its own: of how deep blocks and
        # brackets are nested, and of an integer's digits.
        except (*RENDER_ERRORS, SyntaxError, MemoryError) as error:
            reason = " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__
            raise InvalidConfig(f"{name} is not valid: {reason}") from error
        self._known = known
        self._special_tokens = special_tokens
        self.isolated = IsolatedTemplate(source, special_tokens, known)
        self.is_runaway = False

    def try_out(self) -> None:
        """Notes whether it takes too long even for a single word. Blocks for some 100 ms."""
        self.is_runaway = self.isolated.takes_too_much([{"role": "user", "content": "Hi"}])
        if self.is_runaway:
            logger.warning(
                "the model's chat template takes too long for a single word, so chats will fail; "
                "start the server with --chat-template and another one"
            )

    def knows(self, name: str) -> bool:
        """Whether a variable of this name can change what the template makes."""
        return name in self._known

    def render(
        self, messages: list[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Raises InvalidRequest with the template's own message if it rejects the messages, and
        TemplateTooSlow."""
        given = self._special_tokens | variables
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )
        except RENDER_ERRORS as error:
            raise _not_accepted(error) from error


class IsolatedTemplate:
    """Like `ChatTemplate`, but never run in this process: one that a client has sent, or the
    model's own."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], known: Set[str] | None = None
    ) -> None:
        """known: the variables of the model's own; one that a client has sent is not parsed in
        this process."""
        self.source = source
        self._special_tokens = special_tokens
        self._known = known

    def knows(self, name: str) -> bool:
        """A client's is not parsed here: it knows the names that occur in it."""
        return name in (self.source if self._known is None else self._known)

    def takes_too_much(self, messages: list[Message]) -> bool:
        try:
            self._render(messages, MAX_CPU_S, add_generation_prompt=True)
        except TemplateTooCostly:
            return True
        except TemplateFailed:
            pass
        return False

    def render(
        self, messages: list[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Raises InvalidRequest."""
        try:
            max_cpu_s = MAX_CPU_S if self._known is None else _MAX_CPU_S_OF_OWN
            variables |= {"add_generation_prompt": add_generation_prompt}
            return self._render(messages, max_cpu_s, **variables)
        except TemplateFailed as error:
            cause = error.__cause__ or error
            if self._known is None:
                message = f"chat_template cannot be rendered: {error}"
                raise InvalidRequest(message, param="chat_template") from cause
            if not isinstance(error, TemplateTooCostly):
                raise _not_accepted(error) from cause
            raise InvalidRequest(
                f"this model's chat template takes too long for these messages: {error}; send "
                "fewer or shorter messages, or start the server with another --chat-template",
                param="messages",
            ) from cause

    def _render(self, messages: list[Message], max_cpu_s: int, **variables: Any) -> str:
        """Raises TemplateFailed."""
        given = self._special_tokens | variables | {"messages": messages}
        return render(self.source, given, max_cpu_s=max_cpu_s)


def _not_accepted(error: Exception) -> InvalidRequest:
    message = f"this model's chat template does not accept these messages: {error}"
    return InvalidRequest(message, param="messages")


def _encoding(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
    """Raises InvalidRequest for a text that the tokenizer gives up on.

    Its regex engine gives up on millions of spaces, for example with Llama 3's rules, and the
    library then panics: that is a BaseException, which is no Exception.
    """
    try:
        # It releases the interpreter lock: with `encode` all streams would wait for a long text.
        encodings = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise InvalidRequest(
            f"this model's tokenizer cannot read the text: {str(error)[:200]}; break up very long "
            "runs of spaces or of other characters"
        ) from error
    return encodings[0]


def _load_tokenizer(directory: Path, load_format: LoadFormat) -> tuple[Tokenizer, dict[str, str]]:
    """With those special tokens that its own file names."""
    if dummy := load_dummy_tokenizer(directory, load_format):
        return dummy, {}
    path = directory / "tokenizer.json"
    try:
        if path.is_file():
            return Tokenizer.from_file(str(path)), {}
        if converted := convert_tokenizer(directory):
            text, special_tokens = converted
            return Tokenizer.from_str(text), special_tokens
        return _convert_tokenizer(directory), {}
    except PenstockError:
        raise
    except BaseException as error:  # tokenizers raises plain Exception, transformers many kinds
        is_panic = type(error).__name__ == "PanicException"  # of Rust, and no Exception
        if not (is_panic or isinstance(error, Exception)):
            raise
        # Which quotes tokens of the file, of any length, and may have several lines.
        reason = " ".join(str(error).split())[:_MAX_REASON]
        source = path if path.is_file() else directory
        raise InvalidConfig(f"{source} has no tokenizer that can be read: {reason}") from error


def _convert_tokenizer(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(directory).backend_tokenizer
    if not tokenizer.encode("a").ids:  # transformers makes an empty one if there is none
        raise ValueError("there is no tokenizer.json, and nothing that it could be made from")
    return tokenizer


def _special_tokens(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token ...: a string, or an object that holds one."""
    tokens = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
        elif name in _SPECIAL_TOKENS and value is not None:
            raise InvalidConfig(
                f"{directory / 'tokenizer_config.json'}: {name!r} must be a string, or an object "
                f"whose 'content' is one, not {value!r:.80}"
            )
    return tokens
