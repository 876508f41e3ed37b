"""Events to bytes to the socket: keep-alives, errors within a stream, `[DONE]`, and hang-ups."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.scheduler.errors import PenstockError
from penstock.server.http.middleware import DIRECT_SEND
from penstock.server.output.generation import Generation, Piece, Usage

logger = logging.getLogger("penstock")

PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
# While a client is slow to read, outputs wait as the engine made them. So many at a time are turned
# to text, which takes a hundredth of the memory.
_MAX_WAITING = 1024

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
    """A generation, already submitted, as server-sent events straight to the socket.

    What is new goes out in the very callback that brings it: to wake a task for each token would
    cost as much as the token. While the client is slow to read nothing more is written for it, and
    what comes becomes few large events.
    """

    def __init__(
        self, generation: Generation, writer: EventWriter, *, ping_interval_s: float
    ) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._ping_interval_s = ping_interval_s
        self._last_sent_s = time.monotonic()
        self._opening = b""  # until it has been told
        self._unsent: list[bytes] = []
        self._all_taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slow_send: asyncio.Task[None] | None = None  # waits for the client, or a thread
        self._is_writing = False  # in a thread
        self._send_direct: Callable[[Message], Coroutine[Any, Any, None]]  # as ASGI's `send` is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_direct = scope.get(DIRECT_SEND, send)
        try:
            await until_hangup(receive, self._respond(send))
        except ClientGone:
            logger.debug("client gone: %s", self._generation.ask.id)
        finally:
            if self._slow_send:
                self._slow_send.cancel()
            self._generation.close()

    async def _respond(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        pinger = asyncio.create_task(self._keep_alive())
        try:
            last = await self._send_pieces()
        except Exception as error:
            if not isinstance(error, PenstockError):
                logger.exception("request %s failed", self._generation.ask.id)
            last = self._writer.failure(error)
        finally:
            pinger.cancel()
        if self._slow_send:
            await self._slow_send
        last = b"".join(self._unsent) + last
        await send({"type": "http.response.body", "body": last})

    async def _send_pieces(self) -> bytes:
        """Takes all pieces and sends most of them; returns what comes behind those unsent."""
        # The opening waits for the first text: a client that times it measures a token.
        self._opening = self._writer.openings(len(self._generation.choices))
        self._generation.listen(self._on_news)
        self._on_news()
        await self._all_taken
        return self._opening + self._writer.end(self._generation.usage)

    def _on_news(self) -> None:
        if self._all_taken.done():
            return
        try:
            self._take()
        except Exception as error:
            self._all_taken.set_exception(error)

    def _take(self) -> None:
        generation = self._generation
        if self._slow_send and (self._is_writing or generation.num_waiting < _MAX_WAITING):
            return
        if pieces := generation.take():
            if not self._slow_send and any(piece.echoed for piece in pieces):
                self._is_writing = True
                self._slow_send = asyncio.create_task(self._finish(self._write_aside(pieces)))
                return
            self._unsent += map(self._writer.piece, pieces)
            if self._opening:
                self._unsent.insert(0, self._opening)
                self._opening = b""
        if generation.has_ended:
            self._all_taken.set_result(None)
        elif self._unsent and not self._slow_send:
            events = b"".join(self._unsent)
            self._unsent.clear()
            self._send(events)

    def _send(self, events: bytes) -> None:
        self._last_sent_s = time.monotonic()
        message = {"type": "http.response.body", "body": events, "more_body": True}
        if rest := begin(self._send_direct(message)):
            self._slow_send = asyncio.create_task(self._finish(rest))

    async def _write_aside(self, pieces: list[Piece]) -> None:
        """All that is said of a long prompt's tokens would keep the event loop for too long."""
        try:
            events = await asyncio.to_thread(lambda: [*map(self._writer.piece, pieces)])
        finally:
            self._is_writing = False
        self._unsent += [self._opening, *events]
        self._opening = b""

    async def _finish(self, sending: Awaitable[None]) -> None:
        """Waits until the client has read; then sends what has come meanwhile."""
        try:
            await sending
        except Exception as error:
            if not self._all_taken.done():
                self._all_taken.set_exception(error)
        finally:
            self._slow_send = None
        self._on_news()

    async def _keep_alive(self) -> None:
        """A comment where nothing was sent for a while: proxies cut what is silent."""
        while True:
            silence_s = time.monotonic() - self._last_sent_s
            if silence_s >= self._ping_interval_s:
                if not self._slow_send:
                    self._send(PING)
                silence_s = 0.0
            await asyncio.sleep(self._ping_interval_s - silence_s)


class Begun:
    """The rest of a coroutine that has run up to where it waits, to be awaited by any task."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            while True:
                try:
                    value = yield self._waits_for
                except BaseException as error:
                    self._waits_for = self._coroutine.throw(error)
                else:
                    self._waits_for = self._coroutine.send(value)
        except StopIteration:
            return


def begin(coroutine: Coroutine[Any, Any, None]) -> Begun | None:
    """Runs a coroutine, here and now, as far as it goes; None if that is to its end.

    A server's `send` waits only where the socket is full. Elsewhere this is a mere call, where a
    task would cost a turn of the event loop.
    """
    try:
        return Begun(coroutine, coroutine.send(None))
    except StopIteration:
        return None
