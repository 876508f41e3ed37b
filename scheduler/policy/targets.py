"""`Targets`: what they allow. A step's prompts beside its decodes, and a request at its arrival.

Where both targets cannot be met at once, that of the decodes (ITL) yields first: a step runs
`PREFILL_FLOOR` prompt tokens whatever they take. A target for the first token (TTFT) is met by
refusing requests, never by slowing others.
"""

from penstock.scheduler.batch import Batch, work_of
from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import TargetOutOfReach
from penstock.scheduler.policy.forecast import Ahead, AnswerLengths, forecast_ttft_s, prefill_s
from penstock.scheduler.stats import class_of
from penstock.scheduler.step_model.chunk_budget import ChunkBudget, chunk_budget
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.types import FinishReason, Request


class Targets:
    """Targets of the server and of its requests. num_out_of_reach: requests that were refused."""

    def __init__(
        self, config: SchedulerConfig, step_model: LiveStepModel | None, num_cohorts: int = 1
    ) -> None:
        """Without a step model targets have no effect. num_cohorts: a sequence gets a token in one
        of so many steps."""
        self._config = config
        self._step_model = step_model
        self._num_cohorts = num_cohorts
        self._lengths = AnswerLengths()
        self._own: dict[Sequence, float] = {}  # ITL, of running sequences with one of their own
        self.num_out_of_reach = 0

    # Sequences, as they come and go.

    def on_run(self, sequence: Sequence) -> None:
        if sequence.request.itl_target_s is not None:
            self._own[sequence] = sequence.request.itl_target_s

    def on_leave(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)

    def on_end(self, sequence: Sequence, reason: FinishReason) -> None:
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self._lengths.on_end(sequence)

    # How much they allow.

    def chunk_budget(
        self,
        batch: Batch,
        max_tokens: int,
        enough: float,
        num_running: int,
        share: float = 1.0,
    ) -> ChunkBudget:
        """Says how much of prompts a step may run whose decodes are planned. share: of what these
        leave of a target."""
        target_s = self._step_target_s(num_running)
        if target_s is None or self._step_model is None or not batch.num_decodes:
            return ChunkBudget(max_tokens, enough)
        windows = [group.window for group in self._step_model.served.attention]
        decodes = work_of(batch, windows)
        if share < 1.0 and (left_s := self.left_s(batch, num_running)):
            target_s -= (1 - share) * left_s
        return chunk_budget(
            self._step_model, target_s, max_tokens=max_tokens, enough=enough, decodes=decodes
        )

    def left_s(self, batch: Batch, num_running: int) -> float | None:
        """What a step as it is planned leaves of the target, or a quarter of that while nothing is
        known of the time; None without a target or where nobody waits for a token."""
        target_s, live = self._step_target_s(num_running), self._step_model
        if target_s is None or live is None or not batch.num_decodes:
            return None
        work = work_of(batch, [group.window for group in live.served.attention])
        kind = class_of(work)
        expected, step_s = live.expected(kind), live.predict(live.served.amounts(work), kind)
        if expected is None or step_s is None:
            return target_s / 4
        return max(0.0, target_s - expected.tail * step_s)

    def compute_s(self, start: int, end: int) -> float | None:
        """See `prefill_s`; None without a step model too."""
        live, max_tokens = self._step_model, self._config.max_step_tokens
        return None if live is None else prefill_s(live, start, end, max_tokens)

    def applies_to(self, request: Request) -> bool:
        """Whether it may be refused. What an earlier engine accepted is accepted."""
        has_target = request.ttft_target_s or self._config.ttft_target_s
        return bool(has_target and self._step_model) and request.resumed is None

    def check(self, sequence: Sequence, ahead: Ahead, num_running: int, waited_s: float) -> None:
        """Notes when the first token of a sequence that arrives is expected, if that is known.
        waited_s: since its request arrived. Raises TargetOutOfReach."""
        target_s = sequence.request.ttft_target_s or self._config.ttft_target_s
        assert self._step_model and target_s, "ask applies_to first"
        num_cached = sequence.num_cached_at_arrival
        predicted_s = forecast_ttft_s(
            self._step_model,
            ahead,
            self._lengths,
            self._config,
            target_s=self._step_target_s(num_running),
            num_cohorts=self._num_cohorts,
            num_new=sequence.num_to_compute - num_cached,
            num_cached=num_cached,
        )
        if predicted_s is None:
            return
        sequence.predicted_ttft_s = predicted_s + waited_s
        if sequence.predicted_ttft_s > target_s:
            self.num_out_of_reach += 1
            raise TargetOutOfReach(sequence.predicted_ttft_s, target_s)

    def _step_target_s(self, num_running: int) -> float | None:
        """Returns the tightest target of the sequences that run, for one of the cohorts' steps."""
        server_s, targets_s = self._config.itl_target_s, [*self._own.values()]
        if server_s is not None and (not targets_s or len(targets_s) < num_running):
            targets_s.append(server_s)
        return min(targets_s) / self._num_cohorts if targets_s else None
