"""The process of a rank after the first: `python -m penstock.engine.ipc.rank DESCRIPTOR`.
`penstock.engine.executors.followers` starts it. DESCRIPTOR: of its channel to rank 0.

It computes its part of each step that it gets, and dies with the engine process.
"""

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from penstock.engine import logs
from penstock.engine.executors.followers import Channel, LastWords, Start, Step
from penstock.engine.log_writer import flush_all
from penstock.engine.parent_process import die_with_parent
from penstock.scheduler.errors import PenstockError

logger = logging.getLogger(__name__)


def main() -> None:
    """Never returns."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when the engine ends
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), Start | Step)
    why, code = "rank 0 has ended", 0
    try:
        _follow(channel)
    except EOFError:
        pass
    except PenstockError as error:
        why, code = str(error), 2
    except BaseException as error:
        logger.exception("a rank failed")
        why, code = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", 1
    if code:
        try:
            channel.send(LastWords(why))
        except OSError:
            logger.error("%s", why)  # rank 0 has ended, and this is why it did
    flush_all()
    os._exit(code)


def _follow(channel: Channel) -> None:
    """Until rank 0 ends. Raises EOFError then."""
    start = channel.receive()
    assert isinstance(start, Start), start
    config = start.config
    logs.configure(config.log_level, config.log_format)
    if config.log_level != "debug":  # rank 0 says the same
        logging.getLogger("penstock").setLevel(logging.ERROR)
    from penstock.engine.executors.cpu import CpuExecutor
    from penstock.engine.executors.parallel import join, wait_limit_s

    membership = join(config, start.store, start.rank)
    executor = CpuExecutor(
        config, Path(config.model), group=membership.tensor, pipeline=membership.pipeline
    )
    membership.everyone.barrier()
    membership.wait_at_most(wait_limit_s(config))
    gc.collect()
    gc.freeze()  # as rank 0 does
    receive = channel.receive if membership.pipeline is None else _ahead(channel)
    while True:
        step = receive()
        assert isinstance(step, Step), step
        executor.follow(step.batch, step.sampled)


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


if __name__ == "__main__":
    main()
