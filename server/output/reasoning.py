"""What a model thinks, between `<think>` and `</think>` or their like, apart from what it says."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from penstock.server.output.json_scanner import WHITESPACE
from penstock.server.output.parts import Part, ReasoningPart, TextPart, merged


class Markers(NamedTuple):
    """What a model writes around its thoughts."""

    opening: str
    closing: str


class ReasoningFormat(StrEnum):
    """How thoughts are marked, and whether they begin at the marker or with the answer.

    The names are vLLM's.
    """

    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek_r1"
    MISTRAL = "mistral"
    GRANITE = "granite"
    SEED_OSS = "seed_oss"

    @property
    def markers(self) -> Markers:
        return _MARKERS.get(self, _THINK)

    @property
    def begins_open(self) -> bool:
        """Whether an answer's first words are thoughts though no marker opened them."""
        return self is ReasoningFormat.DEEPSEEK_R1


_THINK = Markers("<think>", "</think>")
_MARKERS = {
    ReasoningFormat.MISTRAL: Markers("[THINK]", "[/THINK]"),
    ReasoningFormat.GRANITE: Markers("Here is my thought process:", "Here is my response:"),
    ReasoningFormat.SEED_OSS: Markers("<seed:think>", "</seed:think>"),
}
# What a splitter must see, though it may be special tokens.
MARKUP = tuple(text for form in ReasoningFormat for text in form.markers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningState:
    """Where an answer may have thoughts.

    is_open: the prompt has opened them already. is_closed: and closed them too, which is how a
    template tells a model not to think; so no grammar leaves room for them.
    """

    markers: Markers
    is_open: bool
    is_closed: bool


def reasoning_state(
    form: ReasoningFormat | None, prompt: str, begun: str = ""
) -> ReasoningState | None:
    """None where the answer has none. prompt: as the template has rendered it. begun: what of the
    answer is in it already."""
    if form is None or form.markers.closing in begun:
        return None  # those thoughts are over
    prompt = prompt.rstrip()
    is_closed = prompt.endswith(form.markers.closing) or bool(begun)
    is_open = form.markers.opening in begun or prompt.endswith(form.markers.opening)
    is_open = is_open or (form.begins_open and not is_closed)
    return ReasoningState(
        markers=form.markers, is_open=is_open, is_closed=is_closed and not is_open
    )


def format_of_template(template: str) -> ReasoningFormat | None:
    """As the template's own words tell."""
    return next((form for form in ReasoningFormat if _is_in(form.markers, template)), None)


def _is_in(markers: Collection[str], template: str) -> bool:
    return any(marker in template for marker in markers)


class ReasoningSplitter:
    """Fed a little at a time. The marker opens thoughts only at the answer's beginning, where it
    may stand though they are open already: some models write it whatever the prompt ends with.

    Whitespace around the markers belongs to them. is_thinking: whether the text so far has ended
    amid the thoughts.
    """

    def __init__(self, *, is_open: bool, markers: Markers = _THINK) -> None:
        self.is_thinking = is_open
        self._opening, self._closing = markers
        self._is_done = False  # thoughts are over, or there are none
        self._is_fresh = True  # nothing but whitespace came since the marker
        self._may_open = is_open  # which they are already
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
        if begun == self._opening:
            self.is_thinking, self._held = True, ""
        elif not self._opening.startswith(begun):
            self._is_done, self._is_fresh = True, False
            held, self._held = self._held, ""
            return [TextPart(held)]
        return []

    def _plain_thought(self, text: str) -> str:
        """What can be told at once, as most of all thoughts can: up to a marker or a space."""
        if self._held or self._is_fresh or not self.is_thinking:
            return ""
        return text.partition(self._closing[0])[0].rstrip(WHITESPACE)

    def _think(self, char: str) -> list[Part]:
        if self._is_fresh and char in WHITESPACE and not self._held:
            return []
        self._held += char
        if self._may_open and self._opening.startswith(self._held):
            if self._held == self._opening:
                self._may_open, self._held = False, ""
            return []
        self._may_open = self._is_fresh = False
        if self._held.endswith(self._closing):
            thought = self._held.removesuffix(self._closing).rstrip(WHITESPACE)
            self.is_thinking, self._is_done, self._is_fresh = False, True, True
            self._held = ""
        else:
            thought = self._certain()
            self._held = self._held[len(thought) :]
        return [ReasoningPart(thought)] if thought else []

    def _certain(self) -> str:
        """What is held but for the beginning of a closing marker and the whitespace before it."""
        end = len(self._held)
        for length in range(min(end, len(self._closing) - 1), 0, -1):
            if self._closing.startswith(self._held[end - length :]):
                end -= length
                break
        return self._held[:end].rstrip(WHITESPACE)

    def _said(self, text: str) -> list[Part]:
        if self._is_fresh:
            text = text.lstrip(WHITESPACE)
            self._is_fresh = not text
        return [TextPart(text)] if text else []
