"""Turns at something scarce, shared fairly: clients take turns, and so do the requests of each.

A client is whatever the caller calls one. It does not know what the turns are for.
"""

import asyncio
from collections import OrderedDict, deque


class NoTurn(Exception):
    """Too many wait, most of them for this client, or it has waited for too long."""


class FairTurns:
    """Lives on one event loop."""

    def __init__(self, num_turns: int, *, max_waiting: int, max_wait_s: float) -> None:
        """num_turns: at one time."""
        self._num_free = num_turns
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        # The client at the front is next. None of the queues is empty.
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, client: str) -> None:
        """Raises NoTurn. The caller gives the turn back."""
        if self._num_free:
            self._num_free -= 1
            return
        if sum(map(len, self._queues.values())) >= self._max_waiting:
            self._make_room(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            # It may have come at the same moment.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back()
            if isinstance(error, TimeoutError):
                raise NoTurn from error
            raise
        finally:
            self._forget(client, turn)

    def give_back(self) -> None:
        while self._queues:
            client, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _make_room(self, client: str) -> None:
        """Ends the wait of the last request of the client with the most, unless this one would then
        have as many. Raises NoTurn."""
        longest = max(self._queues, key=lambda each: len(self._queues[each]), default=client)
        num_own = len(self._queues.get(client, ()))
        if num_own + 1 >= len(self._queues.get(longest, ())):
            raise NoTurn
        turn = self._queues[longest][-1]
        self._forget(longest, turn)
        if not turn.done():
            turn.set_exception(NoTurn())

    def _forget(self, client: str, turn: "asyncio.Future[None]") -> None:
        """If it still waits."""
        queue = self._queues.get(client)
        if queue and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[client]
