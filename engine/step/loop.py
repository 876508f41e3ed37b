"""The step loop. One thread owns the scheduler and the executor; others post commands.

Read `EngineLoop.step` first: it is the whole engine in five lines.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from penstock.engine.process import logs
from penstock.engine.step.adapter_commands import AdapterCommands
from penstock.engine.step.executor import Executor, PendingTokens
from penstock.engine.step.messages import (
    Abort,
    Accepted,
    FromLoop,
    Refused,
    StepReport,
    Submit,
    ToEngine,
    caller_of,
)
from penstock.scheduler.batch import StepOutputs, work_of
from penstock.scheduler.errors import PenstockError, TargetOutOfReach
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.stats import NO_WORK, StepWork, class_of
from penstock.scheduler.step_model.amounts import Amounts
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.step_model.samples import sample_of
from penstock.scheduler.types import Request, RequestId, RequestOutput, ScheduledBatch

logger = logging.getLogger(__name__)

# How long to wait before looking again while work is waiting: for its batch to be due (static and
# dynamic batching), or for a grammar to be compiled.
_BATCH_POLL_S = 0.002
_IDLE_S = 5.0


class Inbox(Protocol):
    """Where commands come from."""

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        """All commands that have arrived. Where there are none, waits up to timeout_s for the first
        (0: not at all, None: without limit)."""
        ...


class _Launched(NamedTuple):
    """A step whose ids have not been collected. amounts: for the step model, if there is one.
    executed_s: in `execute`, where that computes. predicted_s: see `StepReport`."""

    step: int
    pending: PendingTokens
    work: StepWork
    amounts: Amounts | None
    predicted_s: float | None
    started_s: float
    executed_s: float


class EngineLoop:
    """Schedules, executes, reports; ahead of the device where that may have several steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        send: Callable[[FromLoop], None],
        clock: Callable[[], float] = time.monotonic,
        step_model: LiveStepModel | None = None,
        when_idle: Callable[[], FromLoop | None] | None = None,
        count: Callable[[ScheduledBatch], StepWork] | None = None,
    ) -> None:
        """step_model: learns from every step, and predicts it. when_idle: is called whenever there
        has been nothing to do for some seconds, until it returns a message. count: returns the work
        of a batch that was launched, where the executor has counted it before."""
        self._step_model = step_model
        self._when_idle = when_idle
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._launched: deque[_Launched] = deque()
        self._max_in_flight = executor.info.max_in_flight
        self._preparing: dict[RequestId, Future[Any]] = {}
        self._adapters = AdapterCommands(executor.adapters, send)
        self._last_end_s = clock()
        self._busy_since_s = self._last_end_s  # the last step's end, or the end of idleness after
        self._info = executor.info
        windows, graph_sizes = executor.info.windows, executor.info.graph_sizes
        self._count = count or (lambda batch: work_of(batch, windows, graph_sizes))

    def run(self) -> None:
        """Steps until the executor or the inbox raises."""
        try:
            while True:
                self.step()
        except Exception:
            for request_id in self._scheduler.running_ids:
                _log(logging.ERROR, request_id, "it ran in the step that failed")
            raise

    def step(self) -> None:
        """One step. It waits for commands only when there is nothing to run or to collect."""
        aborted = self._apply_commands()
        launched = self._launch()
        if launched:
            self._launched.append(launched)
        if self._launched and (not launched or len(self._launched) >= self._max_in_flight):
            self._collect(self._launched.popleft())
        if aborted:
            self._report_aborted(aborted)

    def _apply_commands(self) -> list[RequestOutput]:
        """Applies all commands; returns the final outputs of the aborted answers."""
        aborted = []
        timeout_s = self._receive_timeout_s()
        has_command = False
        for command in self._inbox.receive(timeout_s):
            has_command = True
            if isinstance(command, Submit):
                self._add(command.request)
            elif isinstance(command, Abort):
                _log(logging.DEBUG, command.request_id, "aborted")
                aborted += self._scheduler.abort(command.request_id, command.index)
            else:
                self._adapters.apply(command)
        if timeout_s == _IDLE_S and not has_command:
            self._use_idleness()
        if timeout_s != 0:
            self._busy_since_s = self._clock()
        self._release_ended(aborted)
        self._start_prepared()
        self._adapters.report_loaded()
        return aborted

    def _use_idleness(self) -> None:
        if self._when_idle and (message := self._when_idle()):
            self._when_idle = None
            self._send(message)

    def _add(self, request: Request) -> None:
        """It runs now or, where the executor has to prepare for it, later."""
        try:
            self._scheduler.add(request, is_ready=False, now=self._clock())
        except PenstockError as error:
            self._send_refusal(request.id, error)
            return
        _log(logging.DEBUG, request.id, "accepted")
        if request.ttft_target_s is not None:
            self._send(Accepted(request.id))
        try:
            future = self._executor.prepare(request)
        except PenstockError as error:
            self._refuse(request.id, error)
            return
        if future is None:
            self._scheduler.make_ready(request.id)
        else:
            self._preparing[request.id] = future

    def _start_prepared(self) -> None:
        """The requests whose preparation is done may run, or are refused."""
        done = [name for name, future in self._preparing.items() if future.done()]
        for request_id in done:
            error = self._preparing.pop(request_id).exception()
            if error is None:
                self._scheduler.make_ready(request_id)
            elif isinstance(error, PenstockError):
                self._refuse(request_id, error)
            else:
                raise error

    def _refuse(self, request_id: RequestId, error: PenstockError) -> None:
        """An accepted request that cannot run: it gets no outputs."""
        self._scheduler.abort(request_id)
        self._executor.release(request_id)
        self._send_refusal(request_id, error)

    def _send_refusal(self, request_id: RequestId, error: PenstockError) -> None:
        _log(logging.DEBUG, request_id, "refused")
        late = None
        if isinstance(error, TargetOutOfReach):
            late = error.predicted_s, error.target_s
        self._send(Refused(request_id, str(error), late))

    def _release_ended(self, outputs: Iterable[RequestOutput]) -> None:
        """Releases what was prepared for requests that end with these outputs."""
        for output in outputs:
            if output.finish and not self._scheduler.is_open(output.request_id):
                self._preparing.pop(output.request_id, None)
                self._executor.release(output.request_id)

    def _receive_timeout_s(self) -> float | None:
        """How long to wait for a command."""
        if self._scheduler.num_running or self._launched:
            return 0.0
        is_waiting = self._scheduler.num_waiting or self._adapters.is_loading
        idle_s = _IDLE_S if self._when_idle else None
        return _BATCH_POLL_S if is_waiting else idle_s

    def _launch(self) -> _Launched | None:
        started_s = self._clock()
        batch = self._scheduler.schedule(started_s)
        if batch is None:
            return None
        executing_s = self._clock()
        pending = self._executor.execute(batch)
        executed_s = 0.0 if self._info.runs_ahead else self._clock() - executing_s
        work = self._count(batch)  # after the launch, so that a device does not wait for it
        amounts, predicted_s = None, None
        if self._step_model and batch.slots:
            amounts = self._info.amounts(work)
            predicted_s = self._step_model.predict(amounts, class_of(work))
        return _Launched(batch.step, pending, work, amounts, predicted_s, started_s, executed_s)

    def _collect(self, launched: _Launched) -> None:
        """Waits for a step's ids and sends the outputs of its requests."""
        waiting_s = self._clock()
        sampled = launched.pending.wait()
        end_s = self._clock()
        if sampled.num_experts is not None or sampled.adapter_bytes:
            work = launched.work._replace(
                num_experts=sampled.num_experts, adapter_bytes=sampled.adapter_bytes
            )
            amounts = self._info.amounts(work) if launched.amounts else None
            launched = launched._replace(work=work, amounts=amounts)
        wait_s = end_s - waiting_s + launched.executed_s
        host_s = end_s - self._busy_since_s - wait_s
        was_idle = launched.started_s > self._last_end_s
        started_s = max(launched.started_s, self._last_end_s)
        self._last_end_s = self._busy_since_s = end_s
        outputs = self._scheduler.update(sampled)
        self._release_ended(outputs.others.values())
        report = StepReport(
            step=launched.step,
            outputs=outputs,
            stats=self._scheduler.stats(),
            work=launched.work,
            started_s=started_s,
            step_s=end_s - started_s,
            model_bytes=self._info.step_bytes(launched.work),
            model_flops=self._info.step_flops(launched.work),
            started=self._scheduler.take_started(),
            wait_s=wait_s,
            host_s=host_s,
            predicted_s=launched.predicted_s,
            computed_s=sampled.computed_s,
            proposing_s=sampled.proposing_s,
            encoding_s=sampled.encoding_s,
        )
        self._send(report)
        self._learn(launched, report.device_s, host_s, was_idle=was_idle)

    def _learn(self, launched: _Launched, wait_s: float, host_s: float, *, was_idle: bool) -> None:
        """After the report, so that nobody waits for it."""
        runs_ahead = self._info.runs_ahead
        if self._step_model is None or launched.amounts is None or not launched.work.num_sequences:
            return
        if runs_ahead and was_idle:
            return  # nothing ran while it was launched, unlike in the steps after it
        self._step_model.observe(
            sample_of(
                launched.step,
                class_of(launched.work),
                launched.amounts,
                wait_s=wait_s,
                host_s=host_s,
                runs_ahead=runs_ahead,
            )
        )

    def _report_aborted(self, aborted: list[RequestOutput]) -> None:
        """Reports step 0, so that the server learns of the freed blocks."""
        self._send(
            StepReport(
                step=0,
                outputs=StepOutputs.of(aborted),
                stats=self._scheduler.stats(),
                work=NO_WORK,
                started_s=self._clock(),
                step_s=0.0,
                model_bytes=0,
                model_flops=0,
            )
        )


def _log(level: int, request_id: RequestId, what: str) -> None:
    if logger.isEnabledFor(level):
        ids = logs.fields(request_id=caller_of(request_id), engine_id=request_id)
        logger.log(level, "engine: %s", what, extra=ids)
