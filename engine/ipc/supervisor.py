"""`EngineProcess`: starts, watches and ends one engine process (process.py), and owns the socket.

It knows no requests. To start the engine again after its process has ended, make another
`EngineProcess`.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from enum import StrEnum

import msgspec
import zmq
import zmq.asyncio

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineFailed
from penstock.engine.messages import (
    Failed,
    FromEngine,
    OnWire,
    Ready,
    Refused,
    StepReport,
)
from penstock.engine.model_info import ModelInfo
from penstock.engine.phases import LoadProgress

logger = logging.getLogger(__name__)

# Messages that are read before the event loop runs anything else. Where the server has fallen
# behind, each stream then sends the tokens of several steps in one event, which is how it catches
# up.
_MAX_MESSAGES_AT_ONCE = 32
_LAST_MESSAGE_S = 0.1  # from the end of the process to the arrival of what it sent before


class EngineState(StrEnum):
    """What the engine process is doing, as far as the server knows."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineProcess:
    """Starts the process, exchanges messages with it, watches it and ends it.

    Lives on one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        module: str,
        on_message: Callable[[LoadProgress | StepReport | Refused], None],
        on_end: Callable[[str], None],
    ) -> None:
        """module: what the process runs; it must use the protocol of `penstock.engine.ipc.process`.

        on_end is called once, with the reason, however the process ends; no message comes after.
        """
        self._config = config
        self._module = module
        self._on_message = on_message
        self._on_end = on_end
        self._state = EngineState.STARTING
        self._info: ModelInfo | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._beats: int | None = None  # the pipe from which the process's heartbeat is read
        self._last_beat_s = time.monotonic()
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._dead: asyncio.Future[str] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> ModelInfo:
        """Raises EngineFailed before the model is loaded."""
        if self._info is None:
            raise EngineFailed("the model is still loading")
        return self._info

    @property
    def pid(self) -> int | None:
        """None where there is no process, or it has ended."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    @property
    def silence_s(self) -> float:
        """Since the process last showed that it runs, which it does every second, whatever its
        steps take: a process that is stopped, or gets no processor, does not."""
        return time.monotonic() - self._last_beat_s

    async def start(self) -> ModelInfo:
        """Starts the process and returns when it is ready. Raises EngineFailed."""
        loop = asyncio.get_running_loop()
        self._ready, self._dead = loop.create_future(), loop.create_future()
        # An abstract socket has no file that a killed process could leave behind.
        endpoint = f"ipc://@penstock-{secrets.token_hex(16)}"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)  # no limit in flight; do not wait at the end
        # The same socket without asyncio, to read what has arrived at no further cost.
        self._arrived: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._beats, beats_of_engine = os.pipe()
        loop.add_reader(self._beats, self._on_beat)
        try:
            self._process = await self._spawn(endpoint, beats_of_engine)
        finally:
            os.close(beats_of_engine)
        # No file mode protects an abstract socket, so the kernel lets only this process connect.
        self._socket.setsockopt(zmq.IPC_FILTER_PID, self._process.pid)
        self._socket.bind(endpoint)  # before the process, which starts slowly, tries to connect
        assert self._process.stdin
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return await self._ready

    async def _spawn(self, endpoint: str, beats: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder named engine where the server was started must not be taken for ours
            "-m",
            self._module,
            endpoint,
            str(beats),
            stdin=asyncio.subprocess.PIPE,
            # A group of its own: a terminal's Ctrl-C does not reach it, and it can be ended with
            # the compiler that it may have started.
            start_new_session=True,
            pass_fds=(beats,),
            # Threads that spin while they wait take the core that the server needs.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ),
        )

    def send(self, message: OnWire) -> None:
        # No high-water mark, so this never blocks; the future is done when it returns.
        self._socket.send(self._encoder.encode(message))

    async def wait_dead(self) -> str:
        """Returns the reason when the process has ended without `close`."""
        assert self._dead, "call start() first"
        return await self._dead

    async def close(self) -> None:
        """Ends the process and closes its sockets."""
        self._end("the server is shutting down", is_expected=True)
        if not self._process:
            return
        for task in self._tasks:
            task.cancel()
        self.kill()
        await self._process.wait()
        self._socket.close()
        self._stop_beats()

    def kill(self) -> None:
        """Ends the process and those it started, now; it holds nothing that must be saved."""
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        try:
            await self._read_messages()
        except Exception as error:
            # Without its messages the process is of no use: it ends as one that failed.
            logger.exception("a message of the engine cannot be read")
            self._end(f"a message of the engine cannot be read: {type(error).__name__}: {error}")

    async def _read_messages(self) -> None:
        while True:
            self._receive(await self._socket.recv())
            with contextlib.suppress(zmq.Again):
                for _ in range(_MAX_MESSAGES_AT_ONCE - 1):
                    self._receive(self._arrived.recv(zmq.NOBLOCK))
            # While messages are waiting, recv returns at once and no other task would run.
            await asyncio.sleep(0)

    def _receive(self, data: bytes) -> None:
        message = self._decoder.decode(data)
        if isinstance(message, Ready):
            self._info, self._state = message.info, EngineState.READY
            assert self._ready
            self._ready.set_result(message.info)
        elif isinstance(message, Failed):
            self._end(message.message)
        else:
            self._on_message(message)

    def _on_beat(self) -> None:
        assert self._beats is not None
        if os.read(self._beats, 1 << 10):
            self._last_beat_s = time.monotonic()
        else:
            self._stop_beats()  # the process has ended

    def _stop_beats(self) -> None:
        if self._beats is not None:
            asyncio.get_running_loop().remove_reader(self._beats)
            os.close(self._beats)
            self._beats = None

    async def _watch(self) -> None:
        """The process may end without a `Failed` message: killed for memory, or by a signal."""
        assert self._process
        code = await self._process.wait()
        await asyncio.sleep(_LAST_MESSAGE_S)
        why = f"the engine process ended with code {code} and no message"
        if code == -signal.SIGKILL:
            why += (
                "; unless somebody killed it, the kernel did because memory ran out, which dmesg "
                "shows: lower --kv-cache-memory-bytes"
            )
        self._end(why)

    def _end(self, why: str, is_expected: bool = False) -> None:
        """Reports the end, once, to everyone who waits for the engine."""
        if self._state is EngineState.DEAD:
            return
        self._state = EngineState.DEAD
        self._on_end(why)
        if self._ready and not self._ready.done():
            self._ready.set_exception(EngineFailed(why))
        if self._dead and not self._dead.done() and not is_expected:
            self._dead.set_result(why)
