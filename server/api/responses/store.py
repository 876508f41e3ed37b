"""Stored responses, to be retrieved or continued. Bounded: the least recently used are evicted."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.server.errors import ResponseNotFound

# Python needs this for an entry besides its bytes, so that small ones count too.
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
        """The history of a response that continues this one."""
        return (*self.history, self.input_items, self.output_items)

    @property
    def num_bytes(self) -> int:
        """Shared parts count in full, so this is an upper bound."""
        return len(self.body) + sum(len(part) for part in self.conversation) + _ENTRY_BYTES


def items_of(parts: tuple[bytes, ...]) -> list[dict[str, Any]]:
    return [item for part in parts for item in msgspec.json.decode(part)]


class _Shelf:
    """The responses that one tenant has stored, the least recently used first."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0


class ResponseStore:
    """Responses by tenant and id: what one API key stored no other finds or evicts.

    Room is made by the tenant that takes the largest share of it, so that each one keeps at least
    an equal share, and one alone may fill the store.
    """

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}
        # Counted, not summed up each time: there may be as many tenants as responses.
        self._count = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """In place of an earlier one of this id. One that is larger than the whole store is not
        kept, and evicts nothing else."""
        if response_id in self._responses_of(tenant):
            self._remove(tenant, response_id)
        if response.num_bytes > self._max_bytes or not self._max_count:
            return
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.responses[response_id] = response
        self._count += 1
        shelf.num_bytes += response.num_bytes
        self.num_bytes += response.num_bytes
        while self._count > self._max_count or self.num_bytes > self._max_bytes:
            # If shares are equal, it is the one that needs the room.
            largest = max(self._shelves, key=lambda name: (self._share(name), name == tenant))
            self._remove(largest, next(iter(self._shelves[largest].responses)))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ResponseNotFound."""
        responses = self._responses_of(tenant)
        if response_id not in responses:
            raise ResponseNotFound(response_id)
        responses.move_to_end(response_id)
        return responses[response_id]

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        self.get(tenant, response_id)
        self._remove(tenant, response_id)

    def _responses_of(self, tenant: str) -> OrderedDict[str, StoredResponse]:
        shelf = self._shelves.get(tenant)
        return shelf.responses if shelf else OrderedDict()

    def _share(self, tenant: str) -> float:
        """Counts by the limit that is exceeded: the number of responses, or their bytes."""
        shelf = self._shelves[tenant]
        if self._count > self._max_count:
            return len(shelf.responses) / self._max_count
        return shelf.num_bytes / self._max_bytes

    def _remove(self, tenant: str, response_id: str) -> None:
        shelf = self._shelves[tenant]
        num_bytes = shelf.responses.pop(response_id).num_bytes
        self._count -= 1
        shelf.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        if not shelf.responses:
            del self._shelves[tenant]
