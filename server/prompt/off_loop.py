"""Where text is rendered and tokenized: on the event loop if that is quick, else in a thread.

Tokenizing takes 130 times the text in memory, and a second for each megabyte. So only so many
characters are worked on at one time, and long texts have threads of their own: shorter ones never
wait for them.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

# Work on a text this short takes less time than handing it to a thread.
INLINE_CHARS = 2000
_LONG_CHARS = 1 << 16
# All long texts together have no more: half a gigabyte of memory while they are tokenized.
_MAX_CHARS_AT_ONCE = 1 << 22

T = TypeVar("T")
Result = TypeVar("Result")


class LongTexts:
    """Threads for long texts, which begin in their order, as many together as max_chars allows. One
    that is longer runs alone. Used by one event loop."""

    def __init__(self, max_chars: int = _MAX_CHARS_AT_ONCE) -> None:
        self._max_chars = max_chars
        self._num_chars = 0  # of those that run
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        num_threads = max(1, (os.cpu_count() or 1) // 2)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="long-text")

    async def run(self, work: Callable[[T], Result], text: T, num_chars: int) -> Result:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append((num_chars, turn))
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(num_chars)
            raise

        def end(_: Future[Result]) -> None:
            loop.call_soon_threadsafe(self._end, num_chars)

        # Not when the request is cancelled: its thread runs to the end.
        running = self._threads.submit(copy_context().run, work, text)  # what it logs has an id
        running.add_done_callback(end)
        return await asyncio.wrap_future(running)

    def _begin_next(self) -> None:
        while self._waiting:
            num_chars, turn = self._waiting[0]
            if self._num_chars and self._num_chars + num_chars > self._max_chars:
                return
            self._waiting.popleft()
            if not turn.cancelled():
                self._num_chars += num_chars
                turn.set_result(None)

    def _end(self, num_chars: int) -> None:
        self._num_chars -= num_chars
        self._begin_next()


_LONG_TEXTS = LongTexts()


async def off_loop(work: Callable[[T], Result], text: T, num_chars: int) -> Result:
    """Returns what `work` makes of the text, whose length is num_chars."""
    if num_chars <= INLINE_CHARS:
        return work(text)
    if num_chars <= _LONG_CHARS:
        return await asyncio.to_thread(work, text)
    return await _LONG_TEXTS.run(work, text, num_chars)
