"""Which grammars the engine may have: those that compile in another process within limits.

A grammar can take all memory or overflow the stack, whatever its text looks like, and neither the
server nor the engine would survive it. So a few processes (checker_process.py) try each one first.
They start when the first grammars come. A verdict is cached, so a grammar is tried once. Clients
take turns, so that one with many grammars does not keep the processes from the others.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.client import BadGrammar, LoadFormat, ModelInfo
from penstock.server.config import bare_environment
from penstock.server.errors import GrammarQueueFull


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
        """Raises GrammarQueueFull where too many wait, most of them for this client, or it has
        waited for too long. The caller gives the turn back."""
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
                raise GrammarQueueFull from error
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
        have as many. Raises GrammarQueueFull."""
        longest = max(self._queues, key=lambda each: len(self._queues[each]), default=client)
        num_own = len(self._queues.get(client, ()))
        if num_own + 1 >= len(self._queues.get(longest, ())):
            raise GrammarQueueFull
        turn = self._queues[longest][-1]
        self._forget(longest, turn)
        if not turn.done():
            turn.set_exception(GrammarQueueFull())

    def _forget(self, client: str, turn: "asyncio.Future[None]") -> None:
        """If it still waits."""
        queue = self._queues.get(client)
        if queue and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[client]


logger = logging.getLogger("penstock")

NUM_PROCESSES = 2
# From when it is a grammar's turn. Its own CPU time is limited to less, so only an overloaded
# machine comes so far.
MAX_WALL_S = 15.0
MAX_START_S = 60.0  # a tokenizer of 150,000 tokens takes 1 s
# For its turn. A grammar that takes all the time there is takes 1.5 s of a CPU.
MAX_WAIT_S = 10.0
MAX_WAITING = 256
# Each takes at most 1.5 kB: an error has 300 characters.
_MAX_VERDICTS = 4096
# The second time is for a process that something else ended.
_NUM_TRIES = 2


class _Verdict(NamedTuple):
    error: str | None
    num_bytes: int


class _ProcessFailed(Exception):
    """It ended, did not answer in time, or lost a child to a signal that is not the grammar's."""


class GrammarChecker:
    """Compiles grammars for one model. Lives on one event loop; `close` ends the processes."""

    def __init__(self, directory: Path, model: ModelInfo, load_format: LoadFormat) -> None:
        self._model = json.dumps(
            {
                "directory": str(directory),
                "vocab_size": model.vocab_size,
                "eos_token_ids": model.eos_token_ids,
                "load_format": load_format,
            }
        )
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._turns = FairTurns(NUM_PROCESSES, max_waiting=MAX_WAITING, max_wait_s=MAX_WAIT_S)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._checks: set[asyncio.Task[_Verdict]] = set()

    async def check(self, grammar: str, client: str = "") -> int:
        """The bytes that it takes once it is compiled. client: whose turn it takes. Raises
        BadGrammar and GrammarQueueFull."""
        digest = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            await self._turns.take(client)
            # A client that disconnects ends the waiting, not the check, whose process is in use.
            check = asyncio.create_task(self._check(grammar, digest))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)
            verdict = await asyncio.shield(check)
        self._verdicts.move_to_end(digest)
        if verdict.error is not None:
            raise BadGrammar(verdict.error)
        return verdict.num_bytes

    async def close(self) -> None:
        """Requests that still wait get an error."""
        for process in self._all:
            process.kill()
        await asyncio.gather(*(process.wait() for process in self._all))

    async def _check(self, grammar: str, digest: bytes) -> _Verdict:
        try:
            # Others may have waited with the same grammar.
            verdict = self._verdicts.get(digest)
            if verdict is None:
                verdict = self._verdicts[digest] = await self._tried(grammar)
                if len(self._verdicts) > _MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            return verdict
        finally:
            self._turns.give_back()

    async def _tried(self, grammar: str) -> _Verdict:
        self._idle = [process for process in self._idle if process.is_alive]
        for _ in range(_NUM_TRIES):
            process = self._idle.pop() if self._idle else _Process()
            self._all.add(process)
            try:
                reply = await process.compile(self._model, grammar)
            except (_ProcessFailed, OSError) as error:
                self._all.discard(process)
                process.kill()
                logger.warning("a process that compiles grammars failed: %s", error)
                continue
            self._idle.append(process)
            return _Verdict(reply.get("error"), reply.get("bytes", 0))
        raise GrammarQueueFull


class _Process:
    """Starts with its first grammar; answers one at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def compile(self, model: str, grammar: str) -> dict[str, Any]:
        """Raises _ProcessFailed; then it must be killed."""
        if self._process is None:
            self._process = await _started(model)
            await self._reply(MAX_START_S)
        text = grammar.encode(errors="surrogatepass")
        assert self._process.stdin
        self._process.stdin.write(len(text).to_bytes(4, "little") + text)
        reply = await self._reply(MAX_WALL_S)
        if "killed" in reply:
            raise _ProcessFailed("something killed its child; did the memory run out?")
        return reply

    async def _reply(self, timeout_s: float) -> dict[str, Any]:
        assert self._process and self._process.stdout
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise _ProcessFailed(f"it did not answer within {timeout_s:.0f} s") from None
        if not line:
            raise _ProcessFailed("it ended")
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def wait(self) -> None:
        if self._process:
            await self._process.wait()

    def kill(self) -> None:
        """With its child. The event loop waits for it."""
        if self._process and self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _started(model: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "penstock.server.structured.checker_process", model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # a group of its own, to be killed with its child
        # One arena: glibc else maps 128 MiB for a second one, of what the child may map.
        env=bare_environment() | {"MALLOC_ARENA_MAX": "1"},
    )
