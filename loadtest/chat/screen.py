"""How an answer is shown as it comes. It knows neither server nor keyboard."""

import os
import unicodedata
from typing import TextIO

from penstock.loadtest.chat.client import Piece

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CLEAR_LINE = "\r\x1b[K"
_KEPT_CONTROLS = "\n\t"


class Screen:
    """Answers go to `out`, what is said of them to `notes`. What is no terminal gets the answers
    alone: no reasoning, no notes."""

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._notes = notes
        self.is_terminal = out.isatty()
        self._has_notes = notes.isatty()
        self._has_colours = os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
        self._is_in_reasoning = False
        self._is_in_line = False
        self._has_told_to_wait = False

    def show(self, piece: Piece) -> None:
        if piece.reasoning and self.is_terminal:
            self._is_in_reasoning = True
            self._write(self._dim(_printable(piece.reasoning)))
        if piece.text:
            if self._is_in_reasoning:
                self._is_in_reasoning = False
                self._write("\n\n")
            self._write(_printable(piece.text))
            self._is_in_line = not piece.text.endswith("\n")

    def end_answer(self) -> None:
        if self._is_in_line or self._is_in_reasoning:
            self._write("\n")
        self._is_in_line = self._is_in_reasoning = False

    def say(self, text: str) -> None:
        """What a command answers."""
        self._write(self._dim(_printable(text)) + "\n")

    def note(self, text: str) -> None:
        if self._has_notes:
            print(self._dim(_printable(text)), file=self._notes, flush=True)

    def wait_note(self, text: str) -> None:
        """A note in place of the one before; empty for none. Where it cannot be replaced, the first
        is the only one."""
        if self._has_notes:
            line = self._dim(_printable(text)) if text else ""
            print(_CLEAR_LINE + line, end="", file=self._notes, flush=True)
        elif text and not self._has_told_to_wait:
            print(text, file=self._notes, flush=True)
            self._has_told_to_wait = True

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _dim(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self._has_colours else text


def _printable(text: str) -> str:
    """Without control characters: a model could command the terminal with them."""
    return "".join(c for c in text if c in _KEPT_CONTROLS or unicodedata.category(c) != "Cc")
