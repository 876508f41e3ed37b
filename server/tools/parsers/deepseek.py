"""DeepSeek's format of calls. Its markers contain a fullwidth vertical bar, not ASCII's."""

import re

from penstock.server.tools.parsers.header_calls import SectionParser


def _marker(name: str) -> str:
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}{name.replace(' ', chr(0x2581))}{bar}>"


CALLS_BEGIN, CALLS_END = _marker("tool calls begin"), _marker("tool calls end")
CALL_BEGIN, CALL_END = _marker("tool call begin"), _marker("tool call end")
SEPARATOR = _marker("tool sep")
DEEPSEEK_MARKUP = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


class DeepSeekParser(SectionParser):
    """A name, a separator and the arguments, with a marker on each side: V3.1 and later.

    V3 and R1 write `function` and the separator before the name, and put the arguments between
    fences of Markdown.
    """

    _SECTION_BEGIN, _SECTION_END = CALLS_BEGIN, CALLS_END
    _CALL_BEGIN = CALL_BEGIN
    _CALL_ENDS = (CALL_END, f"```{CALL_END}")
    _HEADER = re.compile(
        rf"\s*(?:function\s*{SEPARATOR})?\s*(?P<name>[\w.-]+)\s*"
        rf"(?:{SEPARATOR})?\s*(?:```(?:json)?)?\s*"
    )
