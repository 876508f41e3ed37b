"""`LiveStepModel`: what a server expects of its next steps, while it learns from its own.

It begins with a model that was made before, a calibration or a datasheet's, and goes over to the
coefficients fitted to the steps of this server as soon as those are closer, class by class. Beside
the coefficients it follows how long steps take for what is expected of them, at the mean and at the
long end: a machine that becomes slower is followed within tens of steps, a fit takes thousands.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.scheduler.stats import GraphSizes, StepClass, StepWork
from penstock.scheduler.step_model.amounts import (
    DEVICE_UNITS,
    HOST_UNITS,
    Amounts,
    AttentionGroup,
    device_row,
    host_row,
)
from penstock.scheduler.step_model.least_squares import NormalEquations
from penstock.scheduler.step_model.model import StepModel
from penstock.scheduler.step_model.samples import StepSample

# Where the time of tokens bends if no model that was made before knows it.
_KNEE = 16
# One in so many decode steps, which are most steps and alike, is learned from.
_DECODES_EVERY = 8
# So many steps of a class must be learned from before what was learned of it counts; the errors of
# the first few are those of a fit that has hardly begun.
_MIN_LEARNED = 24
_MIN_FITTED = 8
# Each new step is this share of a mean.
_NEW_SHARE = 0.05
# The long end: this share of the steps of a class take no longer. One in fifty may, so that of all
# gaps between tokens, some of which are of shorter steps, one in a hundred does.
_TAIL = 0.98
_TAIL_STEP = 0.04
# A step that something stopped, by more than this, says nothing of the next ones.
_MAX_RATIO = 4.0
_MAX_TAIL = 1.5
# Half of what is known is of the last 7,000 steps: minutes of a busy server.
_MEMORY = 0.9999
_FADE_EVERY = 64


class SteppedModel(Protocol):
    """The properties of a model by which its steps are predicted: see `ModelInfo`."""

    @property
    def attention(self) -> tuple[AttentionGroup, ...]: ...
    @property
    def runs_ahead(self) -> bool: ...
    @property
    def graph_sizes(self) -> GraphSizes: ...
    def amounts(self, work: StepWork) -> Amounts: ...


class Expected(NamedTuple):
    """Steps of one class are expected to take `model`'s time, times `mean`; at the long end, times
    `tail`."""

    model: StepModel
    mean: float
    tail: float


@dataclass(slots=True)
class _Track:
    """How far one model was off for the steps of one class: measured over predicted. error: the
    mean relative one."""

    num: int = 0
    mean: float = 1.0
    tail: float = 1.0
    error: float = 1.0

    def add(self, predicted_s: float, measured_s: float) -> None:
        ratio = measured_s / max(predicted_s, 1e-9)
        ratio = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
        self.num += 1
        share = max(_NEW_SHARE, 1 / self.num)
        self.mean += share * (ratio - self.mean)
        self.error += share * (abs(1 / ratio - 1) - self.error)
        # A quantile, by stochastic approximation (Robbins and Monro 1951).
        above = ratio > self.tail
        self.tail *= 1 + _TAIL_STEP * (_TAIL if above else _TAIL - 1)
        self.tail = min(max(self.tail, self.mean), _MAX_TAIL * self.mean)


class OnlineFit:
    """The coefficients while a server runs, for a bounded time a step.

    Each step adds one sample to the sums, in which older ones fade, and moves the coefficients once
    towards the solution. Nothing grows.
    """

    def __init__(self, *, runs_ahead: bool, knee: int) -> None:
        """knee: see `device_row`; nothing here finds another."""
        self._runs_ahead = runs_ahead
        self._knee = knee
        self._device = [0.0] * len(DEVICE_UNITS)
        self._host = [0.0] * len(HOST_UNITS)
        self._device_sums = NormalEquations(len(DEVICE_UNITS))
        self._host_sums = NormalEquations(len(HOST_UNITS))
        self._num_steps = 0

    def observe(self, sample: StepSample) -> None:
        amounts = sample.amounts
        self._num_steps += 1
        if sample.device_s:
            row = device_row(amounts, self._knee)
            self._device_sums.add(row, sample.device_s, sample.device_s**-2)
            self._device_sums.sweep(self._device)
        if sample.host_s > 0:
            self._host_sums.add(host_row(amounts), sample.host_s, sample.host_s**-2)
            self._host_sums.sweep(self._host)
        if self._num_steps % _FADE_EVERY == 0:
            self._device_sums.fade(_MEMORY**_FADE_EVERY)
            self._host_sums.fade(_MEMORY**_FADE_EVERY)

    def model(self) -> StepModel:
        """As of now; without errors and ranges, which take samples that were held out."""
        return StepModel(
            device=tuple(self._device),
            host=tuple(self._host),
            knee=self._knee,
            runs_ahead=self._runs_ahead,
        )


class LiveStepModel:
    """One for a scheduler and the loop that runs its steps."""

    def __init__(self, served: SteppedModel, start: StepModel | None = None) -> None:
        """start: None where nothing is known before the first steps."""
        self.served = served
        self._start = start
        knee = start.knee if start else _KNEE
        self._online = OnlineFit(runs_ahead=served.runs_ahead, knee=knee)
        self._fitted = self._online.model()
        self._start_tracks = {kind: _Track() for kind in StepClass}
        self._fit_tracks = {kind: _Track() for kind in StepClass}
        self._num_seen = dict.fromkeys(StepClass, 0)
        self._num_learned = 0

    def expected(self, kind: StepClass) -> Expected | None:
        """None where nothing is known yet of steps of this class."""
        fit, start = self._fit_tracks[kind], self._start_tracks[kind]
        is_fitted = fit.num >= _MIN_LEARNED
        if self._start and not (is_fitted and fit.error < start.error):
            return Expected(self._start, start.mean, start.tail)
        return Expected(self._fitted, fit.mean, fit.tail) if is_fitted else None

    def predict(self, amounts: Amounts, kind: StepClass) -> float | None:
        """Seconds from the end of the step before to the end of this one, while there is work."""
        expected = self.expected(kind)
        if expected is None:
            return None
        return expected.mean * expected.model.cycle_s(amounts)

    def is_trusted(self, kind: StepClass) -> bool:
        """Whether what is expected was confirmed: by steps of this server, or by a calibration."""
        if self._fit_tracks[kind].num >= _MIN_LEARNED:
            return True
        errors = self._start.errors if self._start else {}
        return kind in errors and errors[kind].num_steps > 0

    def observe(self, sample: StepSample) -> None:
        kind = sample.kind
        self._num_seen[kind] = num = self._num_seen[kind] + 1
        if kind is StepClass.DECODE and num > _MIN_LEARNED and num % _DECODES_EVERY:
            return
        if self._start:
            self._start_tracks[kind].add(self._start.cycle_s(sample.amounts), sample.cycle_s)
        if self._num_learned >= _MIN_FITTED:
            self._fit_tracks[kind].add(self._fitted.cycle_s(sample.amounts), sample.cycle_s)
        self._num_learned += 1
        self._online.observe(sample)
        self._fitted = self._online.model()
