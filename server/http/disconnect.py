"""Cancels work whose client has disconnected."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

# nginx's status for a client that has disconnected. Nobody receives it; the metrics count it.
CLIENT_DISCONNECTED = 499


class ClientDisconnected(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects: then ClientDisconnected.

    The request's body must have been read: of what follows it only the disconnect matters.
    """
    running = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((running, listening), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientDisconnected
    finally:
        running.cancel()
        listening.cancel()
        await asyncio.gather(running, listening, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
