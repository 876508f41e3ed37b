"""`Predictions`: what was predicted beside what came of it, for metrics.

Steps as the engine predicts them when it launches them, first tokens as it does when their request
arrives, and targets.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from penstock.scheduler.stats import StepClass
from penstock.server.observability.exposition import counter, gauge
from penstock.server.observability.histograms import REQUEST_SECONDS, Histogram, HistogramFamily

# Each new step is this share of the mean error.
_NEW_SHARE = 0.02
_OUTCOMES = [(slo, outcome) for slo in ("ttft", "tpot") for outcome in ("met", "missed")]
_OUTCOMES.append(("ttft", "refused"))


class Predictions:
    """step_errors: by class, the mean relative error of the latest steps."""

    def __init__(self) -> None:
        self.step_errors: dict[StepClass, float] = {}
        self._predicted_s = dict.fromkeys(StepClass, 0.0)
        self._measured_s = dict.fromkeys(StepClass, 0.0)
        self._num_steps = dict.fromkeys(StepClass, 0)
        self._predicted_ttft = Histogram(REQUEST_SECONDS)
        self._ttft_error = Histogram(REQUEST_SECONDS)
        self._targets: Counter[tuple[str, str]] = Counter()

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
        self._predicted_ttft.observe(predicted_s)
        self._ttft_error.observe(abs(predicted_s - measured_s))

    def on_target(self, slo: str, *, is_met: bool) -> None:
        """slo: ttft or tpot."""
        self._targets[slo, "met" if is_met else "missed"] += 1

    def on_refused(self) -> None:
        """A request that would have missed its target."""
        self._targets["ttft", "refused"] += 1

    def histograms(self) -> list[HistogramFamily]:
        return [
            HistogramFamily(f"penstock_{name}", help_text, [({}, histogram)])
            for name, histogram, help_text in (
                (
                    "predicted_time_to_first_token_seconds",
                    self._predicted_ttft,
                    "TTFT expected at the arrival of requests with a target that were accepted",
                ),
                (
                    "ttft_prediction_error_seconds",
                    self._ttft_error,
                    "Distance of the measured TTFT from the expected one",
                ),
            )
        ]

    def metrics(self) -> Iterator[Metric]:
        families: dict[str, tuple[Mapping[StepClass, float], str]] = {
            "predicted_steps": (self._num_steps, "Steps whose time was predicted at their launch"),
            "step_predicted_seconds": (self._predicted_s, "Predicted time of these steps"),
            "step_measured_seconds": (
                self._measured_s,
                "Measured time of these steps, from the end of one to that of the next",
            ),
        }
        for name, (by_class, help_text) in families.items():
            yield counter(name, help_text, by_class, "class")
        yield gauge(
            "step_prediction_error_ratio",
            "Mean relative error of the predicted time of the latest steps",
            self.step_errors,
            "class",
        )
        yield counter(
            "slo_attained",
            "Targets of answers (tpot) and of their first tokens (ttft), by what came of them",
            {outcome: self._targets[outcome] for outcome in _OUTCOMES},
            *("slo", "outcome"),
        )
