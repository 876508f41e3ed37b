"""From the text of an answer to its parts: plain text, and calls of functions.

One state machine for each format of calls, fed incrementally. Text that may be the markup of a call
is held back until it is certain; if it is not markup, it is emitted as plain text. So the parts do
not depend on how the text was divided, and no character of plain text is lost. Whitespace around a
call belongs to its markup. Once a call has started, its arguments stream; if the markup is
malformed after that, the arguments sent so far remain and the rest is plain text.
"""

from enum import StrEnum

from penstock.server.tools.parsers.base import ToolParser
from penstock.server.tools.parsers.gemma import GemmaParser
from penstock.server.tools.parsers.header_calls import (
    DeepSeekParser,
    HarmonyParser,
    KimiParser,
    MistralParser,
)
from penstock.server.tools.parsers.json_calls import (
    HermesParser,
    JsonParser,
    Llama3JsonParser,
    MarkedListParser,
)
from penstock.server.tools.parsers.pythonic import Olmo3Parser, PythonicParser
from penstock.server.tools.parsers.tagged import (
    GlmParser,
    MinimaxParser,
    QwenCoderParser,
    SeedOssParser,
)


class ToolFormat(StrEnum):
    """The format in which a model writes calls, and its parser. The names are vLLM's, except for
    the last."""

    parser: type[ToolParser]

    def __new__(cls, name: str, parser: type[ToolParser]) -> "ToolFormat":
        member = str.__new__(cls, name)
        member._value_, member.parser = name, parser
        return member

    HERMES = "hermes", HermesParser
    LLAMA3_JSON = "llama3_json", Llama3JsonParser
    PYTHONIC = "pythonic", PythonicParser
    OLMO3 = "olmo3", Olmo3Parser
    MISTRAL = "mistral", MistralParser
    QWEN3_CODER = "qwen3_coder", QwenCoderParser
    DEEPSEEK_V3 = "deepseek_v3", DeepSeekParser
    DEEPSEEK_V31 = "deepseek_v31", DeepSeekParser
    SEED_OSS = "seed_oss", SeedOssParser
    GLM45 = "glm45", GlmParser
    KIMI_K2 = "kimi_k2", KimiParser
    MINIMAX_M2 = "minimax_m2", MinimaxParser
    GRANITE = "granite", MarkedListParser
    PHI4_MINI_JSON = "phi4_mini_json", MarkedListParser
    GEMMA4 = "gemma4", GemmaParser
    OPENAI = "openai", HarmonyParser
    JSON = "json", JsonParser


# Harmony's markers are other models' ends of a turn, and not text there.
MARKUP = tuple(
    {
        marker: None
        for form in ToolFormat
        if form is not ToolFormat.OPENAI
        for marker in form.parser.markup()
    }
)
