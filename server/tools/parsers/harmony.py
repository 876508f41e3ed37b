"""`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`: gpt-oss.

Source: OpenAI's description of harmony, the format of its open models. A call ends the answer; its
last token is an end of sequence, and mostly not among the text.
"""

import re

from penstock.server.tools.parsers.header_calls import HeaderCalls

_BEGIN, _END = "<|channel|>", "<|call|>"


class HarmonyParser(HeaderCalls):
    """See above. The recipient may also stand before the channel, where the role is."""

    _HEADER = re.compile(
        r"\s*(?:commentary|analysis)\s+to=functions\.(?P<name>[\w.-]+?)\s*"
        r"(?:<\|constrain\|>\s*)?(?:json|code)?\s*<\|message\|>\s*"
    )

    def _in_text(self, char: str) -> None:
        if self._match(char, (_BEGIN, _END) if self.num_calls else (_BEGIN,)) == _BEGIN:
            self._held = _BEGIN
            self._state = self._begin_header

    def _end_arguments(self) -> None:
        self._end_call(self._in_text)
