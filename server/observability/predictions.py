"""Predictions beside what came of them, for metrics, and the steps that `penstock calibrate` reads.

Steps are predicted by the engine when it launches them, first tokens when their request arrives. A
step costs some microseconds here and, however many there were, a few hundred are kept.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric

from penstock.engine.client import EngineClient, ModelInfo, StepReport
from penstock.scheduler.stats import StepClass, class_of
from penstock.scheduler.step_model.samples import StepSamples, sample_of
from penstock.server.observability.exposition import Histogram, counter, described, gauge

# Each new step is this share of the mean error.
_NEW_SHARE = 0.02
_OUTCOMES = [(slo, outcome) for slo in ("ttft", "tpot") for outcome in ("met", "missed")]
_OUTCOMES.append(("ttft", "refused"))


@dataclass(eq=False)
class Predictions:
    """step_errors: by class, the mean relative error of the latest steps."""

    step_errors: dict[StepClass, float] = field(default_factory=dict)
    predicted_ttft: Histogram = described("predicted_time_to_first_token_seconds")
    ttft_error: Histogram = described("ttft_prediction_error_seconds")

    def __post_init__(self) -> None:
        self._predicted_s = dict.fromkeys(StepClass, 0.0)
        self._measured_s = dict.fromkeys(StepClass, 0.0)
        self._num_steps = dict.fromkeys(StepClass, 0)
        self.targets: Counter[tuple[str, str]] = Counter()

    def on_step(self, kind: StepClass, predicted_s: float, measured_s: float) -> None:
        """measured_s: from the end of the step before, without idleness."""
        self._num_steps[kind] += 1
        self._predicted_s[kind] += predicted_s
        self._measured_s[kind] += measured_s
        error = abs(predicted_s / max(measured_s, 1e-9) - 1.0)
        before = self.step_errors.get(kind, error)
        self.step_errors[kind] = before + _NEW_SHARE * (error - before)

    def on_first_token(self, predicted_s: float, measured_s: float) -> None:
        """Counts the first token of a request with a target for its TTFT."""
        self.predicted_ttft.observe(predicted_s)
        self.ttft_error.observe(abs(predicted_s - measured_s))

    def on_target(self, slo: str, *, is_met: bool) -> None:
        """slo: ttft or tpot."""
        self.targets[slo, "met" if is_met else "missed"] += 1

    def metrics(self) -> Iterator[Metric]:
        yield counter("predicted_steps", self._num_steps, "class")
        yield counter("step_predicted_seconds", self._predicted_s, "class")
        yield counter("step_measured_seconds", self._measured_s, "class")
        yield gauge("step_prediction_error_ratio", self.step_errors, "class")
        attained = {outcome: self.targets[outcome] for outcome in _OUTCOMES}
        yield counter("slo_attained", attained, "slo", "outcome")


class StepRecord:
    """Records the steps of one model, in whatever processes it runs. Reports come in the order of
    the steps."""

    def __init__(self, model: ModelInfo, predictions: Predictions) -> None:
        self._model = model
        self._predictions = predictions
        self._samples = StepSamples()
        self._last_end_s = 0.0
        self._num_steps = 0  # of all engines: each counts its own from 1

    def watch(self, engine: EngineClient) -> None:
        engine.on_step(self.on_step)
        engine.on_restart(self.on_restart)

    def on_restart(self) -> None:
        """The first steps of the next engine are left out, as those of this one were."""
        self._samples.warm_up()

    def on_step(self, report: StepReport) -> None:
        if not report.step or not report.work.num_sequences:
            return
        self._num_steps += 1
        was_idle = report.started_s > self._last_end_s
        self._last_end_s = report.started_s + report.step_s
        model = self._model
        if model.runs_ahead and was_idle:
            return  # nothing ran while it was launched, unlike in all steps after it
        kind = class_of(report.work)
        self._samples.add(
            sample_of(
                self._num_steps,
                kind,
                model.amounts(report.work),
                wait_s=report.device_s,
                host_s=report.host_s,
                runs_ahead=model.runs_ahead,
            )
        )
        if report.predicted_s is not None:
            self._predictions.on_step(kind, report.predicted_s, report.device_s + report.host_s)

    def as_json(self) -> dict[str, Any]:
        """prediction_error: by class, of the latest steps, relative. num_steps: that there were.
        front_end_cpu_s: of this process, until now. steps: those that are kept."""
        return {
            "model": self._model,
            "prediction_error": self._predictions.step_errors,
            "num_steps": self._num_steps,
            "front_end_cpu_s": time.process_time(),
            "steps": self._samples.all(),
        }
