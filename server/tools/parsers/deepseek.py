"""DeepSeek's way of writing calls. Its markers have bars that are none of ASCII's."""

import re

from penstock.server.tools.parsers.headed import SectionParser


def _mark(words: str) -> str:
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}{words.replace(' ', chr(0x2581))}{bar}>"


CALLS_BEGIN, CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
CALL_BEGIN, CALL_END = _mark("tool call begin"), _mark("tool call end")
SEPARATOR = _mark("tool sep")
DEEPSEEK_MARKUP = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


class DeepSeekParser(SectionParser):
    """A name, a separator and the arguments, with a marker on each side: V3.1 and later.

    V3 and R1 write `function` and the separator before the name, and put the arguments between
    fences of Markdown.
    """

    _SECTION_BEGIN, _SECTION_END = CALLS_BEGIN, CALLS_END
    _CALL_BEGIN = CALL_BEGIN
    _CALL_ENDS = (CALL_END, f"```{CALL_END}")
    _HEAD = re.compile(
        rf"\s*(?:function\s*{SEPARATOR})?\s*(?P<name>[\w.-]+)\s*"
        rf"(?:{SEPARATOR})?\s*(?:```(?:json)?)?\s*"
    )
