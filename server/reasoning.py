"""What a model thinks, between `<think>` and `</think>`, apart from what it says."""

from enum import StrEnum

from server.json_scanner import WHITESPACE
from server.parts import Part, ReasoningPart, TextPart, merged

OPENING, CLOSING = "<think>", "</think>"


class ReasoningFormat(StrEnum):
    """Whether thinking begins at its marker, or with the answer. The names are vLLM's."""

    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek_r1"


class ReasoningSplitter:
    """Fed a little at a time. The marker opens thoughts only at the answer's beginning.

    Whitespace around the markers belongs to them. is_thinking: whether the text so far has ended
    amid the thoughts.
    """

    def __init__(self, *, is_open: bool) -> None:
        self.is_thinking = is_open
        self._is_done = False  # thoughts are over, or there are none
        self._is_fresh = True  # nothing but whitespace came since the marker
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._is_done:
                parts += self._said(text)
                break
            if plain := self._plain_thought(text):
                parts.append(ReasoningPart(plain))
                text = text[len(plain) :]
                continue
            char, text = text[0], text[1:]
            parts += self._think(char) if self.is_thinking else self._before(char)
        return merged(parts)

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [ReasoningPart(held)] if self.is_thinking else [TextPart(held)]

    def _before(self, char: str) -> list[Part]:
        self._held += char
        begun = self._held.lstrip(WHITESPACE)
        if begun == OPENING:
            self.is_thinking, self._held = True, ""
        elif not OPENING.startswith(begun):
            self._is_done, self._is_fresh = True, False
            held, self._held = self._held, ""
            return [TextPart(held)]
        return []

    def _plain_thought(self, text: str) -> str:
        """What can be told at once, as most of all thoughts can: up to a marker or a space."""
        if self._held or self._is_fresh or not self.is_thinking:
            return ""
        return text.partition(CLOSING[0])[0].rstrip(WHITESPACE)

    def _think(self, char: str) -> list[Part]:
        if self._is_fresh and char in WHITESPACE:
            return []
        self._is_fresh = False
        self._held += char
        if self._held.endswith(CLOSING):
            thought = self._held.removesuffix(CLOSING).rstrip(WHITESPACE)
            self.is_thinking, self._is_done, self._is_fresh = False, True, True
            self._held = ""
        else:
            thought = self._certain()
            self._held = self._held[len(thought) :]
        return [ReasoningPart(thought)] if thought else []

    def _certain(self) -> str:
        """What is held but for the beginning of a closing marker and the whitespace before it."""
        end = len(self._held)
        for length in range(min(end, len(CLOSING) - 1), 0, -1):
            if CLOSING.startswith(self._held[end - length :]):
                end -= length
                break
        return self._held[:end].rstrip(WHITESPACE)

    def _said(self, text: str) -> list[Part]:
        if self._is_fresh:
            text = text.lstrip(WHITESPACE)
            self._is_fresh = not text
        return [TextPart(text)] if text else []
