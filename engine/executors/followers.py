"""`Followers`: the processes of the ranks after the first, which rank 0 starts, tells what to
compute, and watches.

They end with rank 0, whatever ends that: the kernel kills them. And where one of them ends or is
stopped, nobody goes on waiting for it.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import msgspec

from penstock.engine.config import AdapterSource, EngineConfig
from penstock.engine.errors import AdapterRefused
from penstock.engine.executors.awaited_ids import StepIds
from penstock.engine.process.linux import is_stopped
from penstock.engine.process.python_path import python_path
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.step.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from penstock.scheduler.types import ScheduledBatch

logger = logging.getLogger(__name__)

_MODULE = "penstock.engine.ipc.rank"
_LENGTH = struct.Struct("<Q")
_LOOK_INTERVAL_S = 0.25
# A rank that is stopped for so long while others wait for it will not come.
_STOPPED_S = 3.0
# From a broken channel to the news of its process's end.
_NEWS_S = 5.0


def layout_of(config: EngineConfig) -> RankLayout:
    return RankLayout(config.tensor_parallel_size, config.pipeline_parallel_size)


class Start(msgspec.Struct, tag=True, frozen=True):
    """To a rank, first: what it is. memory: the descriptors of what the ranks share, in the process
    that has them: where each has a GPU, of `penstock.engine.ranks.rendezvous` and of
    `penstock.engine.ranks.board`; else of `penstock.engine.ranks.membership`, and then its pools.
    """

    config: EngineConfig
    rank: int
    on_gpus: bool
    memory: tuple[int, ...]

    @property
    def layout(self) -> RankLayout:
        return layout_of(self.config)


class Step(msgspec.Struct, tag=True, frozen=True):
    """To a rank: compute your part. sampled: of the steps that rank 0 has completed since the last
    message, in their order."""

    batch: ScheduledBatch
    sampled: Sequence[StepIds]


# Of an adapter each rank reads its part, one after another, so the commands have no numbers.
FromRank0 = Start | Step | LoadAdapter | UnloadAdapter


class LastWords(msgspec.Struct, tag=True, frozen=True):
    """From a rank: why it ends. failed_way: see `RankFailed`."""

    why: str
    failed_way: str | None = None


class Channel:
    """A stream of messages between two processes. One thread receives."""

    def __init__(self, stream: socket.socket, kind: Any) -> None:
        """kind: of the messages that are received."""
        self._stream = stream
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError where nobody will receive it."""
        with self._sending:
            data = self._encoder.encode(message)
            self._stream.sendall(_LENGTH.pack(len(data)) + data)

    def send_start(self, start: Start) -> None:
        """With its descriptors. Raises OSError."""
        self.send(start)
        socket.send_fds(self._stream, [b"."], start.memory)

    def receive_start(self) -> Start:
        """With this process's own descriptors. Raises EOFError."""
        start = self.receive()
        assert isinstance(start, Start), start
        _, descriptors, _, _ = socket.recv_fds(self._stream, 1, len(start.memory))
        return msgspec.structs.replace(start, memory=tuple(descriptors))

    def receive(self) -> Any:
        """Raises EOFError when the other side has ended."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._decoder.decode(self._read(size))

    def shut(self) -> None:
        """Nobody waits for the other side any more."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._stream.close()

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            with contextlib.suppress(ConnectionError):
                if num_bytes := self._stream.recv_into(view):
                    view = view[num_bytes:]
                    continue
            raise EOFError
        return bytes(data)


class _Follower:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": python_path()},
            )
        self.channel = Channel(ours, LastWords | AdapterLoaded)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.stopped_s = 0.0
        self.last_words: LastWords | None = None
        self.answers: SimpleQueue[AdapterLoaded | None] = SimpleQueue()
        """None once there will be no more."""
        self.receiver = threading.Thread(target=self._receive, daemon=True)
        self.receiver.start()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, msgspec.DecodeError):
            while True:
                message = self.channel.receive()
                if isinstance(message, AdapterLoaded):
                    self.answers.put(message)
                else:
                    self.last_words = message
        self.answers.put(None)


