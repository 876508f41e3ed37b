"""How the served model writes calls and thoughts: from its chat template, or from a flag."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.server.output.parts import Part, TextPart
from penstock.server.output.reasoning import MARKUP as THOUGHT_MARKUP
from penstock.server.output.reasoning import (
    ReasoningFormat,
    ReasoningSplitter,
    ReasoningState,
    format_of_template,
)
from penstock.server.tools.parsers import MARKUP as CALL_MARKUP
from penstock.server.tools.parsers import NamedCallParser, ToolFormat, ToolParser
from penstock.server.tools.parsers.deepseek import CALLS_BEGIN

# What a flag says to have none.
NO_PARSER = "none"

# In a template -> how calls are written, in order: the first that is there tells.
_TELLTALES = (
    ("<function=", ToolFormat.QWEN3_CODER),
    ("<arg_key>", ToolFormat.GLM45),
    ("<minimax:tool_call>", ToolFormat.MINIMAX_M2),
    ("<|tool_calls_section_begin|>", ToolFormat.KIMI_K2),
    (CALLS_BEGIN, ToolFormat.DEEPSEEK_V31),
    ("<tool_call>", ToolFormat.HERMES),
    ("[TOOL_CALLS]", ToolFormat.MISTRAL),
    ("func_name1(", ToolFormat.PYTHONIC),
    ("<|python_tag|>", ToolFormat.LLAMA3_JSON),
    ('"parameters": dictionary', ToolFormat.LLAMA3_JSON),
    ("<|tool|>", ToolFormat.PHI4_MINI_JSON),
    ("<|tool_call|>", ToolFormat.GRANITE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """tools None: no calls are looked for. reasoning None: no thoughts are.

    trusts_templates: whether requests may bring a chat template.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    trusts_templates: bool = False

    @classmethod
    def detect(
        cls,
        template: str | None,
        tool_parser: str | None,
        reasoning_parser: str | None,
        *,
        trusts_templates: bool = False,
    ) -> "ChatFormat":
        """The flags' values, and what the template tells where they are None."""
        return cls(
            tools=_tool_format(template or "", tool_parser),
            reasoning=_reasoning_format(template or "", reasoning_parser),
            trusts_templates=trusts_templates,
        )


def _tool_format(template: str, flag: str | None) -> ToolFormat | None:
    if flag is not None:
        return None if flag == NO_PARSER else ToolFormat(flag)
    found = (form for telltale, form in _TELLTALES if telltale in template)
    form = next(found, ToolFormat.JSON)
    if form is ToolFormat.DEEPSEEK_V31 and "```json" in template:
        return ToolFormat.DEEPSEEK_V3
    return form


def _reasoning_format(template: str, flag: str | None) -> ReasoningFormat | None:
    if flag is not None:
        return None if flag == NO_PARSER else ReasoningFormat(flag)
    return format_of_template(template)


class AnswerReader:
    """One answer's text to its parts. Without a tool parser all that is not thought is text."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        calls: ToolParser | NamedCallParser | None,
    ) -> None:
        self._splitter = splitter
        self._calls = calls

    @property
    def is_thinking(self) -> bool:
        return self._splitter is not None and self._splitter.is_thinking

    @property
    def is_over(self) -> bool:
        """Whether the calls that were allowed are complete."""
        return self._calls is not None and self._calls.is_over

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = self._splitter.feed(text) if self._splitter else [TextPart(text)]
        return self._with_calls(parts)

    def end(self) -> list[Part]:
        parts = self._with_calls(self._splitter.end() if self._splitter else [])
        return parts + (self._calls.end() if self._calls else [])

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        read: list[Part] = []
        for part in parts:
            read += self._calls.feed(part.text) if isinstance(part, TextPart) else [part]
        return read


MakeReader = Callable[[], AnswerReader | None]


def make_splitter(thoughts: ReasoningState | None) -> ReasoningSplitter | None:
    if thoughts is None:
        return None
    return ReasoningSplitter(is_open=thoughts.is_open, markers=thoughts.markers)


# What the parsers must see, though it may be special tokens.
MARKUP = THOUGHT_MARKUP + CALL_MARKUP
