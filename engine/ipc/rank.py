"""The process of a rank after the first: `python -m penstock.engine.ipc.rank DESCRIPTOR`.
`penstock.engine.executors.followers` starts it. DESCRIPTOR: of its channel to rank 0.

It computes its part of each step that it gets, and dies with the engine process.
"""

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from penstock.engine.executors.followers import Channel, FromRank0, LastWords, Step
from penstock.engine.process import logs
from penstock.engine.process.garbage import importing
from penstock.engine.process.linux import die_with_parent
from penstock.engine.process.logs import flush_all
from penstock.engine.step.adapter_commands import answer_to
from penstock.engine.step.executor import AdapterStore
from penstock.engine.step.gpu_fault import first_line
from penstock.engine.step.messages import LoadAdapter, UnloadAdapter
from penstock.engine.step.model_info import LoadedAdapter
from penstock.scheduler.errors import PenstockError

logger = logging.getLogger(__name__)


def main() -> None:
    """Never returns."""
    die_with_parent()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), FromRank0)
    try:
        _follow(channel)
    except EOFError:  # rank 0 has ended
        flush_all()
        os._exit(0)
    except BaseException as error:
        _end(channel, error)


def _follow(channel: Channel) -> None:
    """Until rank 0 ends. Raises EOFError then."""
    with importing():
        import torch  # noqa: F401  (which takes a second, while rank 0 does the same)

    start = channel.receive_start()
    config = start.config
    logs.configure(config.log_level, config.log_format)
    if config.log_level != "debug":  # rank 0 says the same
        logging.getLogger("penstock").setLevel(logging.ERROR)
    with importing():
        from penstock.engine.loading.ranks import follow

    compute, adapters = follow(start, partial(_end, channel))
    gc.collect()
    gc.freeze()  # as rank 0 does
    receive = channel.receive if config.pipeline_parallel_size == 1 else _ahead(channel)
    while True:
        message = receive()
        if isinstance(message, Step):
            compute(message)
        elif isinstance(message, LoadAdapter):
            _load(message, adapters, channel)
        elif isinstance(message, UnloadAdapter):
            adapters.unload(message.adapter_id)
        else:
            raise AssertionError(message)


def _load(command: LoadAdapter, store: AdapterStore, channel: Channel) -> None:
    """In the background, and answers."""

    def answer(loaded: "Future[LoadedAdapter]") -> None:
        try:
            message = answer_to(command.number, loaded)
        except BaseException as error:
            _end(channel, error)
        else:
            channel.send(message)

    store.load(command.source).add_done_callback(answer)


def _ahead(channel: Channel) -> Callable[[], object]:
    """As `channel.receive`. What comes is read at once: rank 0 may send a step while this rank
    computes the one before, and each would wait for the other where that needs both."""
    received: SimpleQueue[object] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                received.put(channel.receive())
        except BaseException as error:
            received.put(error)

    threading.Thread(target=read, daemon=True).start()

    def receive() -> object:
        message = received.get()
        if isinstance(message, BaseException):
            raise message
        return message

    return receive


def _end(channel: Channel, error: BaseException) -> None:
    """Says why this rank ends, and ends it, whatever its other threads wait for."""
    if isinstance(error, PenstockError):
        why, code = str(error), 2
    else:
        logger.error("a rank failed", exc_info=error)
        why, code = first_line(error), 1
    try:
        channel.send(LastWords(why, getattr(error, "failed_way", None)))
    except OSError:
        logger.error("%s", why)  # rank 0 has ended, and this is why it did
    flush_all()
    os._exit(code)


if __name__ == "__main__":
    main()
