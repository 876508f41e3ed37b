"""Events to bytes to the socket: keep-alives, errors within a stream, `[DONE]`, and hang-ups."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.errors import PenstockError
from server.generation import Generation, Piece, Usage

logger = logging.getLogger("penstock")

PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]

T = TypeVar("T")


class ClientGone(Exception):
    """Whoever asked has hung up."""


async def until_hangup(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up: then ClientGone.

    The request's body must have been read: of what comes after it only the end is of interest.
    """
    running = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_hangup(receive))
    try:
        await asyncio.wait((running, listening), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientGone
    finally:
        running.cancel()
        listening.cancel()
        await asyncio.gather(running, listening, return_exceptions=True)


async def _hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventWriter(Protocol):
    """One API's events, as bytes, for what comes to pass in a generation."""

    def openings(self, num_choices: int) -> bytes:
        """What comes first, sent together with the first piece."""
        ...

    def piece(self, piece: Piece) -> bytes: ...

    def end(self, usage: Usage) -> bytes:
        """What comes last where all went well."""
        ...

    def failure(self, error: Exception) -> bytes:
        """What comes last where it did not: the status has been sent, so an event must tell."""
        ...


class EventStream(Response):
    """A generation, already submitted, as server-sent events straight to the socket."""

    def __init__(
        self, generation: Generation, writer: EventWriter, *, ping_interval_s: float
    ) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._ping_interval_s = ping_interval_s
        self._last_sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_hangup(receive, self._respond(send))
        except ClientGone:
            logger.debug("client gone: %s", self._generation.ask.id)
        finally:
            self._generation.close()

    async def _respond(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        pinger = asyncio.create_task(self._keep_alive(send))
        try:
            last = await self._send_pieces(send)
        except Exception as error:
            if not isinstance(error, PenstockError):
                logger.exception("request %s failed", self._generation.ask.id)
            last = self._writer.failure(error)
        finally:
            pinger.cancel()
        await send({"type": "http.response.body", "body": last})

    async def _send_pieces(self, send: Send) -> bytes:
        """Sends all but the last bytes, which it returns."""
        # The opening waits for the first text: a client that times it measures a token.
        events = self._writer.openings(len(self._generation.choices))
        async with aclosing(self._generation.pieces()) as news:
            async for pieces in news:
                events += b"".join([self._writer.piece(piece) for piece in pieces])
                await self._send(send, events)
                events = b""
        return events + self._writer.end(self._generation.usage)

    async def _send(self, send: Send, data: bytes) -> None:
        self._last_sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        """A comment where nothing was sent for a while: proxies cut what is silent."""
        while True:
            silence_s = time.monotonic() - self._last_sent_s
            if silence_s >= self._ping_interval_s:
                await self._send(send, PING)
                silence_s = 0.0
            await asyncio.sleep(self._ping_interval_s - silence_s)
