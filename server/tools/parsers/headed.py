"""The formats in which a call is its name between markers, and then its arguments as JSON."""

import re

from penstock.server.output.json_scanner import WHITESPACE, JsonScanner
from penstock.server.tools.parsers.base import MAX_NAME_CHARS
from penstock.server.tools.parsers.json_calls import ListCalls


class HeadedCalls(ListCalls):
    """Reads a head up to the first brace, and the object that begins there.

    _HEAD: a regex of the whole head; its group `name`, and `id` where the format has one.
    """

    _HEAD: re.Pattern[str]

    def _begin_head(self, char: str) -> None:
        self._head = ""
        self._state = self._in_head
        self._in_head(char)

    def _in_head(self, char: str) -> None:
        if char == "{":
            if found := self._HEAD.fullmatch(self._head):
                self.start_call(found["name"], found.groupdict().get("id"))
                self._scanner = JsonScanner()
                self._state = self._in_arguments
                self._in_arguments(char)
                return
        elif len(self._head) < MAX_NAME_CHARS:
            self._head += char
            self._held += char
            return
        self._give_up(char)

    def _in_arguments(self, char: str) -> None:
        if not self._scanner.feed(char):
            self._give_up(char)
            return
        self.add_arguments(char)
        if self._scanner.is_done:
            self._end_arguments()

    def _end_arguments(self) -> None:
        raise NotImplementedError


class MistralParser(HeadedCalls):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`."""

    _BEGIN = "[TOOL_CALLS]"
    _HEAD = re.compile(r"(?P<name>[\w.-]+)(\[CALL_ID\]\w*)?(\[ARGS\])?\s*")

    def _in_text(self, char: str) -> None:
        if self._match(char, (self._BEGIN,)):
            self._held = self._BEGIN
            self._state = self._behind_marker

    def _behind_marker(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "[":
            self._begin_list(char)
        elif char.isalnum() or char == "_":
            self._begin_head(char)
        else:
            self._give_up(char)

    def _end_object(self) -> None:
        self._end_call(self._behind_item)

    def _end_arguments(self) -> None:
        self._end_call(self._in_text)


class SectionParser(HeadedCalls):
    """Calls with a marker on each side, in a section with a marker on each side."""

    _SECTION_BEGIN: str
    _SECTION_END: str
    _CALL_BEGIN: str
    # How a call may end, in order of how common it is; whitespace in it does not count.
    _CALL_ENDS: tuple[str, ...]

    def _in_text(self, char: str) -> None:
        # Models leave out the marker of the section, and close it late.
        ends = (self._SECTION_END,) if self.num_calls else ()
        marker = self._match(char, (self._SECTION_BEGIN, self._CALL_BEGIN, *ends))
        if marker == self._SECTION_BEGIN:
            self._held = marker
            self._num_before = len(marker)
            self._state = self._before_call
        elif marker == self._CALL_BEGIN:
            self._held = marker
            self._state = self._begin_head

    def _before_call(self, char: str) -> None:
        self._held += char
        begun = self._held[self._num_before :].lstrip(WHITESPACE)
        if begun == self._CALL_BEGIN:
            self._state = self._begin_head
        elif begun == self._SECTION_END:
            self._held = ""
            self._state = self._in_text
        elif not (self._CALL_BEGIN.startswith(begun) or self._SECTION_END.startswith(begun)):
            self._give_up_before_call()

    def _give_up_before_call(self) -> None:
        marker, rest = self._held[: self._num_before], self._held[self._num_before :]
        self._held = ""
        self._say(marker)
        self._replay(rest)

    def _end_arguments(self) -> None:
        self._end_call(self._behind_arguments)

    def _behind_arguments(self, char: str) -> None:
        self._held += char
        begun = "".join(self._held.split())
        if begun in self._CALL_ENDS:
            self._held, self._num_before = "", 0
            self._state = self._before_call
        elif not any(end.startswith(begun) for end in self._CALL_ENDS):
            self._replay(self._release())


class KimiParser(SectionParser):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    What stands before the arguments is the call's id, which the model wants to see again.
    """

    _SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    _CALL_BEGIN = "<|tool_call_begin|>"
    _CALL_ENDS = ("<|tool_call_end|>",)
    _HEAD = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
    )
