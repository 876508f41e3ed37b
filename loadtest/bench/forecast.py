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
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Figures of a server under a load. load: see `load_of`. targets_ms: of 99th percentiles."""

    load: dict[str, str]
    targets_ms: dict[str, float]
    figures: list[ForecastFigure]


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


def check(expected: Forecast, observed: Replay) -> list[Checked]:
    summary = summarize(observed, REPORT)
    return [Checked(each, summary[each.key]) for each in expected.figures]


def check_table(checked: list[Checked]) -> str:
    """A row for each figure, and the conclusion in a sentence."""
    lines = [f"{' Check of the plan ':=^72}"]
    lines.append(f"{'figure':<18}{'planned':>10}  {'error bar':<22}{'measured':>10}  within")
    for each in checked:
        expected = each.expected
        bar = f"{expected.low:.2f} to {expected.high:.2f}"
        measured = "-" if each.measured is None else f"{each.measured:.2f}"
        lines.append(
            f"{expected.figure:<18}{expected.value:>10.2f}  {bar:<22}{measured:>10}  "
            f"{'yes' if each.is_within else 'NO'}"
        )
    num, num_outside = len(checked), sum(not each.is_within for each in checked)
    conclusion = f"not refuted: all {num} figures are within their error bars"
    if num_outside:
        conclusion = f"refuted: {num_outside} of {num} figures are outside of their error bars"
    return "\n".join([*lines, "=" * 72, conclusion])


def check_summary(checked: list[Checked]) -> Summary:
    """The keys that a check adds to a result."""
    rows: list[dict[str, Any]] = [
        msgspec.to_builtins(each.expected)
        | {"measured": each.measured, "is_within": each.is_within}
        for each in checked
    ]
    return {"check": rows, "is_refuted": not all(each.is_within for each in checked)}
