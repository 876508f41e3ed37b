"""The formats in which a call is a header with its name, followed by its arguments as JSON."""

import re

from penstock.server.output.json_scanner import WHITESPACE, JsonScanner
from penstock.server.tools.parsers.base import MAX_BETWEEN, MAX_NAME_CHARS
from penstock.server.tools.parsers.json_calls import ListCalls


class HeaderCalls(ListCalls):
    """Reads a header up to the first brace, and the object that begins there. _HEADER: a regex of
    the whole header, with the group `name`, and `id` if the format has one."""

    _HEADER: re.Pattern[str]

    def _after_marker(self, char: str) -> None:
        self._begin_header(char)

    def _begin_header(self, char: str) -> None:
        self._header = ""
        self._state = self._in_header
        self._in_header(char)

    def _in_header(self, char: str) -> None:
        if char == "{":
            if found := self._HEADER.fullmatch(self._header):
                self.start_call(found["name"], found.groupdict().get("id"))
                self._begin_arguments()
                self._state = self._in_arguments
                self._in_arguments(char)
                return
        elif len(self._header) < MAX_NAME_CHARS:
            self._header += char
            self._held += char
            return
        self._reject(char)

    def _begin_arguments(self) -> None:
        self._scanner = JsonScanner()

    def _in_arguments(self, char: str) -> None:
        if not self._scanner.feed(char):
            self._reject(char)
            return
        self.add_arguments(char)
        if self._scanner.is_done:
            self._end_arguments()

    def _end_arguments(self) -> None:
        self._end_call(self._in_text)


class MistralParser(HeaderCalls):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`."""

    _BEGINS, _INNER = ("[TOOL_CALLS]",), ("[CALL_ID]", "[ARGS]")
    _HEADER = re.compile(r"(?P<name>[\w.-]+)(\[CALL_ID\]\w*)?(\[ARGS\])?\s*")

    def _after_marker(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "[":
            self._begin_list(char)
        elif char.isalnum() or char == "_":
            self._begin_header(char)
        else:
            self._reject(char)

    def _end_object(self) -> None:
        self._end_call(self._after_item)


class SectionParser(HeaderCalls):
    """Calls between a begin and an end marker, in a section between two markers. _BEGINS: of the
    section, which models omit, and of a call. _ENDS: of the section, late or not."""

    # The texts that may end a call, most common first; whitespace in them is ignored.
    _CALL_ENDS: tuple[str, ...]

    def _in_text(self, char: str) -> None:
        if marker := self._begin_marker(char):
            self._written = ""
            is_section = marker == self._BEGINS[0]
            self._state = self._before_call if is_section else self._begin_header

    def _before_call(self, char: str) -> None:
        then = {self._BEGINS[1]: self._begin_call, self._ENDS[0]: self._end_markup}
        self._find_next(char, then, self._reject_section)

    def _begin_call(self) -> None:
        self._state = self._begin_header

    def _reject_section(self) -> None:
        self._emit_text(self._take_held().removesuffix(self._written))
        self._replay(self._written)

    def _end_arguments(self) -> None:
        self._end_call(self._after_arguments)

    def _after_arguments(self, char: str) -> None:
        self._held += char
        prefix = "".join(self._held.split())
        if prefix in self._CALL_ENDS:
            self._held = self._written = ""
            self._state = self._before_call
        elif len(self._held) > MAX_BETWEEN or not any(
            e.startswith(prefix) for e in self._CALL_ENDS
        ):
            self._replay_held()


def _deepseek_marker(name: str) -> str:
    """It contains a fullwidth vertical bar, not ASCII's."""
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}{name.replace(' ', chr(0x2581))}{bar}>"


CALLS_BEGIN, CALLS_END = _deepseek_marker("tool calls begin"), _deepseek_marker("tool calls end")
CALL_BEGIN, CALL_END = _deepseek_marker("tool call begin"), _deepseek_marker("tool call end")
SEPARATOR = _deepseek_marker("tool sep")


class DeepSeekParser(SectionParser):
    """A name, a separator and the arguments, with a marker on each side: V3.1 and later.

    V3 and R1 write `function` and the separator before the name, and put the arguments between
    fences of Markdown.
    """

    _BEGINS, _ENDS = (CALLS_BEGIN, CALL_BEGIN), (CALLS_END,)
    _INNER = (CALL_END, SEPARATOR)
    _CALL_ENDS = (CALL_END, f"```{CALL_END}")
    _HEADER = re.compile(
        rf"\s*(?:function\s*{SEPARATOR})?\s*(?P<name>[\w.-]+)\s*"
        rf"(?:{SEPARATOR})?\s*(?:```(?:json)?)?\s*"
    )


class KimiParser(SectionParser):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`. The
    header is the call's id, which the chat template shows to the model again."""

    _BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    _ENDS = ("<|tool_calls_section_end|>",)
    _INNER = ("<|tool_call_argument_begin|>", "<|tool_call_end|>")
    _CALL_ENDS = ("<|tool_call_end|>",)
    _HEADER = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
    )


class HarmonyParser(HeaderCalls):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`: gpt-oss.

    The recipient may also stand before the channel, where the role is. A call ends the answer; its
    last token is an end of sequence, and mostly not among the text. Source: OpenAI's description of
    harmony, the format of its open models.
    """

    _BEGINS, _ENDS = ("<|channel|>",), ("<|call|>",)
    _HEADER = re.compile(
        r"\s*(?:commentary|analysis)\s+to=functions\.(?P<name>[\w.-]+?)\s*"
        r"(?:<\|constrain\|>\s*)?(?:json|code)?\s*<\|message\|>\s*"
    )
