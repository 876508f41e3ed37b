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
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NoReturn

import msgspec
import zmq

from penstock.engine.config import DraftMethod, Dtype, EngineConfig, SpeculativeConfig
from penstock.engine.ipc.kv_events import KVEventPublisher
from penstock.engine.loading.executor import build_executor
from penstock.engine.process import logs
from penstock.engine.process.linux import die_with_parent
from penstock.engine.process.logs import flush_all
from penstock.engine.process.phases import Phases
from penstock.engine.step.adapter_commands import load_first
from penstock.engine.step.executor import Executor
from penstock.engine.step.gpu_fault import GpuWayFailed, first_line, is_gpu_fault
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import (
    Failed,
    FromEngine,
    OnWire,
    RatesMeasured,
    Ready,
    SubmitAlike,
    ToEngine,
)
from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.step_times import first_step_model
from penstock.scheduler.cache.kv_events import KVEvents
from penstock.scheduler.cache.tier import BlockTier, TierBlock
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.drafts.sources import FinishedAnswers, OwnText, Prediction, Source
from penstock.scheduler.errors import InvalidConfig, PenstockError
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.policy.forecast import prefill_s
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
        """See `penstock.engine.step.loop.Inbox`."""
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


def serve(
    config: EngineConfig, pipe: Pipe, build: BuildExecutor, at_end: list[Callable[[], object]]
) -> None:
    """Loads, sends `Ready`, and steps until the process is ended from outside or by an error.
    at_end: gets what is to be done where the server ends it."""
    executor = build(config, Phases(pipe.send))
    if (followers := getattr(executor, "followers", None)) is not None:
        pipe.watch(followers.news, followers.check)
    info = executor.info
    step_model = LiveStepModel(info, first_step_model(config, info))
    # A step that is recorded must have been computed, not only launched.
    assert not (executor.journals and info.runs_ahead), executor
    if executor.tier is not None:
        at_end.append(executor.tier.flush)
    events = None if config.kv_events is None else KVEvents(info.block_size)
    send = pipe.send if events is None else _publishing(pipe.send, config, info, events)
    scheduler = Scheduler(
        replace(config.scheduler, enable_prefix_caching=False)
        if info.computes_whole
        else config.scheduler,
        groups=info.kv_groups,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        journals=executor.journals,
        tier=executor.tier,
        events=events,
        step_model=step_model,
        num_cohorts=info.pipeline_parallel_size,
        computes_whole=info.computes_whole,
        drafter=_drafter(config, info, step_model),
        encoder=info.encoder_costs,
    )
    if executor.tier is not None:
        _log_what_loading_takes(executor.tier, step_model, info)
    adapters = load_first(executor.adapters, config.lora)
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection during a step needs to visit it
    pipe.send(Ready(info, adapters))
    when_idle = _measurement(info) if info.rates_are_doubtful else None
    loop = EngineLoop(scheduler, executor, pipe, send, step_model=step_model, when_idle=when_idle)
    try:
        loop.run()
    except Exception as error:
        if info.gpu_way is None or not is_gpu_fault(error):
            raise
        logger.exception("the engine failed")
        raise GpuWayFailed(info.gpu_way, first_line(error)) from error


def _drafter(config: EngineConfig, info: ModelInfo, step_model: LiveStepModel) -> Drafter | None:
    """Raises InvalidConfig where drafts were asked for that cannot be verified."""
    wanted = config.speculative or SpeculativeConfig()
    if not wanted.num_speculative_tokens:
        return None
    if not info.takes_drafts:
        if config.speculative is None:
            return None
        raise InvalidConfig(
            "--speculative-config needs the compiled step of a CPU, and where a model has "
            "recurrent layers neither stages nor several ranks with --kv-offload-dir; or one GPU, "
            "--attention-backend triton and a model without recurrent layers; leave it out"
        )
    sources: list[Source] = [Prediction(), OwnText()]
    if wanted.method is not DraftMethod.NGRAM:
        sources.append(FinishedAnswers())
    return Drafter(
        sources, wanted.num_speculative_tokens, step_model, info.proposes, info.draft_limits
    )


def _measurement(info: ModelInfo) -> Callable[[], RatesMeasured | None]:
    """Measures again what the machine can do, when there is nothing else to do."""
    from penstock.engine.memory.dtypes import TORCH_DTYPES
    from penstock.engine.memory.measured_rates import processor_meter

    meter = processor_meter(TORCH_DTYPES[Dtype(info.dtype)])

    def measure() -> RatesMeasured | None:
        if (rates := meter.when_idle()) is None:
            return None
        return RatesMeasured(rates.measured_bandwidth_bytes_per_s, rates.measured_flops_per_s)

    return measure


def _publishing(
    send: Callable[[FromEngine], None], config: EngineConfig, info: ModelInfo, events: KVEvents
) -> Callable[[FromEngine], None]:
    """`send` with the events of a step beside its report."""
    assert config.kv_events is not None
    publisher = KVEventPublisher(config.kv_events, info.kv_groups, info.block_size)

    def send_and_publish(message: FromEngine) -> None:
        send(message)
        publisher.publish(events.take())

    return send_and_publish


def _log_what_loading_takes(tier: BlockTier, step_model: LiveStepModel, info: ModelInfo) -> None:
    """Each prompt decides for itself, by what was measured until then; this is for people."""
    num_tokens = min(1024, info.max_model_len)
    num_blocks = num_tokens // info.block_size
    nowhere = [
        TierBlock(number, b"")
        for number, group in enumerate(info.kv_groups)
        for _ in range(num_blocks if isinstance(group, KVGroup) else 1)
    ]
    load_s = tier.load_s(nowhere)
    compute_s = prefill_s(step_model, 0, num_tokens, num_tokens)
    computing = "" if compute_s is None else f", and to compute them about {compute_s * 1e3:.0f} ms"
    logger.info(
        "to read the blocks of %d tokens takes about %.0f ms%s", num_tokens, load_s * 1e3, computing
    )


def main(build: BuildExecutor = build_executor) -> None:
    """Never returns."""
    die_with_parent()
    pipe = Pipe(sys.argv[1])
    try:
        config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
        at_end: list[Callable[[], object]] = []
        threading.Thread(target=_exit_at_end_of_input, args=(at_end,), daemon=True).start()
        threading.Thread(target=_beat, args=(int(sys.argv[2]),), daemon=True).start()
        logs.configure(config.log_level, config.log_format)
        serve(config, pipe, build, at_end)
    except PenstockError as error:
        signal_of_rank = getattr(error, "signal", None)
        _end(pipe, Failed(str(error), signal_of_rank, getattr(error, "failed_way", None)), 2)
    except BaseException as error:
        logger.exception("the engine failed")
        _end(pipe, Failed(first_line(error)), 1)


def _end(pipe: Pipe, failed: Failed, code: int) -> NoReturn:
    """Exits at once: what Python frees and waits for at its exit may hang on a GPU that failed."""
    pipe.send(failed)
    pipe.close()
    flush_all()
    os._exit(code)


def _exit_at_end_of_input(at_end: list[Callable[[], object]]) -> None:
    while sys.stdin.buffer.read(1):
        pass
    for each in at_end:
        each()
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
