"""Harmony, the format of gpt-oss: an answer is several messages, each on a channel.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text

Source: OpenAI's description of harmony. A message to a function, `to=functions.NAME`, is a call: it
stays markup, which the parser of calls reads, and its header gets one form of those it may have.
"""

import re
from enum import Enum, auto

from penstock.server.output.parts import Part, ReasoningPart, TextPart, merged

# The first message's header follows the prompt, which ends with <|start|>assistant.
OPENING = "<|channel|>analysis<|message|>"
CLOSING = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY_MARKUP = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
_MARKER = re.compile("|".join(map(re.escape, HARMONY_MARKUP)))
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_FUNCTIONS = "functions."
# The text that may stand in the first header before its channel.
_FIRST_HEADER = "to="


class _Kind(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class ChannelSplitter:
    """Splits text incrementally, as `ReasoningSplitter` does. Analysis, and what is said to tools
    that are no functions, is reasoning; final, and commentary to nobody, is text.

    A line break joins messages that become parts of one kind. An answer without any header is text.
    """

    def __init__(self, *, is_open: bool, is_final: bool) -> None:
        """is_open, is_final: the prompt has begun a message of reasoning, or of text."""
        self._kind: _Kind | None = None  # None within a header
        if is_open or is_final:
            self._kind = _Kind.REASONING if is_open else _Kind.TEXT
        self._header = ""
        self._is_first = self._kind is None
        self._has_begun: set[_Kind] = set()
        self._is_joined = True  # no line break is due before the text that comes
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return self._kind is _Kind.REASONING

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while found := _MARKER.search(self._held):
            parts += self._plain(self._held[: found.start()])
            self._held = self._held[found.end() :]
            parts += self._marker(found[0])
        certain = self._certain()
        parts += self._plain(self._held[:certain])
        self._held = self._held[certain:]
        return merged(parts)

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        parts = self._plain(held)
        if self._kind is None and self._is_first and self._header.strip():
            parts.append(TextPart(self._header))
        return merged(parts)

    def _certain(self) -> int:
        """How much of the held text belongs to no marker."""
        start = self._held.rfind("<")
        may_begin = start >= 0 and any(m.startswith(self._held[start:]) for m in HARMONY_MARKUP)
        return start if may_begin else len(self._held)

    def _plain(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._kind is not None:
            return self._content(text)
        self._header += text
        header = self._header.lstrip()
        if self._is_first and not (
            header.startswith(_FIRST_HEADER) or _FIRST_HEADER.startswith(header)
        ):
            self._kind, text = _Kind.TEXT, self._header
            return self._content(text)
        return []

    def _content(self, text: str) -> list[Part]:
        assert self._kind is not None
        joint = "" if self._is_joined else "\n"
        self._is_joined = True
        self._has_begun.add(self._kind)
        return [ReasoningPart(joint + text) if self.is_thinking else TextPart(joint + text)]

    def _marker(self, marker: str) -> list[Part]:
        self._is_first = False
        if self._kind is None:
            if marker == "<|message|>":
                return self._begin_message()
            is_part = marker in ("<|channel|>", "<|constrain|>")
            self._header = self._header + marker if is_part else ""
            return []
        if marker in ("<|constrain|>", "<|message|>"):
            return self._content(marker)
        was_call = self._kind is _Kind.CALL
        self._kind, self._header = None, marker if marker == "<|channel|>" else ""
        return [TextPart("<|call|>")] if was_call else []

    def _begin_message(self) -> list[Part]:
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        name = recipient[1] if recipient else ""
        if name.startswith(_FUNCTIONS):
            self._kind, self._is_joined = _Kind.CALL, True
            return [TextPart(f"<|channel|>commentary to={name} <|constrain|>json<|message|>")]
        is_reasoning = bool(name) or (channel is not None and channel[1] == "analysis")
        self._kind = _Kind.REASONING if is_reasoning else _Kind.TEXT
        self._is_joined = self._kind not in self._has_begun
        return []
