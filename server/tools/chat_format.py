"""How the served model writes calls and reasoning: detected from its chat template, or by flag."""

from dataclasses import dataclass

from penstock.server.output.channels import HARMONY_MARKUP, OPENING
from penstock.server.output.reasoning import MARKUP as REASONING_MARKUP
from penstock.server.output.reasoning import ReasoningFormat, format_of_template
from penstock.server.tools.parsers import MARKUP as CALL_MARKUP
from penstock.server.tools.parsers import ToolFormat
from penstock.server.tools.parsers.header_calls import CALLS_BEGIN

# The value of the parser flags that switches a parser off.
NO_PARSER = "none"

# Text in a template -> format of calls; the first text that occurs decides.
_TEMPLATE_MARKS = (
    ("<seed:tool_call>", ToolFormat.SEED_OSS),
    ("<function=", ToolFormat.QWEN3_CODER),
    ("<arg_key>", ToolFormat.GLM45),
    ("<minimax:tool_call>", ToolFormat.MINIMAX_M2),
    ("<|tool_call>", ToolFormat.GEMMA4),
    (OPENING, ToolFormat.OPENAI),
    ("<function_calls>", ToolFormat.OLMO3),
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
    """tools None: calls are not parsed. reasoning None: reasoning is not separated.
    trusts_templates: whether requests may contain a chat template."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    trusts_templates: bool = False

    @property
    def call_markup(self) -> tuple[str, ...]:
        """Markers of calls that are text even where they consist of special tokens."""
        return CALL_MARKUP + (HARMONY_MARKUP if self._is_harmony else ())

    @property
    def markup(self) -> tuple[str, ...]:
        """That, and what marks reasoning."""
        return REASONING_MARKUP + self.call_markup

    @property
    def _is_harmony(self) -> bool:
        """Whose markers are other models' ends of a turn, and not text there."""
        harmony = ToolFormat.OPENAI, ReasoningFormat.OPENAI_GPTOSS
        return self.tools is harmony[0] or self.reasoning is harmony[1]

    @classmethod
    def detect(
        cls,
        template: str | None,
        tool_parser: str | None,
        reasoning_parser: str | None,
        *,
        tool_template: str | None = None,
        trusts_templates: bool = False,
    ) -> "ChatFormat":
        """tool_parser, reasoning_parser: values of the flags; None detects from the template.
        tool_template: of conversations with tools, where that is another."""
        return cls(
            tools=_tool_format(tool_template or template or "", tool_parser),
            reasoning=_reasoning_format(template or "", reasoning_parser),
            trusts_templates=trusts_templates,
        )


def _tool_format(template: str, flag: str | None) -> ToolFormat | None:
    if flag is not None:
        return next((form for form in ToolFormat if form == flag), None)
    found = (form for mark, form in _TEMPLATE_MARKS if mark in template)
    form = next(found, ToolFormat.JSON)
    if form is ToolFormat.DEEPSEEK_V31 and "```json" in template:
        return ToolFormat.DEEPSEEK_V3
    return form


def _reasoning_format(template: str, flag: str | None) -> ReasoningFormat | None:
    if flag is not None:
        return None if flag == NO_PARSER else ReasoningFormat(flag)
    return format_of_template(template)
