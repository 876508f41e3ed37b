"""`LoopDetector`: whether an answer has begun to repeat itself, token by token."""

from collections import deque
from typing import NamedTuple


class LoopRule(NamedTuple):
    """An answer loops once its last tokens are min_count or more copies of one block of min_size to
    max_size tokens, which together have min_tokens or more."""

    min_size: int
    max_size: int
    min_count: int
    min_tokens: int = 0


class LoopDetector:
    """Reads one answer. A token costs as much as its id has occurred in the last max_size."""

    def __init__(self, rule: LoopRule) -> None:
        self._rule = rule
        self._num_tokens = 0
        self._places: dict[int, deque[int]] = {}  # of each id among the last tokens, ascending
        # Size of a block -> how many of the last tokens equal the one so many places before.
        self._runs: dict[int, int] = {}

    def feed(self, token_id: int) -> bool:
        """Whether the answer loops with this token."""
        rule, at = self._rule, self._num_tokens
        self._num_tokens += 1
        places = self._places.setdefault(token_id, deque())
        while places and at - places[0] > rule.max_size:
            places.popleft()
        self._runs = {at - place: self._runs.get(at - place, 0) + 1 for place in places}
        places.append(at)
        return any(
            size >= rule.min_size and run + size >= max(rule.min_tokens, size * rule.min_count)
            for size, run in self._runs.items()
        )
