"""`Answer`: one answer as far as it has come, and how fast it came."""

import time

from penstock.loadtest.chat.client import Piece


class Answer:
    """Begins when it is made, as the request is sent."""

    def __init__(self) -> None:
        self.text = ""
        self.is_stopped = False  # by the user
        self._asked_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._asked_s
        self._num_pieces = 0
        self._num_tokens: int | None = None
        self._finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        if piece.num_tokens is not None:
            self._num_tokens = piece.num_tokens
        if piece.finish_reason:
            self._finish_reason = piece.finish_reason
        if piece.text or piece.reasoning:
            self._num_pieces += 1
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s

    def summary(self) -> str:
        """As "142 tokens, TTFT 21 ms, 85.3 tokens/s"."""
        if self._first_s is None:
            return "stopped before the first token" if self.is_stopped else "an empty answer"
        # A server that is stopped, or an older one, tells no number: most send a token a piece.
        is_counted = self._num_tokens is not None
        num_tokens = self._num_tokens or self._num_pieces
        parts = [
            f"{'' if is_counted else '~'}{num_tokens} tokens",
            f"TTFT {(self._first_s - self._asked_s) * 1e3:.0f} ms",
        ]
        if num_tokens > 1 and self._last_s > self._first_s:
            parts.append(f"{(num_tokens - 1) / (self._last_s - self._first_s):.1f} tokens/s")
        if self.is_stopped:
            parts.append("stopped")
        elif self._finish_reason == "length":
            parts.append("cut off at the limit of tokens")
        return ", ".join(parts)
