"""`PredictedExecutor`: steps that take the time that a step model predicts, on a virtual clock.

It computes nothing: every sampled id is the same, so that an answer ends at its max_tokens. The
scheduler and the loop around it are those that serve. A device runs one step after another; a step
begins when it is launched and the one before has ended, as on a real one. So does each stage of a
pipeline, of which the last computes when it is waited for, as the engine process does.
"""

from bisect import bisect_right
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from random import Random
from typing import Any

from penstock.engine.encoders.inserts import InsertTable
from penstock.engine.step.executor import check_no_adapter
from penstock.engine.step.model_info import EncoderInfo, ModelInfo
from penstock.scheduler.batch import work_of
from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.sources import MOST_MATCH, Found
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.stats import NO_WORK, StepClass, StepWork, class_of
from penstock.scheduler.step_model.model import StepModel
from penstock.scheduler.types import (
    FurtherTokens,
    Insert,
    Request,
    RequestId,
    SampledTokens,
    ScheduledBatch,
)

_SLICE_S = 0.005  # of an encoder, the least that it computes
TOKEN_ID, _OTHER_ID = 7, 8  # any but a stop token, and one that is never sampled


class DraftsByChance:
    """A source of drafts that are right as often as is said: see `scheduler.drafts.sources`."""

    name = "simulated"

    def __init__(self, acceptance: tuple[float, ...], found: float, most: int, seed: int) -> None:
        """acceptance: of a draft at each position, if those before it are right; the last is that
        of all after it. found: the share of looks that find any. most: drafts that one finds."""
        self._found, self._random = found, Random(f"{seed}/drafts")
        length = 3 * most  # those in flight, too
        rates = [*acceptance, *acceptance[-1:] * length][:length]
        # That fewer than 1, 2, ... are right.
        self._fewer = [1 - chance for chance in accumulate(rates, mul)]
        self._texts = [[TOKEN_ID] * n + [_OTHER_ID] * (length - n) for n in range(length + 1)]
        self._wrong_at: dict[Sequence, int] = {}  # the place of the first that is

    def find(self, sequence: Sequence) -> Found | None:
        if self._found < 1.0 and self._random.random() >= self._found:
            return None
        length = len(sequence.token_ids)
        wrong_at = self._wrong_at.get(sequence, -1)
        if not sequence.num_unresolved or wrong_at < length:  # else drafts of it are in flight
            wrong_at = length + bisect_right(self._fewer, self._random.random())
            self._wrong_at[sequence] = wrong_at
        return Found(self._texts[wrong_at - length], 0, MOST_MATCH)

    def end(self, sequence: Sequence) -> None:
        self._wrong_at.pop(sequence, None)


