"""The engine process: `python -m penstock.engine.ipc.process ENDPOINT HEARTBEAT < config`.
`penstock.engine.ipc.client` starts it. HEARTBEAT: the descriptor of a pipe.

It dies with its parent, in two ways: the kernel kills it (PR_SET_PDEATHSIG), and where that does
not work (another system, or before it is set) its standard input ends. Its last message to the
parent says why it ends.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from penstock.engine import logs
from penstock.engine.adapter_commands import load_first
from penstock.engine.config import EngineConfig
from penstock.engine.executor import Executor
from penstock.engine.log_writer import flush_all
from penstock.engine.loop import EngineLoop
from penstock.engine.messages import Failed, FromEngine, OnWire, Ready, SubmitAlike, ToEngine
from penstock.engine.models.fallback.source import TransformersClass
from penstock.engine.parent_process import die_with_parent
from penstock.engine.phases import Phases
from penstock.engine.step_times import first_step_model
from penstock.scheduler.errors import InvalidConfig, PenstockError
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step_model.live import LiveStepModel

logger = logging.getLogger(__name__)

BuildExecutor = Callable[[EngineConfig, Phases], Executor]

_HEARTBEAT_INTERVAL_S = 1.0


class Pipe:
    """Both directions of the socket to the server process."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # never drop, never block: the server always reads
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms for the last message to be sent
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(OnWire)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._on_news: Callable[[], None] = lambda: None

    def watch(self, descriptor: int, on_news: Callable[[], None]) -> None:
        """Whoever waits for commands also waits until the descriptor can be read, and then calls
        on_news, which may raise."""
        self._poller.register(descriptor, zmq.POLLIN)
        self._on_news = on_news

    def send(self, message: FromEngine) -> None:
        """Called by one thread at a time; `Phases` sees to it while several threads load."""
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        """See `penstock.engine.loop.Inbox`."""
        if timeout_s != 0:
            timeout_ms = None if timeout_s is None else round(timeout_s * 1000)
            if not self._poller.poll(timeout_ms):
                return
            self._on_news()
        while True:
            try:
                message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, SubmitAlike):
                yield from message.each()
            else:
                yield message

    def close(self) -> None:
        self._socket.close()
        zmq.Context.instance().term()


def build_executor(config: EngineConfig, phases: Phases) -> Executor:
    """The executor of this config, its model loaded. Raises PenstockError."""
    if config.scripted:
        if config.tensor_parallel_size > 1:
            raise InvalidConfig("--tensor-parallel-size: the scripted engine has no model to split")
        from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
        from penstock.engine.memory.kept import KeptMemory, identity_of
        from penstock.engine.models.implementation import read_model
        from penstock.engine.sampling.grammar import Grammars
        from penstock.engine.sampling.grammar_table import GrammarTable

        model = read_model(Path(config.model), config.model_impl)
        info = scripted_info(
            vocab_size=model.vocab_size,
            max_model_len=config.max_model_len or model.max_model_len,
            block_size=config.block_size or 16,
            eos_token_ids=model.eos_token_ids,
        )
        grammars = Grammars.of_model(
            Path(config.model), info.vocab_size, info.eos_token_ids, config.load_format
        )
        table = GrammarTable(grammars, config.scheduler.max_num_seqs, info.vocab_size)
        kept = None
        if config.kv_memory is not None:
            kept = KeptMemory(config.kv_memory, identity_of(Path(config.model), info.block_size))
        return ScriptedExecutor(info, grammars=table, step_s=config.scripted_step_s, kept=kept)
    with phases.timed("import", "importing torch"):
        from penstock.engine.executors.loading import choose_device
        from penstock.engine.models.implementation import find_implementation

        device = choose_device(config.device)
        implementation = find_implementation(Path(config.model), config.model_impl)
    if config.tensor_parallel_size > 1:
        if isinstance(implementation, TransformersClass):
            raise InvalidConfig(
                f"--tensor-parallel-size {config.tensor_parallel_size}: a model that transformers' "
                "class computes cannot be split; use --tensor-parallel-size 1, or another model"
            )
        if device.type == "cuda":
            raise InvalidConfig(
                f"--tensor-parallel-size {config.tensor_parallel_size}: several GPUs are not "
                "supported yet; use --device cpu, or one GPU, whose memory holds more with "
                "--quantization int8 or int4"
            )
        from penstock.engine.executors.parallel import build_parallel_executor

        return build_parallel_executor(config, phases)
    if isinstance(implementation, TransformersClass):
        from penstock.engine.executors.transformers import TransformersExecutor

        return TransformersExecutor(config, Path(config.model), phases)
    if device.type == "cuda":
        from penstock.engine.executors.cuda.setup import build_cuda_executor

        return build_cuda_executor(config, Path(config.model), phases=phases)
    from penstock.engine.executors.cpu import CpuExecutor

    return CpuExecutor(config, Path(config.model), phases)


def serve(config: EngineConfig, pipe: Pipe, build: BuildExecutor) -> None:
    """Loads, sends `Ready`, and steps until the process is ended from outside or by an error."""
    executor = build(config, Phases(pipe.send))
    if (followers := getattr(executor, "followers", None)) is not None:
        pipe.watch(followers.news, followers.check)
    info = executor.info
    step_model = LiveStepModel(info, first_step_model(config, info))
    # What is recorded must have been computed, not only launched.
    assert not (executor.journals and executor.runs_ahead), executor
    scheduler = Scheduler(
        config.scheduler,
        groups=info.kv_groups,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        journals=executor.journals,
        step_model=step_model,
    )
    adapters = load_first(executor.adapters, config.lora)
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection during a step needs to visit it
    pipe.send(Ready(info, adapters))
    EngineLoop(scheduler, executor, pipe, pipe.send, step_model=step_model).run()


def main(build: BuildExecutor = build_executor) -> None:
    """Never returns."""
    die_with_parent()
    # The terminal and some service managers signal the whole process group. The server decides
    # when the engine ends, because it may have requests to finish first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Pipe(sys.argv[1])
    try:
        config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
        threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
        threading.Thread(target=_beat, args=(int(sys.argv[2]),), daemon=True).start()
        logs.configure(config.log_level, config.log_format)
        serve(config, pipe, build)
    except PenstockError as error:
        _end(pipe, str(error), 2, signal_of_rank=getattr(error, "signal", None))
    except BaseException as error:
        logger.exception("the engine failed")
        # The further lines of a CUDA error are for the log alone.
        first_line = str(error).strip().partition("\n")[0]
        _end(pipe, f"{type(error).__name__}: {first_line}", 1)


def _end(pipe: Pipe, why: str, code: int, signal_of_rank: int | None = None) -> NoReturn:
    """Exits at once: what Python frees and waits for at its exit may hang on a GPU that failed."""
    pipe.send(Failed(why, signal_of_rank))
    pipe.close()
    flush_all()
    os._exit(code)


def _exit_at_end_of_input() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


def _beat(pipe: int) -> None:
    """Shows the server that this process runs, whatever its steps take."""
    os.set_blocking(pipe, False)
    while True:
        with contextlib.suppress(OSError):  # a server that is stopped reads nothing
            os.write(pipe, b".")
        time.sleep(_HEARTBEAT_INTERVAL_S)


if __name__ == "__main__":
    main()
