"""From the text of an answer to its parts: plain text, and calls of functions.

One state machine for each format of calls, fed incrementally. Text that may be the markup of a call
is held back until it is certain; if it is not markup, it is emitted as plain text. So the parts do
not depend on how the text was divided, and no character of plain text is lost. Whitespace around a
call belongs to its markup. Once a call has started, its arguments stream; if the markup is
malformed after that, the arguments sent so far remain and the rest is plain text.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from penstock.server.tools.parsers.base import ToolParser, new_call_id
from penstock.server.tools.parsers.deepseek import DEEPSEEK_MARKUP, DeepSeekParser
from penstock.server.tools.parsers.gemma import GEMMA_MARKUP, GemmaParser
from penstock.server.tools.parsers.harmony import HarmonyParser
from penstock.server.tools.parsers.header_calls import KimiParser, MistralParser
from penstock.server.tools.parsers.json_calls import (
    HermesParser,
    JsonParser,
    Llama3JsonParser,
    MarkedListParser,
)
from penstock.server.tools.parsers.named import NamedCallParser
from penstock.server.tools.parsers.pythonic import Olmo3Parser, PythonicParser
from penstock.server.tools.parsers.tagged import (
    GlmParser,
    MinimaxParser,
    QwenCoderParser,
    SeedOssParser,
)

__all__ = [
    "MARKUP",
    "DeepSeekParser",
    "GemmaParser",
    "GlmParser",
    "HarmonyParser",
    "HermesParser",
    "JsonParser",
    "KimiParser",
    "Llama3JsonParser",
    "MarkedListParser",
    "MinimaxParser",
    "MistralParser",
    "NamedCallParser",
    "Olmo3Parser",
    "PythonicParser",
    "QwenCoderParser",
    "SeedOssParser",
    "ToolFormat",
    "ToolParser",
    "make_tool_parser",
    "new_call_id",
]


class ToolFormat(StrEnum):
    """The format in which a model writes calls. The names are vLLM's, except for the last."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    PYTHONIC = "pythonic"
    OLMO3 = "olmo3"
    MISTRAL = "mistral"
    QWEN3_CODER = "qwen3_coder"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    SEED_OSS = "seed_oss"
    GLM45 = "glm45"
    KIMI_K2 = "kimi_k2"
    MINIMAX_M2 = "minimax_m2"
    GRANITE = "granite"
    PHI4_MINI_JSON = "phi4_mini_json"
    GEMMA4 = "gemma4"
    OPENAI = "openai"
    JSON = "json"


_PARSERS: dict[ToolFormat, type[ToolParser]] = {
    ToolFormat.HERMES: HermesParser,
    ToolFormat.LLAMA3_JSON: Llama3JsonParser,
    ToolFormat.PYTHONIC: PythonicParser,
    ToolFormat.OLMO3: Olmo3Parser,
    ToolFormat.MISTRAL: MistralParser,
    ToolFormat.QWEN3_CODER: QwenCoderParser,
    ToolFormat.DEEPSEEK_V3: DeepSeekParser,
    ToolFormat.DEEPSEEK_V31: DeepSeekParser,
    ToolFormat.SEED_OSS: SeedOssParser,
    ToolFormat.GLM45: GlmParser,
    ToolFormat.KIMI_K2: KimiParser,
    ToolFormat.MINIMAX_M2: MinimaxParser,
    ToolFormat.GRANITE: MarkedListParser,
    ToolFormat.PHI4_MINI_JSON: MarkedListParser,
    ToolFormat.GEMMA4: GemmaParser,
    ToolFormat.OPENAI: HarmonyParser,
    ToolFormat.JSON: JsonParser,
}


def make_tool_parser(
    form: ToolFormat,
    names: frozenset[str],
    *,
    schemas: Mapping[str, dict[str, Any]] | None = None,
    max_calls: int | None = None,
) -> ToolParser:
    """See `ToolParser`."""
    return _PARSERS[form](names, schemas=schemas, max_calls=max_calls)


# Markup that the parsers must see even where it consists of special tokens.
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    *DEEPSEEK_MARKUP,
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<function_calls>",
    "</function_calls>",
    *GEMMA_MARKUP,
)