class VirtualClock:
    """Seconds since the simulation began. Call it as `time.monotonic`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, at_s: float) -> None:
        """Does nothing if that is past."""
        if at_s > self.now_s:
            self.now_s = at_s


class PredictedExecutor:
    """See `penstock.engine.step.executor.Executor`.

    factors: by class, what predicted times are multiplied by; 1 where none is given. seed: draws
    the spread that the model saw in steps alike; None for none. host_s: the host's time of the step
    that was waited for last, which whoever drives the loop adds when its report is sent.
    num_outside: steps that are outside of what the model was checked on. work: that of the step
    that was launched last.
    """

    journals = ()
    adapters = tier = None

    def __init__(
        self,
        info: ModelInfo,
        model: StepModel,
        clock: VirtualClock,
        *,
        factors: dict[StepClass, float] | None = None,
        seed: int | None = None,
    ) -> None:
        self.info = info
        self._model = model
        self._clock = clock
        self._factors = factors or {}
        self._random = None if seed is None else Random(seed)
        # When each stage has computed all that was launched.
        self._free_s = [0.0] * info.pipeline_parallel_size
        self._has_stages = info.pipeline_parallel_size > 1
        self._windows = info.windows
        self._encoder = None
        if info.encoder is not None and info.encoder_costs is not None:
            self._encoder = _PredictedEncoder(info.encoder, info.encoder_costs.operation_s)
        self._inserts = InsertTable(self._encoder, lambda: getattr(self._encoder, "spent_s", 0.0))
        self.host_s = 0.0
        self.num_outside = 0
        self.work = NO_WORK

    def prepare(self, request: Request) -> "Future[Any] | None":
        """Raises InvalidConfig for what cannot be simulated."""
        check_no_adapter(request)
        if request.pooling or request.sampling.num_prompt_logprobs is not None:
            raise InvalidConfig("a prompt's outputs cannot be simulated: there is no model")
        self._inserts.prepare(request)
        return None

    def release(self, request_id: RequestId) -> None:
        self._inserts.release(request_id)

    def execute(self, batch: ScheduledBatch) -> "PredictedStep":
        self.work = work = work_of(batch, self._windows, self.info.graph_sizes)
        device_s, host_s = self._times(work)
        rest_s = device_s if self._has_stages else None
        num_drafts = sum(map(len, batch.drafts))
        token_ids = [TOKEN_ID] * (work.num_sampled - num_drafts)
        sampled = SampledTokens(step=batch.step, token_ids=token_ids, computed_s=rest_s)
        if num_drafts:
            sampled = sampled._replace(further=_further(batch.drafts))
        self._inserts.drop(batch)
        if batch.encodes:
            encoded, encoding_s = self._inserts.encode(batch)
            sampled = sampled._replace(encoded=encoded, encoding_s=encoding_s)
            device_s += encoding_s
        end_s = self.pass_stage(0, self._clock.now_s, device_s)
        for stage in range(1, len(self._free_s) - 1):
            end_s = self.pass_stage(stage, end_s, device_s)
        return PredictedStep(self, self._clock, sampled, end_s, rest_s, host_s)

    def pass_stage(self, stage: int, arrival_s: float, device_s: float) -> float:
        """When a step has passed it that comes there at arrival_s."""
        end_s = max(arrival_s, self._free_s[stage]) + device_s
        self._free_s[stage] = end_s
        return end_s

    def _times(self, work: StepWork) -> tuple[float, float]:
        """Returns the seconds of the device and of the host."""
        if not work.num_sequences:
            return 0.0, 0.0
        kind, amounts = class_of(work), self.info.amounts(work)
        device_s, host_s = self._model.time_of(amounts)
        factor = self._factors.get(kind, 1.0)
        if self._random and (error := self._model.errors.get(kind)):
            factor *= error.ratio_at(self._random.random())
        if self._model.outside(amounts, kind):
            self.num_outside += 1
        return factor * device_s, factor * host_s


class _PredictedEncoder:
    """spent_s: in all slices so far."""

    def __init__(self, info: EncoderInfo, operation_s: float) -> None:
        self.info = info
        self._operation_s = operation_s
        self.spent_s = 0.0

    def begin(self, insert: Insert) -> "_PredictedEncoding":
        return _PredictedEncoding(self, insert.operations * self._operation_s)


class _PredictedEncoding:
    rows: Any = None

    def __init__(self, encoder: _PredictedEncoder, left_s: float) -> None:
        self._encoder = encoder
        self._left_s = left_s

    def run(self, budget_s: float) -> bool:
        slices_s = min(self._left_s, max(budget_s, _SLICE_S))
        self._left_s -= slices_s
        self._encoder.spent_s += slices_s
        return self._left_s <= 0


def _further(all_drafts: Items[tuple[int, ...]]) -> dict[int, FurtherTokens]:
    """After drafts that are right, by row."""
    nums = [
        drafts.index(_OTHER_ID) if _OTHER_ID in drafts else len(drafts) for drafts in all_drafts
    ]
    return {row: FurtherTokens([TOKEN_ID] * num) for row, num in enumerate(nums) if num}


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """`PendingTokens` of a step that ends at a time known in advance. rest_s: how long the last
    stage computes after that, once it is waited for; None where there is one stage."""

    executor: PredictedExecutor
    clock: VirtualClock
    sampled: SampledTokens
    end_s: float
    rest_s: float | None
    host_s: float

    def wait(self) -> SampledTokens:
        self.clock.advance_to(self.end_s)
        if self.rest_s is not None:
            end_s = self.executor.pass_stage(-1, self.clock.now_s, self.rest_s)
            self.clock.advance_to(end_s)
        self.executor.host_s = self.host_s
        return self.sampled
