"""Clients take turns at what is scarce, however much one of them asks for."""

import asyncio
from collections.abc import Iterable

import pytest

from penstock.server.errors import GrammarQueueFull
from penstock.server.structured.grammar_checker import FairTurns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Room:
    """One turn at a time, taken by "busy" at first. served: who had a turn after it, in order."""

    def __init__(self, max_waiting: int = 100, max_wait_s: float = 30.0) -> None:
        self.turns = FairTurns(1, max_waiting=max_waiting, max_wait_s=max_wait_s)
        self.served: list[str] = []
        self.refused: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def wait(self, clients: Iterable[str]) -> None:
        for client in clients:
            self.tasks.append(asyncio.create_task(self._take(client)))
            await settle()

    async def serve(self, num: int) -> None:
        for _ in range(num):
            self.turns.give_back()
            await settle()

    async def _take(self, client: str) -> None:
        try:
            await self.turns.take(client)
            self.served.append(client)
        except GrammarQueueFull:
            self.refused.append(client)


async def test_a_client_with_many_requests_does_not_keep_others_waiting() -> None:
    room = Room()
    await room.turns.take("busy")
    await room.wait("aaaabcb")
    await room.serve(7)
    assert room.served == list("abcabaa")


async def test_when_too_many_wait_the_client_with_the_most_loses_its_last() -> None:
    room = Room(max_waiting=4)
    await room.turns.take("busy")
    await room.wait("aaaa")
    await room.wait("bb")
    assert room.refused == ["a", "a"]
    await room.wait("b")  # as many as the other: its own turn
    await room.wait("a")
    assert room.refused == list("aaba")
    await room.serve(4)
    assert sorted(room.served) == list("aabb")


async def test_a_turn_that_does_not_come_in_time_is_refused_and_its_place_is_free() -> None:
    room = Room(max_waiting=1, max_wait_s=0.01)
    await room.turns.take("busy")
    for client in "ab":
        with pytest.raises(GrammarQueueFull):
            await room.turns.take(client)
    room.turns.give_back()
    await room.turns.take("c")


async def test_who_stops_waiting_loses_nothing_for_the_others() -> None:
    room = Room()
    await room.turns.take("busy")
    await room.wait("ab")
    room.tasks[0].cancel()
    await settle()
    await room.serve(1)
    assert room.served == ["b"]
    await room.wait("c")
    room.turns.give_back()
    room.tasks[2].cancel()  # it has the turn, and does not know yet
    await settle()
    await asyncio.wait_for(room.turns.take("d"), 1)


async def test_a_free_turn_is_taken_at_once() -> None:
    turns = FairTurns(2, max_waiting=0, max_wait_s=0)
    await turns.take("a")
    await turns.take("a")
    with pytest.raises(GrammarQueueFull):
        await turns.take("b")
    turns.give_back()
    await turns.take("b")
