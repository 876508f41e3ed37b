"""The engine's asyncio face: `submit` gives an async iterator, `abort` ends it."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from penstock.engine.config import EngineConfig
from penstock.engine.executor import ModelInfo
from penstock.engine.ipc.messages import Abort, FromEngine, Ready, Refused, StepReport, Submit
from penstock.scheduler.errors import PenstockError
from penstock.scheduler.types import Request, RequestId, RequestOutput

# How many of the latest answers to end are remembered to estimate when a place gets free.
_RATE_WINDOW = 64
_MAX_RETRY_AFTER_S = 60
# Step reports that are taken in before the streams get to run. Where the server has fallen behind,
# each stream then sends what several steps made in one event, which is how it catches up.
_MAX_REPORTS_AT_ONCE = 32


_SOCKET_NAME = "engine"


class EngineState(StrEnum):
    """What the engine process is doing, as far as the server knows."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineFailed(PenstockError):
    """The engine process could not start, or ended; the message says why and what to change."""


class RequestRefused(PenstockError):
    """The scheduler did not accept the request; the message says why."""


class QueueFull(PenstockError):
    """More answers wait than --max-num-queued-reqs allows."""

    def __init__(self, num_queued: int, retry_after_s: int) -> None:
        super().__init__(
            f"{num_queued} requests are waiting already; try again in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class OutputStream:
    """The outputs of one request: an async iterator of all that waits at each look.

    Who has many streams may `listen` and `take` instead, which needs no task for each.
    """

    def __init__(self, client: "EngineClient", request: Request) -> None:
        self._client = client
        self._request_id = request.id
        self._open = set(range(request.n))  # answers without a final output
        self._waiting: list[RequestOutput] = []
        self._error: PenstockError | None = None
        self._is_due = False  # its listener is about to be called
        self._on_news: Callable[[], None] | None = None
        # A bare future: an asyncio.Event asks for the loop, and so for the process id, every time.
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        try:
            while not (outputs := self.take()):
                if self.is_over:
                    raise StopAsyncIteration
                self._waiter = self._loop.create_future()
                await self._waiter
        except asyncio.CancelledError:
            await self.aclose()
            raise
        return outputs

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls back, on the event loop, when `take` has news: once for all that came in at one go.

        It must not raise: the streams behind it in the line would hear nothing.
        """
        self._on_news = on_news

    def take(self) -> list[RequestOutput]:
        """All that waits. Where nothing does, raises the error that ended the request, if one did:
        EngineFailed or RequestRefused."""
        if not self._waiting and self._error:
            raise self._error
        outputs, self._waiting = self._waiting, []
        if self._error:
            self._become_due()  # the news of the error was that of these outputs too
        return outputs

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_over(self) -> bool:
        """Nothing waits, and nothing comes."""
        return not self._waiting and not self._open

    async def aclose(self) -> None:
        """Aborts what has not ended. Call it where the iteration may stop early."""
        if self._open and not self._error:
            self._client.abort(self._request_id)

    # What the client tells it.

    @property
    def num_open(self) -> int:
        return len(self._open)

    def push(self, output: RequestOutput) -> None:
        if output.index not in self._open:
            return  # aborted while this was on its way
        self._waiting.append(output)
        if output.finish:
            self._open.discard(output.index)
        self._become_due()

    def drop(self, index: int | None) -> None:
        self._open = self._open - {index} if index is not None else set()
        self._become_due()

    def fail(self, error: PenstockError) -> None:
        self._error = error
        self._become_due()

    def tell(self) -> None:
        self._is_due = False
        (self._on_news or self._wake)()

    def _become_due(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._client.tell_soon(self)

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Starts the engine process, feeds it and hands out what it makes. Lives on one event loop."""

    def __init__(self, config: EngineConfig, module: str = "penstock.engine.ipc.process") -> None:
        """module: what the process runs; it speaks as `penstock.engine.ipc.process` does."""
        self._config = config
        self._module = module
        self._state = EngineState.STARTING
        self._info: ModelInfo | None = None
        self._streams: dict[RequestId, OutputStream] = {}
        self._due: list[OutputStream] = []  # those with news that have not been told of it
        self._num_open = 0
        self._ended_at_s: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._on_step: list[Callable[[StepReport], None]] = []
        self._last_report: StepReport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._dead: asyncio.Future[str] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> ModelInfo:
        """Raises EngineFailed while there is no engine that is ready."""
        if self._info is None:
            raise EngineFailed("the model is still loading")
        return self._info

    @property
    def num_open(self) -> int:
        """Answers asked for and not ended, running and waiting together: `n` of each request."""
        return self._num_open

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None where there is none, or it has ended."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    @property
    def max_open(self) -> int:
        """So many answers may run and wait together."""
        return self._config.scheduler.max_num_seqs + self._config.max_num_queued_reqs

    @property
    def last_report(self) -> StepReport | None:
        return self._last_report

    def on_step(self, callback: Callable[[StepReport], None]) -> None:
        """Calls back with every step's report, on the event loop: for metrics."""
        self._on_step.append(callback)

    async def start(self) -> ModelInfo:
        """Starts the process and returns when it is ready. Raises EngineFailed."""
        self._directory = _socket_directory()
        loop = asyncio.get_running_loop()
        self._ready, self._dead = loop.create_future(), loop.create_future()
        endpoint = f"ipc://{self._directory.name}/{_SOCKET_NAME}"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)  # no limit in flight; do not wait at the end
        self._socket.bind(endpoint)
        # The same socket without asyncio, to take what is there at no further cost.
        self._waiting_messages: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder named engine where the server was started must not be taken for ours
            "-m",
            self._module,
            endpoint,
            stdin=asyncio.subprocess.PIPE,
            # Threads that spin while they wait take the core that the server needs.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ),
        )
        assert self._process.stdin
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())
        return await self._ready

    async def wait_dead(self) -> str:
        """Returns why, when the engine process has ended without being asked to."""
        assert self._dead, "start() comes first"
        return await asyncio.shield(self._dead)

    async def close(self) -> None:
        """Ends the process. Requests that are still open get EngineFailed."""
        self._die("the server is shutting down", is_expected=True)
        if not self._process:
            return
        for task in (self._reader, self._watcher):
            if task:
                task.cancel()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # it holds nothing that must be saved
            await self._process.wait()
        self._socket.close()
        self._directory.cleanup()

    def submit(self, request: Request) -> OutputStream:
        """Queues the request at once and gives its outputs, in order, as they come.

        An item is all that waits when the reader asks, so a slow reader gets few large items; the
        iteration ends after the last final output. Cancelling it, or `aclose`, aborts the request.
        Raises QueueFull, EngineFailed, or RequestRefused for an n beyond all room. While it runs,
        the iterator raises EngineFailed if the engine dies, RequestRefused if that was its answer.
        """
        if self._state is not EngineState.READY:
            raise EngineFailed(f"the engine is {self._state}")
        limit = self.max_open
        if request.n > limit:
            raise RequestRefused(f"n is {request.n}; this server holds {limit} answers at most")
        if self._num_open + request.n > limit:
            num_queued = max(0, self._num_open - self._config.scheduler.max_num_seqs)
            raise QueueFull(num_queued, self._retry_after_s())
        stream = OutputStream(self, request)
        self._streams[request.id] = stream
        self._num_open += request.n
        self._send(Submit(request))
        return stream

    def abort(self, request_id: RequestId, index: int | None = None) -> None:
        """Ends a request, or only its answer `index`, and gives no more outputs for it."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._send(Abort(request_id, index))
        num_before = stream.num_open
        stream.drop(index)
        self._account(request_id, stream, num_before)

    def tell_soon(self, stream: OutputStream) -> None:
        """Has it tell its listener, after all that waits here now has been taken in.

        One callback of the event loop serves all streams: one for each would cost more than most
        of what a listener does.
        """
        if not self._due:
            asyncio.get_running_loop().call_soon(self._tell_due)
        self._due.append(stream)

    def _tell_due(self) -> None:
        due, self._due = self._due, []
        for stream in due:
            stream.tell()

    def _send(self, message: Submit | Abort) -> None:
        # No high-water mark, so this never blocks; the future is done when it returns.
        self._socket.send(self._encoder.encode(message))

    async def _read(self) -> None:
        while True:
            self._hear(await self._socket.recv())
            with contextlib.suppress(zmq.Again):
                for _ in range(_MAX_REPORTS_AT_ONCE - 1):
                    self._hear(self._waiting_messages.recv(zmq.NOBLOCK))
            # While messages wait, recv gives at once and never lets anybody else run.
            await asyncio.sleep(0)

    def _hear(self, data: bytes) -> None:
        message = self._decoder.decode(data)
        if isinstance(message, StepReport):
            self._take(message)
        elif isinstance(message, Ready):
            self._info, self._state = message.info, EngineState.READY
            assert self._ready
            self._ready.set_result(message.info)
        elif isinstance(message, Refused):
            self._refuse(message)
        else:
            self._die(message.message)

    async def _watch(self) -> None:
        """The process may end without a last word: killed for memory, or by a signal."""
        assert self._process
        code = await self._process.wait()
        await asyncio.sleep(0.1)  # its last word may still be in the socket
        why = f"the engine process ended with code {code} and no message"
        if code == -signal.SIGKILL:
            why += (
                "; if nobody killed it, the kernel did for want of memory, which dmesg tells: "
                "lower --kv-cache-memory-bytes"
            )
        self._die(why)

    def _take(self, report: StepReport) -> None:
        self._last_report = report
        for output in report.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            num_before = stream.num_open
            stream.push(output)
            if output.finish:
                self._account(output.request_id, stream, num_before)
        for callback in self._on_step:
            callback(report)

    def _account(self, request_id: RequestId, stream: OutputStream, num_before: int) -> None:
        """Some answers of a stream have ended."""
        self._num_open -= num_before - stream.num_open
        self._ended_at_s.append(time.monotonic())
        if not stream.num_open:
            del self._streams[request_id]

    def _refuse(self, message: Refused) -> None:
        stream = self._streams.pop(message.request_id, None)
        if stream:
            self._num_open -= stream.num_open
            stream.fail(RequestRefused(message.message))

    def _die(self, why: str, is_expected: bool = False) -> None:
        """Fails all that is open, once: whoever waits for the engine is told why."""
        if self._state is EngineState.DEAD:
            return
        self._state = EngineState.DEAD
        for stream in self._streams.values():
            stream.fail(EngineFailed(why))
        self._streams.clear()
        self._num_open = 0
        if self._ready and not self._ready.done():
            self._ready.set_exception(EngineFailed(why))
        if self._dead and not self._dead.done() and not is_expected:
            self._dead.set_result(why)

    def _retry_after_s(self) -> int:
        """About when the next place gets free, from how often one did lately."""
        if len(self._ended_at_s) < 2:
            return 1
        interval_s = (time.monotonic() - self._ended_at_s[0]) / len(self._ended_at_s)
        return max(1, min(_MAX_RETRY_AFTER_S, round(interval_s)))


def _socket_directory() -> "tempfile.TemporaryDirectory[str]":
    """Where the engine's socket lies. Raises EngineFailed."""
    try:
        directory = tempfile.TemporaryDirectory(prefix="penstock-")
    except OSError as error:
        raise EngineFailed(
            f"there is no place for the engine's socket ({error}); make room in /tmp, or set "
            "TMPDIR to a directory that can be written to"
        ) from error
    if len(os.fsencode(f"{directory.name}/{_SOCKET_NAME}")) > zmq.IPC_PATH_MAX_LEN:
        directory.cleanup()
        raise EngineFailed(
            f"{directory.name} is too long a path for the engine's socket; set TMPDIR to a shorter "
            "one, as /tmp"
        )
    return directory
