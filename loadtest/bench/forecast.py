"""`Forecast`: what a plan says that a measurement will find, and the comparison of the two."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.report.report import Replay, ReportConfig, Summary, summarize
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.scheduler.errors import InvalidConfig

REPORT = ReportConfig(percentiles=(50.0, 99.0))
# Figure, key, and by how much a measurement may be off besides: the aims of the comparison of
# predicted with measured figures (docs/simulation.md).
FIGURES = (
    ("requests/s", "request_throughput", 0.10),
    ("output tokens/s", "output_throughput", 0.10),
    ("TTFT p50, ms", "p50_ttft_ms", 0.15),
    ("TTFT p99, ms", "p99_ttft_ms", 0.15),
    ("TPOT p50, ms", "p50_tpot_ms", 0.05),
    ("TPOT p99, ms", "p99_tpot_ms", 0.05),
    ("E2EL p99, ms", "p99_e2el_ms", 0.15),
)
# A bar whose ends are further apart holds a server twice as fast as the forecast and one half as
# fast. If the target is in it too, neither a surprise nor a missed target is outside of it.
MAX_BAR_RATIO = 4.0
TOO_WIDE = (
    f"such an error bar holds its target, and its ends are more than {MAX_BAR_RATIO:g} times "
    "apart, as a server twice as fast as the forecast is from one half as fast"
)
# The exit status where no measurement could refute: neither 0 nor 1 would be true.
UNTESTABLE = 3
# A model's limits or a client's choice of format change these; a plan does not depend on them.
_NOT_COMPARED = ("max_model_len", "prompt_format", "vocab_size", "is_chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastFigure:
    """low, high: the error bar, ends included."""

    figure: str
    key: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.figure.partition(',')[0]} {self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Figures of a server under a load. load: see `load_of`. targets_ms: of 99th percentiles."""

    load: dict[str, str]
    targets_ms: dict[str, float]
    figures: list[ForecastFigure]

    @property
    def aimed_at(self) -> list[tuple[ForecastFigure, float]]:
        """The figures that have a target, with it. A target without a figure has no requests."""
        limits = {f"p99_{metric}_ms": limit for metric, limit in self.targets_ms.items()}
        return [(each, limits[each.key]) for each in self.figures if each.key in limits]

    @property
    def meets_targets(self) -> bool:
        return all(each.value <= limit for each, limit in self.aimed_at)

    @property
    def undecided(self) -> list[ForecastFigure]:
        """Those whose bar goes beyond the target; only they depend on a measurement."""
        return [each for each, limit in self.aimed_at if each.high > limit]

    @property
    def too_wide(self) -> list[ForecastFigure]:
        """The undecided ones whose bar tests nothing."""
        return [each for each in self.undecided if each.high > MAX_BAR_RATIO * each.low]

    @property
    def is_testable(self) -> bool:
        """Whether a measurement could refute it where it is undecided."""
        return not self.undecided or len(self.too_wide) < len(self.undecided)

    def value(self, key: str) -> float | None:
        return next((each.value for each in self.figures if each.key == key), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile:
    forecast: Forecast | None


@dataclass(frozen=True, slots=True)
class Checked:
    """One figure. measured: None where no request has it."""

    expected: ForecastFigure
    measured: float | None

    @property
    def is_within(self) -> bool:
        return (
            self.measured is not None and self.expected.low <= self.measured <= self.expected.high
        )


def load_of(config: WorkloadConfig) -> dict[str, str]:
    """All that makes two loads the same."""
    return {
        field.name: str(getattr(config, field.name))
        for field in fields(config)
        if field.name not in _NOT_COMPARED
    }


def read_forecast(path: Path, config: WorkloadConfig) -> Forecast:
    """Raises InvalidConfig, also where the load is another than the plan's."""
    try:
        expected = msgspec.json.decode(path.read_bytes(), type=_PlanFile).forecast
    except OSError as error:
        raise InvalidConfig(f"--check {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise InvalidConfig(f"--check {path} is not a file of penstock plan: {error}") from error
    if expected is None:
        raise InvalidConfig(f"--check {path} found no plan, so that nothing can be expected of it")
    given = load_of(config)
    for name, value in expected.load.items():
        if given.get(name) != value:
            raise InvalidConfig(
                f"--check: the plan expects what happens at {name}={value}, and here it is "
                f"{given.get(name)}; run the command that the plan ends with"
            )
    return expected


def check(forecast: Forecast, observed: Replay) -> list[Checked]:
    summary = summarize(observed, REPORT)
    return [Checked(each, summary[each.key]) for each in forecast.figures]


def check_table(forecast: Forecast, checked: list[Checked]) -> str:
    """A row for each figure, and the conclusion in a sentence."""
    lines = [f"{' Check of the plan ':=^72}"]
    lines.append(f"{'figure':<18}{'forecast':>10}  {'error bar':<22}{'measured':>10}  within")
    for each in checked:
        expected = each.expected
        bar = f"{expected.low:.2f} to {expected.high:.2f}"
        measured = "-" if each.measured is None else f"{each.measured:.2f}"
        within = "yes" if expected not in forecast.too_wide else "yes, too wide"
        lines.append(
            f"{expected.figure:<18}{expected.value:>10.2f}  {bar:<22}{measured:>10}  "
            f"{within if each.is_within else 'NO'}"
        )
    num, num_outside = len(checked), sum(not each.is_within for each in checked)
    if num_outside:
        conclusion = f"refuted: {num_outside} of {num} figures are outside of their error bars"
    elif not forecast.is_testable:
        conclusion = f"not tested: the error bars that hold a target are too wide: {TOO_WIDE}"
    else:
        conclusion = f"not refuted: all {num} figures are within their error bars"
    return "\n".join([*lines, "=" * 72, conclusion])


def check_summary(forecast: Forecast, checked: list[Checked]) -> Summary:
    """The keys that a check adds to a result."""
    rows: list[dict[str, Any]] = [
        msgspec.to_builtins(each.expected)
        | {"measured": each.measured, "is_within": each.is_within}
        for each in checked
    ]
    is_refuted = not all(each.is_within for each in checked)
    return {"check": rows, "is_refuted": is_refuted, "is_testable": forecast.is_testable}
