"""`OnlineFit`: the coefficients while a server runs, for a bounded time a step.

Each step adds one sample to the sums, in which older ones fade, and moves the coefficients once
towards the solution. Nothing grows.
"""

from penstock.scheduler.step_model.amounts import (
    DEVICE_UNITS,
    HOST_UNITS,
    device_row,
    host_row,
)
from penstock.scheduler.step_model.least_squares import NormalEquations
from penstock.scheduler.step_model.model import StepModel
from penstock.scheduler.step_model.samples import StepSample

# Half of what is known is of the last 7,000 steps: minutes of a busy server.
_MEMORY = 0.9999
_FADE_EVERY = 64


class OnlineFit:
    """knee: see `device_row`; nothing here finds another."""

    def __init__(self, *, runs_ahead: bool, knee: int) -> None:
        self._runs_ahead = runs_ahead
        self._knee = knee
        self._device = [0.0] * len(DEVICE_UNITS)
        self._host = [0.0] * len(HOST_UNITS)
        self._device_sums = NormalEquations(len(DEVICE_UNITS))
        self._host_sums = NormalEquations(len(HOST_UNITS))
        self._num_steps = 0

    def observe(self, sample: StepSample) -> None:
        """Learns from a step. O(1)."""
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
