"""Stored responses, to be retrieved or continued. Bounded: the least recently used are evicted."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.server.errors import ResponseNotFound

# What Python needs for an entry besides its bytes, so that small ones count too.
_ENTRY_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """All of it is JSON, so that what is kept can be counted.

    history: the items of the turns before, each an array; a response shares them with the one that
    it continues. So a conversation can be continued after its earlier responses were evicted.
    """

    body: bytes
    input_items: bytes
    output_items: bytes
    history: tuple[bytes, ...] = ()

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """What a response that continues this one has as its history."""
        return (*self.history, self.input_items, self.output_items)

    @property
    def num_bytes(self) -> int:
        """Shared parts count in full, so this is an upper bound."""
        return len(self.body) + sum(len(part) for part in self.conversation) + _ENTRY_BYTES


def items_of(parts: tuple[bytes, ...]) -> list[dict[str, Any]]:
    return [item for part in parts for item in msgspec.json.decode(part)]


class ResponseStore:
    """Responses by tenant and id: what one API key stored no other finds."""

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """One that is larger than the whole store is not kept, and evicts nothing."""
        if response.num_bytes > self._max_bytes or not self._max_count:
            return
        self._responses[tenant, response_id] = response
        self.num_bytes += response.num_bytes
        while len(self._responses) > self._max_count or self.num_bytes > self._max_bytes:
            _, evicted = self._responses.popitem(last=False)
            self.num_bytes -= evicted.num_bytes

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ResponseNotFound."""
        response = self._responses.get((tenant, response_id))
        if response is None:
            raise ResponseNotFound(response_id)
        self._responses.move_to_end((tenant, response_id))
        return response

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        self.num_bytes -= self.get(tenant, response_id).num_bytes
        del self._responses[tenant, response_id]
