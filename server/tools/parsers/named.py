"""Answers that consist of the arguments of one call, whose tool tool_choice has named."""

from collections.abc import Callable

from penstock.server.output.parts import CallArguments, CallStart, Part
from penstock.server.tools.parsers.base import new_call_id


class NamedCallParser:
    """Reads the whole answer as the arguments of one call, which a grammar has enforced.

    is_custom: they are the input of a custom tool.
    """

    def __init__(
        self, name: str, make_id: Callable[[], str] = new_call_id, *, is_custom: bool = False
    ) -> None:
        self.num_calls = 0
        self.is_over = False
        self._name = name
        self._make_id = make_id
        self._is_custom = is_custom

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        parts: list[Part] = [CallArguments(0, text, self._is_custom)]
        if not self.num_calls:
            self.num_calls = 1
            parts.insert(0, CallStart(0, self._make_id(), self._name, self._is_custom))
        return parts

    def end(self) -> list[Part]:
        return []
