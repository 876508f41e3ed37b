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


# A tenant, and the id of its response.
_Key = tuple[str, str]


class _Shelf:
    """What one client has stored, the least recently used first."""

    def __init__(self) -> None:
        self.responses: OrderedDict[_Key, StoredResponse] = OrderedDict()
        self.num_bytes = 0


class ResponseStore:
    """Responses by tenant and id: what one API key stored no other finds.

    Room is made by the client that takes the largest share of it, so that each one keeps at least
    an equal share, and one alone may fill the store, with however many keys it has invented.
    """

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # by client
        self._client_of: dict[_Key, str] = {}
        # Counted, not summed up each time: there may be as many clients as responses.
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._client_of)

    def put(self, client: str, tenant: str, response_id: str, response: StoredResponse) -> None:
        """In place of an earlier one of this id. One that is larger than the whole store is not
        kept, and evicts nothing else."""
        key = tenant, response_id
        if key in self._client_of:
            self._remove(key)
        if response.num_bytes > self._max_bytes or not self._max_count:
            return
        shelf = self._shelves.setdefault(client, _Shelf())
        shelf.responses[key] = response
        self._client_of[key] = client
        shelf.num_bytes += response.num_bytes
        self.num_bytes += response.num_bytes
        while len(self) > self._max_count or self.num_bytes > self._max_bytes:
            # If shares are equal, it is the one that needs the room.
            largest = max(self._shelves, key=lambda name: (self._share(name), name == client))
            self._remove(next(iter(self._shelves[largest].responses)))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ResponseNotFound."""
        key = tenant, response_id
        if key not in self._client_of:
            raise ResponseNotFound(response_id)
        responses = self._shelves[self._client_of[key]].responses
        responses.move_to_end(key)
        return responses[key]

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        self.get(tenant, response_id)
        self._remove((tenant, response_id))

    def _share(self, client: str) -> float:
        """Counts by the limit that is exceeded: the number of responses, or their bytes."""
        shelf = self._shelves[client]
        if len(self) > self._max_count:
            return len(shelf.responses) / self._max_count
        return shelf.num_bytes / self._max_bytes

    def _remove(self, key: _Key) -> None:
        client = self._client_of.pop(key)
        shelf = self._shelves[client]
        num_bytes = shelf.responses.pop(key).num_bytes
        shelf.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        if not shelf.responses:
            del self._shelves[client]
