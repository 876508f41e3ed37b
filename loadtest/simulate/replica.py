"""`Replica`: one simulated server, which is the engine's own loop on a virtual clock."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.engine.config import SpeculativeConfig
from penstock.engine.executors.predicted import DraftsByChance, PredictedExecutor, VirtualClock
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import Accepted, FromLoop, Refused, StepReport, Submit, ToEngine
from penstock.engine.step.model_info import ModelInfo
from penstock.loadtest.calibrate.calibration import NO_FRONT_END, FrontEnd
from penstock.loadtest.calibrate.drafts import DraftsAssumed
from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.step_model.model import StepModel
from penstock.scheduler.types import Request


class SimulatedServer(NamedTuple):
    """The settings that all replicas share. drafts: None where no step has any."""

    info: ModelInfo
    step_model: StepModel
    scheduler: SchedulerConfig
    front_end: FrontEnd = NO_FRONT_END
    max_num_queued_reqs: int = 1024
    drafts: DraftsAssumed | None = None


class StepRecord(NamedTuple):
    """A step that ended at end_s, for figures over time."""

    end_s: float
    step_s: float
    num_bytes: int
    flops: int
    num_running: int
    num_waiting: int
    kv_usage: float


class Replica:
    """on_outputs: called with the new tokens of a step, the time when clients have the first of
    them, and how long each takes; returns how many requests have ended. on_refused: with a request
    and why, and when.

    One thread of the front end parses requests, and writes the tokens of each step to their
    streams. It does one thing after another; so while it writes, a new request waits, and while it
    parses, tokens wait.
    """

    def __init__(
        self,
        server: SimulatedServer,
        on_outputs: Callable[[StepOutputs, float, float], int],
        on_refused: Callable[[Refused, float], None],
        *,
        factors: dict[StepClass, float],
        seed: int | None,
    ) -> None:
        self.clock = VirtualClock()
        info = server.info
        self.executor = PredictedExecutor(
            info, server.step_model, self.clock, factors=factors, seed=seed
        )
        targets = (server.scheduler.itl_target_s, server.scheduler.ttft_target_s)
        live = LiveStepModel(info, server.step_model)
        # Learning takes as long as a simulated step, and serves targets alone.
        learning = None if targets == (None, None) else live
        self.scheduler = Scheduler(
            server.scheduler,
            groups=info.kv_groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            step_model=live,
            num_cohorts=info.pipeline_parallel_size,
            drafter=_drafter(server.drafts, live, seed or 0),
            encoder=info.encoder_costs,
        )
        # Requests on their way, in order of arrival. What comes later may not be among them yet.
        self._coming: deque[Request] = deque()
        self._known_until_s = math.inf
        self._loop = EngineLoop(
            *(self.scheduler, self.executor, self, self._send, self.clock, learning),
            count=lambda _: self.executor.work,
        )
        self._front_end, self._front_end_free_s = server.front_end, 0.0
        # The engine has sent this at that time, and the front end has not yet written it.
        self._report: tuple[float, StepOutputs] | None = None
        self._max_open = server.scheduler.max_num_seqs + server.max_num_queued_reqs
        self._on_outputs, self._on_refused = on_outputs, on_refused
        self.num_open = 0
        self.steps: list[StepRecord] = []

    @property
    def next_s(self) -> float:
        """When it does something next; infinite where it has nothing to do."""
        if self._report or self.scheduler.has_work:
            return self.clock.now_s
        coming = self._coming
        return max(self.clock.now_s, coming[0].arrival_s) if coming else math.inf

    def parse(self, sent_s: float) -> float:
        """Returns when the engine gets what a client sends. To be called in the order of time."""
        costs = self._front_end
        self._front_end_free_s = max(sent_s, self._front_end_free_s) + costs.request_s
        return self._front_end_free_s + costs.delay_s

    def submit(self, request: Request) -> bool:
        """In order of arrival, which is when the engine gets it: see `parse`. False where as
        many requests are open as a server accepts."""
        if self.num_open >= self._max_open:
            return False
        self.num_open += 1
        self._coming.append(request)
        return True

    def step(self, known_until_s: float) -> None:
        """Writes what a step has sent, or else runs one more step, and takes its time.
        known_until_s: until when no further request is sent by a client: so those that reached the
        front end before a step's end have had their turn when its tokens are written."""
        costs = self._front_end
        if self._report:
            sent_s, outputs = self._report
            written_s = max(sent_s, self._front_end_free_s) + costs.report_s
            self.num_open -= self._on_outputs(outputs, written_s, costs.token_s)
            self._front_end_free_s = written_s + len(outputs) * costs.token_s
            self._report = None
            return
        self._known_until_s = known_until_s + costs.request_s + costs.delay_s
        self._loop.step()

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        """The requests that have arrived, for its loop. To wait is to advance the clock."""
        coming, clock = self._coming, self.clock
        if timeout_s != 0:
            next_s = min(coming[0].arrival_s if coming else math.inf, self._known_until_s)
            until_s = next_s if timeout_s is None else min(next_s, clock.now_s + timeout_s)
            assert until_s < math.inf, "a replica without work was stepped: it would wait for ever"
            clock.advance_to(until_s)
        arrived = []
        while coming and coming[0].arrival_s <= clock.now_s:
            arrived.append(Submit(coming.popleft()))
        return arrived

    def _send(self, message: FromLoop) -> None:
        if isinstance(message, Accepted):
            return
        if isinstance(message, Refused):
            self.num_open -= 1
            self._on_refused(message, self.clock.now_s)
            return
        assert isinstance(message, StepReport), message
        clock = self.clock
        end_s = clock.now_s
        clock.now_s = end_s + self.executor.host_s
        if message.outputs:
            self._report = clock.now_s, message.outputs
        stats = message.stats
        self.steps.append(
            StepRecord(
                end_s,
                message.step_s,
                message.model_bytes,
                message.model_flops,
                stats.num_running,
                stats.num_waiting,
                stats.kv_usage,
            )
        )


def _drafter(drafts: DraftsAssumed | None, live: LiveStepModel, seed: int) -> Drafter | None:
    if drafts is None:
        return None
    most = SpeculativeConfig().num_speculative_tokens
    return Drafter([DraftsByChance(*drafts, most, seed)], most, live)
