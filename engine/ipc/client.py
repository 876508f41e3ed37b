"""`EngineClient`: an engine process, the streams of its requests, and what starts another process
when the first has ended, joined for the server."""

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.engine.config import EngineConfig, GpuWay
from penstock.engine.errors import EngineFailed, RequestRefused
from penstock.engine.ipc.adapters import AdapterTable
from penstock.engine.ipc.recovery import Recovery, RestartBudget
from penstock.engine.ipc.stall import Silence, stall_limit_s
from penstock.engine.ipc.streams import OpenStreams, OutputStream
from penstock.engine.ipc.supervisor import End, EndCause, EngineProcess, EngineState
from penstock.engine.memory.pool.kv_memory import make_descriptor
from penstock.engine.process.phases import LoadProgress
from penstock.engine.step.messages import (
    Abort,
    Accepted,
    AdapterLoaded,
    FromLoop,
    OnWire,
    RatesMeasured,
    Refused,
    StepReport,
)
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.config import Policy
from penstock.scheduler.errors import TargetOutOfReach
from penstock.scheduler.types import Request

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.5  # of the check for a stall


class EngineClient:
    """Starts the engine process, submits requests and returns their outputs. On one event loop.

    A process that ends after it was ready, or stalls, is replaced by another, and streams go on
    (see `penstock.engine.ipc.recovery`).
    """

    def __init__(self, config: EngineConfig, module: str = "penstock.engine.ipc.process") -> None:
        self._config = config
        self._module = module
        self._kv_memory: int | None = None
        self.adapters = AdapterTable(config.lora, self._send, self._check_up)
        self.state = EngineState.STARTING
        self.streams = OpenStreams(
            config.scheduler.max_num_seqs,
            config.max_num_queued_reqs,
            self._send,
            is_fair=config.scheduler.policy is Policy.FAIR,
        )
        self.process = self._new_process()
        self.recovery = Recovery(self.streams, config.scheduler.max_num_seqs)
        self._budget = RestartBudget(config.max_engine_restarts)
        self.restarts: Counter[EndCause] = Counter()
        """How many processes were replaced, by what ended them."""
        self.failed_ways: dict[GpuWay, str] = {}
        """Those of a GPU that are not used any more, and why."""
        self._info: ModelInfo | None = None
        self._on_step: list[Callable[[StepReport], None]] = []
        self._on_info: list[Callable[[ModelInfo], None]] = []
        self._on_progress: Callable[[LoadProgress], None] = lambda _: None
        self._on_restart: list[Callable[[], None]] = []
        self.last_report: StepReport | None = None
        self._is_up = False  # the process is ready, and has not ended
        self._has_stepped = False  # this process has
        self._last_message_s = 0.0
        self._busy_since_s = 0.0  # since there was nothing to do, or since it was ready
        self._ended_at_s = 0.0  # when the last process ended
        self._start_s = 0.0  # how long the last start took
        self._ready_at_s = 0.0  # about when the next process will be
        self._ended: asyncio.Future[End] | None = None  # of this process
        self._dead: asyncio.Future[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> ModelInfo:
        """Raises EngineFailed before the model is loaded."""
        if self._info is None:
            raise EngineFailed("the model is still loading")
        return self._info

    @property
    def step_age_s(self) -> float:
        """With answers open: since the engine last did something, or last had nothing to do."""
        return max(0.0, time.monotonic() - self._last_sign_s()) if self.streams.num_open else 0.0

    @property
    def stall_limit_s(self) -> float:
        config = self._config
        # A process that replaces another one finds what that has compiled, but loads for long.
        has_stepped = self._is_up and self.last_report is not None
        return stall_limit_s(
            config.stall_timeout_s, self.info, config.scheduler, has_stepped=has_stepped
        )

    @property
    def ready_in_s(self) -> int:
        """While it restarts: about how long that takes, by how long the last start took."""
        return max(1, math.ceil(self._ready_at_s - time.monotonic()))

    def on_step(self, callback: Callable[[StepReport], None]) -> None:
        """Calls back with every step's report, on the event loop: for metrics."""
        self._on_step.append(callback)

    def on_info(self, callback: Callable[[ModelInfo], None]) -> None:
        """Calls back when `info` is known better."""
        self._on_info.append(callback)

    def on_progress(self, callback: Callable[[LoadProgress], None]) -> None:
        """Calls back when a phase of the start begins, and about how far it is."""
        self._on_progress = callback

    def on_restart(self, callback: Callable[[], None]) -> None:
        """Calls back when a process has ended that will be replaced."""
        self._on_restart.append(callback)

    async def start(self) -> ModelInfo:
        """Starts the process and returns when it is ready. Raises EngineFailed."""
        self._dead = asyncio.get_running_loop().create_future()
        if self._config.max_engine_restarts:
            self._kv_memory = make_descriptor()
            self.process = self._new_process()
        while True:
            try:
                await self._start_process()
                break
            except EngineFailed:
                assert self._ended
                if not self._step_down(self._ended.result()):
                    self.state = EngineState.DEAD
                    raise
            await self.process.close()
            self.process = self._new_process()
        # Another process must have room for what this one accepted.
        self._config = replace(self._config, max_model_len=self.info.max_model_len)
        self.state = EngineState.READY if self._is_up else EngineState.RESTARTING
        self._tasks = [asyncio.create_task(self._supervise())]
        if self._config.max_engine_restarts:
            self._tasks.append(asyncio.create_task(self._look()))
        return self.info

    async def wait_dead(self) -> str:
        """Returns the reason when the engine has ended without `close`, and is not replaced."""
        assert self._dead, "call start() first"
        return await self._dead

    async def close(self) -> None:
        """Ends the process. Requests that are still open get EngineFailed."""
        self.state = EngineState.DEAD
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.streams.fail_all(EngineFailed("the server is shutting down"))
        await self.process.close()
        self._drop_kv()

    def submit(self, request: Request) -> OutputStream:
        """Sends the request at once; its stream gives its outputs, in order, as they arrive.

        An item is all outputs that have arrived, so a slow reader gets few large items; the
        iteration ends after the last final output. Cancelling it, or `aclose`, aborts the request.
        While the engine restarts, the request waits. Raises QueueFull, EngineFailed, or
        RequestRefused for an n without room. While it runs, the iterator raises EngineFailed if the
        engine dies for good or because of this request, RequestRefused if the engine does not
        accept the request.
        """
        (stream,) = self.submit_alike([request])
        return stream

    def submit_alike(self, requests: Sequence[Request]) -> list[OutputStream]:
        """The same of several, all or none, that differ in id, prompt and max_tokens alone: so what
        they share is sent once."""
        if self.state not in (EngineState.READY, EngineState.RESTARTING):
            raise EngineFailed(f"the engine is {self.state}")
        if not self.streams.num_open:
            self._busy_since_s = time.monotonic()
        streams = self.streams.submit_alike(requests)
        if requests[0].adapter is not None:
            self.adapters.count(requests[0].adapter)
        return streams

    # LoRA adapters.

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """The names of those with a request that runs, and with one that waits."""
        running, waiting = set[str](), set[str]()
        for stream in self.streams:
            if adapter := stream.request.adapter:
                name = adapter.rpartition("@")[0]
                (running if stream.has_started else waiting).add(name)
        return running, waiting

    # A process, from its start to its end.

    def _new_process(self) -> EngineProcess:
        in_use = {adapter for stream in self.streams if (adapter := stream.request.adapter)}
        config = replace(self._config, lora=self.adapters.config(in_use))
        return EngineProcess(config, self._module, self._on_message, self._on_end, self._kv_memory)

    def _drop_kv(self) -> None:
        """The next process, if there is one, begins without the keys and values of this one."""
        if self._kv_memory is not None:
            os.close(self._kv_memory)
            self._kv_memory = None

    async def _start_process(self) -> None:
        """Raises EngineFailed."""
        began_s = self._last_message_s = time.monotonic()
        self._ended = asyncio.get_running_loop().create_future()
        self._has_stepped = False
        self._info = await self.process.start()
        self.adapters.on_ready(self.process.adapters)
        self._is_up = self.process.state is EngineState.READY  # it may have ended since
        self._busy_since_s = time.monotonic()
        self._start_s = self._busy_since_s - began_s

    def _check_up(self) -> None:
        """Raises EngineFailed unless what is sent now arrives."""
        if self.state is not EngineState.READY:
            raise EngineFailed(f"the engine is {self.state}; try again when it is ready")

    def _send(self, message: OnWire) -> None:
        """A message that is not sent now is not lost: the next process gets all requests that are
        then open, and has not heard of others."""
        if self.state is EngineState.READY or (self._is_up and isinstance(message, Abort)):
            self.process.send(message)

    def _on_message(self, message: LoadProgress | FromLoop) -> None:
        self._last_message_s = time.monotonic()
        if isinstance(message, LoadProgress):
            self._on_progress(message)
            return
        if isinstance(message, Refused):
            self.recovery.refuse(message.request_id)
            error = TargetOutOfReach(*message.late) if message.late else None
            self.streams.fail(message.request_id, error or RequestRefused(message.message))
            return
        if isinstance(message, Accepted):
            self.streams.accept(message.request_id)
            return
        if isinstance(message, AdapterLoaded):
            self.adapters.on_loaded(message)
            return
        if isinstance(message, RatesMeasured):
            self._take_rates(message)
            return
        self.last_report = message
        self._has_stepped = True
        if message.started:
            self.streams.start(message.started)
        self.streams.push(self.recovery.take(message.outputs))
        for callback in self._on_step:
            callback(message)

    def _take_rates(self, rates: RatesMeasured) -> None:
        self._info = replace(
            self.info,
            measured_bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s,
            measured_flops_per_s=rates.flops_per_s,
            rates_are_doubtful=False,
        )
        for callback in self._on_info:
            callback(self._info)

    def _on_end(self, end: End) -> None:
        if self._is_up:
            self._is_up = False
            self._ended_at_s = time.monotonic()
            self.recovery.on_end(end)
            self.adapters.on_end()
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
        if self._ended and not self._ended.done():
            self._ended.set_result(end)

    # From one process to the next.

    async def _supervise(self) -> None:
        """Replaces the process whenever it has ended, until it may not be replaced again."""
        assert self._ended
        try:
            end = await self._ended
            while await self._replace(end):
                end = await self._resume()
        except Exception as error:
            logger.exception("the engine cannot be watched any more")
            self._die(f"{type(error).__name__}: {error}")

    async def _replace(self, end: End) -> bool:
        """Starts processes until one is ready; false if that may not be tried again."""
        has_worked = self._has_stepped
        while True:
            self._step_down(end)
            has_ended = await self.process.close()
            if not has_ended or end.cause is EndCause.OUT_OF_MEMORY:
                # A process that was left behind may write to it; or the memory is what it takes.
                self._drop_kv()
                self._kv_memory = make_descriptor()
            delay_s = self._budget.delay_s(time.monotonic(), has_worked=has_worked)
            if delay_s is None:
                self._die(self._budget.last_words(end.why))
                return False
            self.restarts[end.cause] += 1
            self._ready_at_s = time.monotonic() + delay_s + self._start_s
            for callback in self._on_restart:
                callback()
            logger.warning(
                "%s; another starts %s, for which %s waiting",
                end.why,
                f"in {delay_s:g} s" if delay_s else "now",
                "1 request is" if len(self.streams) == 1 else f"{len(self.streams)} requests are",
            )
            await asyncio.sleep(delay_s)
            self.process = self._new_process()
            try:
                await self._start_process()
                return True
            except EngineFailed:
                assert self._ended
                end, has_worked = self._ended.result(), False

    def _step_down(self, end: End) -> bool:
        """Whether the next process computes in a slower way, as the GPU has failed in this one."""
        if (failed := end.failed_way) is None:
            return False
        if (slower := self._config.slower_way(failed)) is None:
            return False
        self.failed_ways[failed] = end.why
        self._config = replace(self._config, gpu_way=slower)
        logger.error(
            "the GPU failed while it computed with --gpu-way %s: %s; the engine starts again with "
            "--gpu-way %s, which is slower",
            failed,
            end.why,
            slower,
        )
        return True

    async def _resume(self) -> End:
        """Gives the open requests to a process that is ready; returns when that has ended."""
        assert self._ended
        coming_back = asyncio.create_task(self._bring_back())
        try:
            await asyncio.wait((coming_back, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if coming_back.done():
                coming_back.result()  # raises what it raised
            return await self._ended
        finally:
            coming_back.cancel()

    async def _bring_back(self) -> None:
        await self.recovery.bring_back(self.process.send)
        if self._is_up:
            self.state = EngineState.READY
            self.adapters.on_resumed()
            self._busy_since_s = time.monotonic()
            pause_s = self._busy_since_s - self._ended_at_s
            logger.warning(
                "the engine runs again after %.1f s, and goes on with %d requests",
                pause_s,
                len(self.streams),
            )

    async def _look(self) -> None:
        """Ends a process that has stalled, for `_supervise` to replace it."""
        beats, steps = Silence(_LOOK_INTERVAL_S), Silence(_LOOK_INTERVAL_S)
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            now_s, process = time.monotonic(), self.process
            unheard_s = beats.look(now_s, (process, process.last_beat_s))
            is_idle = not self.streams.num_open and self.state is EngineState.READY
            sign_s = now_s if is_idle else self._last_sign_s()
            stuck_s = max(unheard_s, steps.look(now_s, (process, sign_s)))
            if process.state is EngineState.DEAD or stuck_s <= self._config.stall_timeout_s:
                continue
            if stuck_s > self.stall_limit_s or process.is_stopped:
                process.end_stalled(stuck_s)

    def _last_sign_s(self) -> float:
        return max(self._last_message_s, self._busy_since_s)

    def _die(self, why: str) -> None:
        self.state = EngineState.DEAD
        self.streams.fail_all(EngineFailed(why))
        assert self._dead
        if not self._dead.done():
            self._dead.set_result(why)
