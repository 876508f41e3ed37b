"""Steps that ran, for `penstock calibrate`, and how well they were predicted.

A step costs some microseconds here and, however many there were, a few hundred are kept.
"""

import time
from typing import Any

from penstock.engine.client import EngineClient, ModelInfo, StepReport
from penstock.scheduler.stats import class_of
from penstock.scheduler.step_model.samples import StepSamples, sample_of
from penstock.server.observability.predictions import Predictions


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
        if not report.step:
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
