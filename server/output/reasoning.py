"""Separates a model's reasoning, between `<think>` and `</think>` or the like, from its answer."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from penstock.server.output.channels import CLOSING, FINAL, OPENING, ChannelSplitter
from penstock.server.output.json_scanner import WHITESPACE
from penstock.server.output.parts import Part, ReasoningPart, TextPart, merged, num_begun


class Markers(NamedTuple):
    """The texts around a model's reasoning. answer: what stands before the answer itself."""

    opening: str
    closing: str
    answer: str = ""


_THINK = Markers("<think>", "</think>")
# Whitespace around markers; a model that writes more of it writes text.
_MAX_SPACE = 256


class ReasoningFormat(StrEnum):
    """How reasoning is marked, and whether it begins with a marker or with the answer. The names
    are vLLM's."""

    markers: Markers

    def __new__(cls, name: str, markers: Markers = _THINK) -> "ReasoningFormat":
        member = str.__new__(cls, name)
        member._value_, member.markers = name, markers
        return member

    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek_r1"
    MISTRAL = "mistral", Markers("[THINK]", "[/THINK]")
    GRANITE = "granite", Markers("Here is my thought process:", "Here is my response:")
    SEED_OSS = "seed_oss", Markers("<seed:think>", "</seed:think>")
    GEMMA4 = "gemma4", Markers("<|channel>thought", "<channel|>")
    OPENAI_GPTOSS = "openai_gptoss", Markers(OPENING, CLOSING, FINAL)


# Markup that a splitter must see even where it consists of special tokens.
MARKUP = (*(text for form in ReasoningFormat for text in form.markers if text), "<|channel>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningState:
    """How an answer's reasoning stands at the end of the prompt.

    is_open: the prompt has opened it. is_closed: the prompt has opened and closed it, which is how
    a template switches reasoning off; so a grammar does not allow any.
    """

    markers: Markers
    is_open: bool
    is_closed: bool


def reasoning_state(
    form: ReasoningFormat | None, prompt: str, answer_prefix: str = ""
) -> ReasoningState | None:
    """None if the answer has no reasoning. prompt: as rendered by the template. answer_prefix: the
    part of the answer that it contains."""
    if form is None or form.markers.closing in answer_prefix:
        return None  # the reasoning has ended
    prompt = prompt.rstrip()
    # Where answers are messages, every prompt ends as if reasoning had.
    is_message = bool(form.markers.answer)
    is_closed = (not is_message and prompt.endswith(form.markers.closing)) or bool(answer_prefix)
    is_open = form.markers.opening in answer_prefix or prompt.endswith(form.markers.opening)
    # An answer of this one begins with reasoning even without an opening marker.
    is_open = is_open or (form is ReasoningFormat.DEEPSEEK_R1 and not is_closed)
    return ReasoningState(
        markers=form.markers, is_open=is_open, is_closed=is_closed and not is_open
    )


def format_of_template(template: str) -> ReasoningFormat | None:
    """The format whose markers occur in the template."""
    return next((form for form in ReasoningFormat if _is_in(form.markers, template)), None)


def _is_in(markers: Collection[str], template: str) -> bool:
    return any(marker in template for marker in markers if marker)


def make_splitter(reasoning: ReasoningState | None) -> "ReasoningSplitter | ChannelSplitter | None":
    if reasoning is None:
        return None
    if reasoning.markers.answer:
        return ChannelSplitter(is_open=reasoning.is_open, is_final=reasoning.is_closed)
    return ReasoningSplitter(is_open=reasoning.is_open, markers=reasoning.markers)


class ReasoningSplitter:
    """Splits text incrementally. The marker opens reasoning only at the beginning of the answer,
    even if it is open already: some models write the marker whatever the prompt ends with.

    Whitespace around the markers belongs to them. is_thinking: whether the text so far ends within
    the reasoning.
    """

    def __init__(self, *, is_open: bool, markers: Markers = _THINK) -> None:
        self.is_thinking = is_open
        self._opening, self._closing = markers.opening, markers.closing
        self._is_done = False  # the reasoning has ended, or there is none
        self._is_fresh = True  # only whitespace has followed the marker
        self._may_open = is_open  # a marker although the reasoning is open
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._is_done:
                parts += self._text_parts(text)
                break
            if plain := self._plain_run(text):
                parts.append(ReasoningPart(plain))
                text = text[len(plain) :]
                continue
            char, text = text[0], text[1:]
            parts += self._in_reasoning(char) if self.is_thinking else self._before_reasoning(char)
        return merged(parts)

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [ReasoningPart(held)] if self.is_thinking else [TextPart(held)]

    def _before_reasoning(self, char: str) -> list[Part]:
        self._held += char
        prefix = self._held.lstrip(WHITESPACE)
        if prefix == self._opening:
            self.is_thinking, self._held = True, ""
        elif len(self._held) > _MAX_SPACE or not self._opening.startswith(prefix):
            self._is_done, self._is_fresh = True, False
            held, self._held = self._held, ""
            return [TextPart(held)]
        return []

    def _plain_run(self, text: str) -> str:
        """The text up to a possible marker or whitespace; most reasoning passes this way."""
        if self._held or self._is_fresh or not self.is_thinking:
            return ""
        return text.partition(self._closing[0])[0].rstrip(WHITESPACE)

    def _in_reasoning(self, char: str) -> list[Part]:
        if self._is_fresh and char in WHITESPACE and not self._held:
            return []
        self._held += char
        if self._may_open and self._opening.startswith(self._held):
            if self._held == self._opening:
                self._may_open, self._held = False, ""
            return []
        self._may_open = self._is_fresh = False
        if self._held.endswith(self._closing):
            reasoning = self._held.removesuffix(self._closing).rstrip(WHITESPACE)
            self.is_thinking, self._is_done, self._is_fresh = False, True, True
            self._held = ""
        else:
            reasoning = self._certain()
            self._held = self._held[len(reasoning) :]
        return [ReasoningPart(reasoning)] if reasoning else []

    def _certain(self) -> str:
        """The held text without the beginning of a closing marker and whitespace before it."""
        end = len(self._held) - num_begun(self._held, self._closing)
        certain = self._held[:end].rstrip(WHITESPACE)
        return certain or self._held[: end if end > _MAX_SPACE else 0]

    def _text_parts(self, text: str) -> list[Part]:
        if self._is_fresh:
            text = text.lstrip(WHITESPACE)
            self._is_fresh = not text
        return [TextPart(text)] if text else []