class Followers:
    """Ranks 1 and up. All but the watching and the loading of adapters is done in one thread.

    Their processes import torch, which takes seconds, until `begin` says what they are: so rank 0
    starts them before it imports torch itself.
    """

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._followers = [_Follower(rank) for rank in range(1, layout.size)]
        self._failed: RankFailed | None = None
        self._has_failed = threading.Event()
        self._on_end: Callable[[int], None] = lambda _: None
        self.is_waiting = False
        """Whether a step is under way, so that one that is stopped holds it up."""
        self.news = os.eventfd(0, os.EFD_CLOEXEC)
        """A descriptor that can be read once a rank has failed."""
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._followers]

    def begin(self, start: Start) -> None:
        """Once, before anything is sent. start: of rank 0. Raises RankFailed."""
        for each in self._followers:
            with contextlib.suppress(OSError):  # one that has ended is noticed by whoever waits
                each.channel.send_start(msgspec.structs.replace(start, rank=each.rank))

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Calls back in another thread, with the rank, when one has failed."""
        self._on_end = callback
        if self._failed is not None:
            callback(self._failed.rank)

    def send(self, message: Step | LoadAdapter | UnloadAdapter) -> None:
        """To all. Raises RankFailed."""
        self.check()
        try:
            for each in self._followers:
                each.channel.send(message)
        except OSError:
            self._has_failed.wait(_NEWS_S)
            self.check()
            raise

    def load_adapter(self, source: AdapterSource) -> None:
        """See `OtherRanks`. In one thread at a time, which may be another one than that which sends
        steps."""
        self.send(LoadAdapter(0, source))
        answers = [each.answers.get() for each in self._followers]  # of all, also after an error
        refusals = []
        for answer in answers:
            if answer is None:
                self._has_failed.wait(_NEWS_S)
                self.check()
                raise AdapterRefused("a rank ended meanwhile; try again")
            if answer.adapter is None:
                refusals.append(answer.message)
        if refusals:
            assert source.id is not None, source
            self.unload_adapter(source.id)
            raise AdapterRefused(refusals[0])

    def unload_adapter(self, adapter_id: str) -> None:
        """See `OtherRanks`."""
        self.send(UnloadAdapter(adapter_id))

    def check(self) -> None:
        """Raises RankFailed if a rank has failed."""
        if self._failed is not None:
            raise self._failed

    def explained(self, error: RankFailed) -> RankFailed:
        """error: of a collective. With what is known of the rank's end."""
        failed = self._failed
        if failed is None:
            return error
        failed_way = failed.failed_way
        why = f"{failed}: {error}"
        return RankFailed(why, rank=failed.rank, signal=failed.signal, failed_way=failed_way)

    def close(self) -> None:
        """Ends them now."""
        for each in self._followers:
            each.process.kill()
        for each in self._followers:
            each.process.wait()
            each.receiver.join()
            each.channel.close()

    def _watch(self) -> None:
        poll = select.poll()
        by_pidfd = {each.pidfd: each for each in self._followers}
        for pidfd in by_pidfd:
            poll.register(pidfd, select.POLLIN)
        looked_at_s = time.monotonic()
        while self._failed is None:
            ended = poll.poll(_LOOK_INTERVAL_S * 1000)
            now_s = time.monotonic()
            # As `penstock.engine.ipc.stall.Silence`: while this process was stopped it saw nothing.
            elapsed_s = min(now_s - looked_at_s, 2 * _LOOK_INTERVAL_S)
            looked_at_s = now_s
            for pidfd, _ in ended[:1]:
                follower = by_pidfd[pidfd]
                self._fail(_end_of(follower, self._layout.name_of(follower.rank)))
            for each in self._followers:
                is_held_up = self.is_waiting and is_stopped(each.process.pid)
                each.stopped_s = each.stopped_s + elapsed_s if is_held_up else 0.0
                if each.stopped_s > _STOPPED_S:
                    name = self._layout.name_of(each.rank)
                    why = f"{name} was stopped, as SIGSTOP or a debugger does"
                    self._fail(RankFailed(why, rank=each.rank, signal=signal.SIGSTOP))

    def _fail(self, failed: RankFailed) -> None:
        if self._failed is not None:
            return
        self._failed = failed
        self._on_end(failed.rank)
        for each in self._followers:
            each.channel.shut()
        self._has_failed.set()
        os.eventfd_write(self.news, 1)


def _end_of(follower: _Follower, name: str) -> RankFailed:
    """Tells how a follower's process ended."""
    code, rank = follower.process.wait(), follower.rank
    if code < 0:
        why = f"{name} was ended by signal {-code}"
        if code == -signal.SIGKILL:
            why += (
                ", by somebody or by the kernel because memory ran out, which dmesg shows: then "
                "lower --kv-cache-memory-bytes"
            )
        return RankFailed(why, rank=rank, signal=-code)
    follower.receiver.join(_NEWS_S)
    if (words := follower.last_words) is None:
        return RankFailed(f"{name} ended with code {code}", rank=rank)
    return RankFailed(f"{name} failed: {words.why}", rank=rank, failed_way=words.failed_way)
