"""Server-sent events, from deltas to the socket: keep-alives, slow clients, errors in a stream."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Protocol

from starlette.types import Message, Send

from penstock.scheduler.errors import PenstockError
from penstock.server.errors import note_error
from penstock.server.output.delta import OutputDelta, Usage
from penstock.server.output.generation import Generation

logger = logging.getLogger("penstock")

PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
# While a client is slow to read, outputs wait as the engine made them. When this many wait, they
# are turned into text, which takes a hundredth of the memory.
_MAX_WAITING = 1024


class EventWriter(Protocol):
    """One API's events, as bytes, for what happens in a generation."""

    def openings(self, num_choices: int) -> bytes:
        """The events that come first, sent together with the first delta."""
        ...

    def delta(self, delta: OutputDelta) -> bytes: ...

    def end(self, usage: Usage) -> bytes:
        """The events that come last if the generation succeeded."""
        ...

    def failure(self, error: Exception) -> bytes:
        """The events that come last if it failed: the status has been sent, so an event must report
        it."""
        ...


class EventStream:
    """A generation as server-sent events straight to the socket.

    New deltas are sent in the very callback that brings them: waking a task for each token would
    cost as much as the token. While the client is slow to read nothing more is written for it, and
    what arrives is joined into few large events.
    """

    def __init__(
        self,
        generation: Generation,
        writer: EventWriter,
        send: Send,
        send_direct: Send,
        *,
        ping_interval_s: float,
    ) -> None:
        """send_direct: for the bodies between the start and the end of the response."""
        self._generation = generation
        self._writer = writer
        self._send_start_and_end = send
        self._send_direct: Callable[[Message], Coroutine[Any, Any, None]] = send_direct  # type: ignore[assignment]
        self._ping_interval_s = ping_interval_s
        self._last_sent_s = time.monotonic()
        self._opening = b""  # until it has been sent
        self._unsent: list[bytes] = []
        self._all_taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slow_send: asyncio.Task[None] | None = None  # waits for the client, or a thread
        self._is_writing = False  # in a thread

    async def run(self) -> None:
        """Sends the whole response. The caller closes the generation."""
        try:
            await self._respond()
        finally:
            if self._slow_send:
                self._slow_send.cancel()

    async def _respond(self) -> None:
        await self._send_start_and_end(
            {"type": "http.response.start", "status": 200, "headers": _HEADERS}
        )
        pinger = asyncio.create_task(self._keep_alive())
        try:
            last = await self._send_deltas()
        except Exception as error:
            note_error(error)
            if not isinstance(error, PenstockError):
                logger.exception("the request failed")
            last = self._writer.failure(error)
        finally:
            pinger.cancel()
        if self._slow_send:
            await self._slow_send
        last = b"".join(self._unsent) + last
        await self._send_start_and_end({"type": "http.response.body", "body": last})

    async def _send_deltas(self) -> bytes:
        """Takes all deltas and sends most of them; returns what follows the unsent ones."""
        # The opening waits for the first text: a client that times it measures a token.
        self._opening = self._writer.openings(len(self._generation.choices))
        if self._generation.request.sent:
            self._opening = b""
            for delta in self._generation.replayed:
                self._writer.delta(delta)  # only what it remembers of it matters
        self._generation.listen(self._on_output)
        self._on_output()
        await self._all_taken
        return self._opening + self._writer.end(self._generation.usage)

    def _on_output(self) -> None:
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
        if deltas := generation.take():
            if not self._slow_send and any(delta.echoed for delta in deltas):
                self._is_writing = True
                self._slow_send = asyncio.create_task(self._finish(self._write_aside(deltas)))
                return
            self._unsent += map(self._writer.delta, deltas)
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

    async def _write_aside(self, deltas: list[OutputDelta]) -> None:
        """Logprobs of a long prompt's tokens would block the event loop for too long."""
        try:
            events = await asyncio.to_thread(lambda: [*map(self._writer.delta, deltas)])
        finally:
            self._is_writing = False
        self._unsent += [self._opening, *events]
        self._opening = b""

    async def _finish(self, sending: Awaitable[None]) -> None:
        """Waits until the client has read; then sends what has arrived meanwhile."""
        try:
            await sending
        except Exception as error:
            if not self._all_taken.done():
                self._all_taken.set_exception(error)
        finally:
            self._slow_send = None
        self._on_output()

    async def _keep_alive(self) -> None:
        """A comment when nothing was sent for a while: proxies cut silent connections."""
        while True:
            silence_s = time.monotonic() - self._last_sent_s
            if silence_s >= self._ping_interval_s:
                if not self._slow_send:
                    self._send(PING)
                silence_s = 0.0
            await asyncio.sleep(self._ping_interval_s - silence_s)


class StartedCoroutine:
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


def begin(coroutine: Coroutine[Any, Any, None]) -> StartedCoroutine | None:
    """Runs a coroutine, here and now, until it waits; None if it ended.

    A server's `send` waits only if the socket is full. Otherwise this is a mere call, where a task
    would cost a turn of the event loop.
    """
    try:
        return StartedCoroutine(coroutine, coroutine.send(None))
    except StopIteration:
        return None
