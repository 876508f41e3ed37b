"""The formats in which a call is a header with its name, followed by its arguments as JSON."""

import re

from penstock.server.output.json_scanner import WHITESPACE, JsonScanner
from penstock.server.tools.parsers.base import MAX_NAME_CHARS
from penstock.server.tools.parsers.json_calls import ListCalls


class HeaderCalls(ListCalls):
    """Reads a header up to the first brace, and the object that begins there.

    _HEADER: a regex of the whole header, with the group `name`, and `id` if the format has one.
    """

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

    _BEGINS = ("[TOOL_CALLS]",)
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
    """Calls between a begin and an end marker, in a section between two markers."""

    _SECTION_BEGIN: str
    _SECTION_END: str
    _CALL_BEGIN: str
    # The texts that may end a call, most common first; whitespace in them is ignored.
    _CALL_ENDS: tuple[str, ...]

    def _in_text(self, char: str) -> None:
        # Models omit the marker that begins the section, and close the section late.
        ends = (self._SECTION_END,) if self.num_calls else ()
        marker = self._match(char, (self._SECTION_BEGIN, self._CALL_BEGIN, *ends))
        if marker == self._SECTION_BEGIN:
            self._held = marker
            self._num_marker_chars = len(marker)
            self._state = self._before_call
        elif marker == self._CALL_BEGIN:
            self._held = marker
            self._state = self._begin_header

    def _before_call(self, char: str) -> None:
        self._held += char
        prefix = self._held[self._num_marker_chars :].lstrip(WHITESPACE)
        if prefix == self._CALL_BEGIN:
            self._state = self._begin_header
        elif prefix == self._SECTION_END:
            self._held = ""
            self._state = self._in_text
        elif not (self._CALL_BEGIN.startswith(prefix) or self._SECTION_END.startswith(prefix)):
            self._reject_before_call()

    def _reject_before_call(self) -> None:
        marker, rest = self._held[: self._num_marker_chars], self._held[self._num_marker_chars :]
        self._held = ""
        self._emit_text(marker)
        self._replay(rest)

    def _end_arguments(self) -> None:
        self._end_call(self._after_arguments)

    def _after_arguments(self, char: str) -> None:
        self._held += char
        prefix = "".join(self._held.split())
        if prefix in self._CALL_ENDS:
            self._held, self._num_marker_chars = "", 0
            self._state = self._before_call
        elif not any(end.startswith(prefix) for end in self._CALL_ENDS):
            self._replay(self._take_held())


def _deepseek_marker(name: str) -> str:
    """It contains a fullwidth vertical bar, not ASCII's."""
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}{name.replace(' ', chr(0x2581))}{bar}>"


CALLS_BEGIN, CALLS_END = _deepseek_marker("tool calls begin"), _deepseek_marker("tool calls end")
CALL_BEGIN, CALL_END = _deepseek_marker("tool call begin"), _deepseek_marker("tool call end")
SEPARATOR = _deepseek_marker("tool sep")
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


class KimiParser(SectionParser):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    The header is the call's id, which the chat template shows to the model again.
    """

    _SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    _CALL_BEGIN = "<|tool_call_begin|>"
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
