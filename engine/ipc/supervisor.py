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
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from penstock.engine.config import EngineConfig, GpuWay
from penstock.engine.errors import EngineFailed
from penstock.engine.process.linux import is_stopped
from penstock.engine.process.phases import LoadProgress
from penstock.engine.process.python_path import python_path
from penstock.engine.step.gpu_fault import HUNG
from penstock.engine.step.messages import Failed, FromEngine, FromLoop, OnWire, Ready
from penstock.engine.step.model_info import LoadedAdapter, ModelInfo

logger = logging.getLogger(__name__)

# Messages that are read before the event loop runs anything else. Where the server has fallen
# behind, each stream then sends the tokens of several steps in one event, which is how it catches
# up.
_MAX_MESSAGES_AT_ONCE = 32
_LAST_MESSAGE_S = 0.1  # from the end of the process to the arrival of what it sent before
_WRITE_BLOCKS_S = 5.0
_LAST_LINES_S = 2.0  # from its last message to its end, in which it writes its log
# From SIGKILL to the end of the process. It gives back its memory first, which for a large pool or
# a GPU takes seconds.
_END_S = 30.0


# These say more of who sent a signal than of the requests that ran.
_SIGNALS_OF_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EngineState(StrEnum):
    """The engine's state, as far as the server knows."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # its process ended, and another takes over the open requests
    DEAD = "dead"


class EndCause(StrEnum):
    """An engine process has ended by this."""

    CLOSED = "closed"  # the server is shutting down
    KILLED = "killed"  # a signal of somebody else
    STOPPED = "stopped"  # as SIGSTOP does, until the server ended it
    FAILED = "failed"  # an error, or a signal of the processor's
    STALLED = "stalled"  # no step ended, until the server ended it
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed it

    @property
    def may_be_a_request(self) -> bool:
        """Whether what it computed can have ended it."""
        return self in (EndCause.FAILED, EndCause.STALLED, EndCause.OUT_OF_MEMORY)


class End(NamedTuple):
    """why: for people, with what to do about it. failed_way: in which a GPU failed."""

    cause: EndCause
    why: str
    failed_way: GpuWay | None = None


class EngineProcess:
    """Starts the process, exchanges messages with it, watches it and ends it. Lives on one event
    loop."""

    def __init__(
        self,
        config: EngineConfig,
        module: str,
        on_message: Callable[[LoadProgress | FromLoop], None],
        on_end: Callable[[End], None],
        kv_memory: int | None = None,
    ) -> None:
        """module: what the process runs; it must use the protocol of `penstock.engine.ipc.process`.
        kv_memory: see `EngineConfig`; it stays open.

        on_end is called once, however the process ends; no message comes after.
        """
        self._config = replace(config, kv_memory=kv_memory)
        self._module = module
        self._on_message = on_message
        self._on_end = on_end
        self.state = EngineState.STARTING
        self.adapters: tuple[LoadedAdapter, ...] = ()  # when it was ready
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._beats: int | None = None  # the pipe from which the process's heartbeat is read
        self.last_beat_s = time.monotonic()
        self._socket: zmq.asyncio.Socket | None = None
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._way: GpuWay | None = None  # when it was ready
        self._is_ending = False  # it said so
        self._num_oom_kills = 0  # of the machine, when the process started
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

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
        return time.monotonic() - self.last_beat_s

    @property
    def is_stopped(self) -> bool:
        return self.pid is not None and is_stopped(self.pid)

    async def start(self) -> ModelInfo:
        """Starts the process and returns when it is ready. Raises EngineFailed. To be called once,
        and followed by `close` in any case."""
        self._ready = asyncio.get_running_loop().create_future()
        try:
            await self._launch()
        except (OSError, zmq.ZMQError) as error:
            why = f"the engine process cannot be started: {error.strerror or error}"
            self._end(End(EndCause.FAILED, why))
        return await self._ready

    async def _launch(self) -> None:
        self._num_oom_kills = _num_oom_kills()
        # An abstract socket has no file that a killed process could leave behind.
        endpoint = f"ipc://@penstock-{secrets.token_hex(16)}"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)  # no limit in flight; do not wait at the end
        # The same socket without asyncio, to read what has arrived at no further cost.
        self._arrived: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._beats, beats_of_engine = os.pipe()
        asyncio.get_running_loop().add_reader(self._beats, self._on_beat)
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

    async def _spawn(self, endpoint: str, beats: int) -> asyncio.subprocess.Process:
        kv_memory = self._config.kv_memory
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
            pass_fds=(beats,) if kv_memory is None else (beats, kv_memory),
            # Threads that spin while they wait take the core that the server needs.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ) | {"PYTHONPATH": python_path()},
        )

    def send(self, message: OnWire) -> None:
        # No high-water mark, so this never blocks; the future is done when it returns.
        assert self._socket, "call start() first"
        self._socket.send(self._encoder.encode(message))

    async def close(self) -> bool:
        """Ends the process and closes its sockets. Whether it has ended: one that waits for a
        device cannot, until that answers."""
        self._end(End(EndCause.CLOSED, "the server is shutting down"))
        for task in self._tasks:
            task.cancel()
        if self._process and self._is_ending:
            await self._ends_within(_LAST_LINES_S)
        elif self._process and self._process.stdin and self._config.kv_offload_dir is not None:
            # The end of its input: it writes the blocks that it still has to write, and ends.
            self._process.stdin.close()
            await self._ends_within(_WRITE_BLOCKS_S)
        self.kill()
        has_ended = await self._ends_within(_END_S)
        if self._process and not has_ended:
            logger.error(
                "process %d was killed %g s ago and has not ended, as it waits for a device or a "
                "file system; it is left behind",
                self._process.pid,
                _END_S,
            )
        if self._socket:
            self._socket.close()
        self._stop_beats()
        return has_ended

    async def _ends_within(self, seconds: float) -> bool:
        """Waits for the end of the process, if there is one, for at most this long."""
        with contextlib.suppress(TimeoutError):
            if self._process:
                await asyncio.wait_for(self._process.wait(), seconds)
            return True
        return False

    def kill(self) -> None:
        """Ends the process and those it started, now; it holds nothing that must be saved."""
        if self._process and self._process.returncode is None:
            self._kill_group()

    def end_stalled(self, stall_s: float) -> None:
        """Ends a process that has done nothing for this long. The caller closes it."""
        why = f"the engine did nothing for {stall_s:.0f} s"
        cause = EndCause.STALLED
        if self.is_stopped:
            why += ", because its process was stopped, as SIGSTOP or a debugger does"
            cause = EndCause.STOPPED
        self.kill()
        self._end(End(cause, why, self._way if cause is EndCause.STALLED else None))

    def _kill_group(self) -> None:
        assert self._process
        # A group outlives its first process, and its number is not given away before its end.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        try:
            await self._read_messages()
        except Exception as error:
            # Without its messages the process is of no use: it ends as one that failed.
            logger.exception("a message of the engine cannot be read")
            why = f"a message of the engine cannot be read: {type(error).__name__}: {error}"
            self._end(End(EndCause.FAILED, why))

    async def _read_messages(self) -> None:
        assert self._socket
        while self.state is not EngineState.DEAD:
            self._receive(await self._socket.recv())
            with contextlib.suppress(zmq.Again):
                for _ in range(_MAX_MESSAGES_AT_ONCE - 1):
                    self._receive(self._arrived.recv(zmq.NOBLOCK))
            # While messages are waiting, recv returns at once and no other task would run.
            await asyncio.sleep(0)

    def _receive(self, data: bytes) -> None:
        if self.state is EngineState.DEAD:
            return
        message = self._decoder.decode(data)
        if isinstance(message, Ready):
            self.state = EngineState.READY
            self.adapters = message.adapters
            self._way = message.info.gpu_way
            assert self._ready
            self._ready.set_result(message.info)
        elif isinstance(message, Failed):
            self._is_ending = True
            cause, failed_way = EndCause.FAILED, message.failed_way
            if message.signal is not None:
                cause = self._cause_of(message.signal)
            if message.signal == HUNG:
                failed_way = self._config.gpu_way
            self._end(End(cause, message.message, failed_way))
        else:
            self._on_message(message)

    def _on_beat(self) -> None:
        assert self._beats is not None
        if os.read(self._beats, 1 << 10):
            self.last_beat_s = time.monotonic()
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
        self._kill_group()  # a compiler that it started, say
        await asyncio.sleep(_LAST_MESSAGE_S)
        self._end(self._end_of(code))

    def _end_of(self, code: int) -> End:
        """code: negative for a signal."""
        if code == -HUNG:
            why = "the GPU did not finish a small step; the log has where the engine waited for it"
            return End(EndCause.STALLED, why, self._config.gpu_way)
        why = f"the engine process ended with code {code} and no message"
        cause = self._cause_of(-code)
        if cause is EndCause.OUT_OF_MEMORY:
            why += "; the kernel killed it because memory ran out: lower --kv-cache-memory-bytes"
        elif code == -signal.SIGKILL:
            why += (
                "; unless somebody killed it, the kernel did because memory ran out, which dmesg "
                "shows: lower --kv-cache-memory-bytes"
            )
        elif code == -signal.SIGBUS:
            why += (
                "; a file that it reads as memory became shorter or cannot be read, such as one of "
                "the model that is still copied, or the memory for it ran out, as in /dev/shm"
            )
        return End(cause, why)

    def _cause_of(self, number: int) -> EndCause:
        """number: of a signal that ended a process of the engine, or SIGSTOP."""
        if number == signal.SIGSTOP:
            return EndCause.STOPPED
        if number == signal.SIGKILL and _num_oom_kills() > self._num_oom_kills:
            return EndCause.OUT_OF_MEMORY
        return EndCause.KILLED if number in _SIGNALS_OF_OTHERS else EndCause.FAILED

    def _end(self, end: End) -> None:
        """Reports the end, once, to everyone who waits for the engine."""
        if self.state is EngineState.DEAD:
            return
        self.state = EngineState.DEAD
        self._on_end(end)
        if self._ready and not self._ready.done():
            self._ready.set_exception(EngineFailed(end.why))


def _num_oom_kills() -> int:
    """Processes that the kernel has killed for memory, since this machine started."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
