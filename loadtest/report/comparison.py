"""Two or more results side by side: the numbers of each, their ratio, and which is better.

Reads the files of `penstock bench` and of `vllm bench serve`, which have the same keys. A side is
one run or several of the same workload: then its value is their median, and a difference counts
only where the ranges of the runs do not overlap.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from penstock.loadtest.report.figures import Value
from penstock.loadtest.report.report import LATENCIES, METRIC_TITLES, Summary, readable_date
from penstock.scheduler.errors import InvalidConfig

MIN_SIDES, MAX_SIDES = 2, 5
# The numbers depend on these; two runs that differ in one of these had other workloads.
_SETTINGS = (
    *("model_id", "dataset_name", "dataset_path", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("random_prefix_len", "random_input_len", "random_output_len", "random_range_ratio"),
    *("trace_speedup", "ignore_eos", "temperature", "goodput", "min_goodput_ratio"),
)
# Totals that differ by more than this share come from other prompts or other output lengths.
_TOTALS, _NOTABLE_SHARE = ("total_input_tokens", "total_output_tokens"), 0.02
_STATISTIC = re.compile(rf"(mean|median|p\d+(?:\.\d+)?)_({'|'.join(LATENCIES)})_ms")
WITHIN_SPREAD, SAME = "within spread", "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """is_higher_better: None where neither is."""

    key: str
    label: str
    is_higher_better: bool | None

    def shown(self, value: float) -> str:
        if value == int(value) and self.key in ("completed", "failed"):
            return f"{value:,.0f}"
        return f"{value:.4f}" if 0 < value < 0.1 else f"{value:,.2f}"


_METRICS = (
    Metric(key="max_request_rate", label="Highest rate that meets SLO", is_higher_better=True),
    Metric(key="completed", label="Successful requests", is_higher_better=None),
    Metric(key="failed", label="Failed requests", is_higher_better=False),
    Metric(key="request_throughput", label="Requests/s", is_higher_better=True),
    Metric(key="request_goodput", label="Good requests/s", is_higher_better=True),
    Metric(key="goodput_ratio", label="Share of good requests", is_higher_better=True),
    Metric(key="output_throughput", label="Output tokens/s", is_higher_better=True),
    Metric(key="max_output_tokens_per_s", label="Peak output tokens/s", is_higher_better=True),
    Metric(key="total_token_throughput", label="Total tokens/s", is_higher_better=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """name: a letter. paths: as given."""

    name: str
    paths: str
    runs: list[Summary]

    def described(self) -> str:
        """Names the file, the model and the date."""
        first = self.runs[0]
        parts = [str(first.get("label") or ""), str(first.get("model_id") or "")]
        parts.append(readable_date(str(first.get("date") or "")))
        if len(self.runs) > 1:
            parts.append(f"median of {len(self.runs)} runs")
        return f"{self.paths}: {', '.join(part for part in parts if part)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """values: one for each side; the first is what the others are compared with."""

    metric: Metric
    values: list[Value | None]

    def ratio(self, index: int) -> float | None:
        """This side's value over that of the first."""
        first, other = self.values[0], self.values[index]
        return other.middle / first.middle if first and other and first.middle else None

    def verdict(self, index: int, names: list[str]) -> tuple[str, bool | None]:
        """The name of the better of this side and the first, or why there is none; and whether
        this side is the better one, None where no difference counts."""
        first, other = self.values[0], self.values[index]
        if self.metric.is_higher_better is None or not (first and other):
            return "", None
        if first.middle == other.middle:
            return SAME, None
        is_repeated = first.num + other.num > 2
        if is_repeated and first.low <= other.high and other.low <= first.high:
            return WITHIN_SPREAD, None
        is_better = (other.middle > first.middle) is self.metric.is_higher_better
        return names[index if is_better else 0], is_better


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """notes: why the numbers may not be comparable."""

    sides: list[Side]
    rows: list[Row]
    notes: list[str]

    @property
    def names(self) -> list[str]:
        return [side.name for side in self.sides]


@dataclass(frozen=True, slots=True)
class Cell:
    """is_better: whether it says that this side is better than the first, or worse."""

    text: str
    is_number: bool = False
    is_better: bool | None = None


def table(
    comparison: Comparison, spread: Callable[[str, str], str]
) -> tuple[list[Cell], list[list[Cell]]]:
    """The head and the rows: each value; for all sides but the first, the ratio to the first and
    which is better. spread: how the range of repeated runs is shown, from low and high."""
    first, *others = names = comparison.names

    def value_cell(row: Row, index: int) -> Cell:
        value, shown = row.values[index], row.metric.shown
        if value is None:
            return Cell("-", is_number=True)
        around = "" if value.low == value.high else spread(shown(value.low), shown(value.high))
        return Cell(shown(value.middle) + around, is_number=True)

    head, rows = [Cell(""), Cell(first, is_number=True)], []
    for name in others:
        head += [Cell(name, True), Cell(f"{name}/{first}", True), Cell("better")]
    for row in comparison.rows:
        cells = [Cell(row.metric.label), value_cell(row, 0)]
        for index in range(1, len(names)):
            ratio, (verdict, is_better) = row.ratio(index), row.verdict(index, names)
            shown = "-" if ratio is None else f"{ratio:.3f}"
            cells += [value_cell(row, index), Cell(shown, True, is_better)]
            cells.append(Cell(verdict, is_better=is_better))
        rows.append(cells)
    return head, rows


def read_sides(arguments: list[str]) -> list[Side]:
    """Each argument is a side: a file, or the files of repeated runs with commas between them.
    Raises InvalidConfig."""
    if not MIN_SIDES <= len(arguments) <= MAX_SIDES:
        raise InvalidConfig(
            f"give {MIN_SIDES} to {MAX_SIDES} results to compare; commas join the files of "
            "repeated runs, as in a1.json,a2.json b1.json,b2.json"
        )
    sides = []
    for name, argument in zip("ABCDE", arguments, strict=False):
        paths = [argument] if Path(argument).exists() else argument.split(",")
        runs = [run for path in paths for run in read_results(Path(path))]
        sides.append(Side(name=name, paths=argument, runs=runs))
    return sides


def read_results(path: Path) -> list[Summary]:
    """The results in a file: one, or one a line as --append-result writes them. Raises
    InvalidConfig."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(f"{path} cannot be read: {why}") from error
    try:
        return [_checked(json.loads(text), f"{path}")]
    except json.JSONDecodeError:
        pass
    lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise InvalidConfig(f"{path} is empty")
    return [_decode(line, f"{path}, line {number}") for number, line in lines]


def _decode(line: str, where: str) -> Summary:
    try:
        return _checked(json.loads(line), where)
    except json.JSONDecodeError as error:
        raise InvalidConfig(f"{where}: it is not JSON ({error.msg})") from error


def _checked(result: object, where: str) -> Summary:
    if isinstance(result, dict) and ("completed" in result or "max_request_rate" in result):
        # Older vLLM has a key "request_goodput:".
        return {key.removesuffix(":"): value for key, value in result.items()}
    raise InvalidConfig(
        f"{where} is not a result of penstock bench --save-result or vllm bench serve --save-result"
    )


def compare(sides: list[Side]) -> Comparison:
    """Raises InvalidConfig if the results have no number in common."""
    metrics = [*_METRICS, *_latency_metrics(sides)]
    rows = [Row(metric=each, values=[_value(side, each.key) for side in sides]) for each in metrics]
    rows = [row for row in rows if sum(value is not None for value in row.values) > 1]
    if not rows:
        raise InvalidConfig(
            "the results have no number in common; compare sweeps with sweeps, and runs with runs"
        )
    return Comparison(sides=sides, rows=rows, notes=_notes(sides))


def _latency_metrics(sides: list[Side]) -> list[Metric]:
    """In the order of the report: mean, median, then percentiles."""
    found = {key for side in sides for run in side.runs for key in run if _STATISTIC.fullmatch(key)}

    def order(key: str) -> tuple[int, float]:
        name, metric, _ = key.split("_")
        rank = {"mean": -2.0, "median": -1.0}.get(name)
        return LATENCIES.index(metric), float(name[1:]) if rank is None else rank

    return [
        Metric(
            key=key,
            label=f"{name.capitalize()} {METRIC_TITLES[metric][0]}, ms",
            is_higher_better=False,
        )
        for key in sorted(found, key=order)
        for name, metric, _ in [key.split("_")]
    ]


def _value(side: Side, key: str) -> Value | None:
    values = [value for run in side.runs if (value := _number(run.get(key))) is not None]
    return value_of(values)


def value_of(values: list[float]) -> Value | None:
    return Value(median(values), min(values), max(values), len(values)) if values else None


def _number(value: object) -> float | None:
    """vLLM writes NaN where it has no value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _notes(sides: list[Side]) -> list[str]:
    notes = []
    for key in _SETTINGS:
        notes += _difference(sides, key)
    for key in _TOTALS:
        notes += _difference_of_totals(sides, key)
    for side in sides:
        num = sum(bool(run.get("is_interrupted")) for run in side.runs)
        if num:
            notes.append(f"{num} of the {len(side.runs)} runs of {side.name} were interrupted")
    single = [side.name for side in sides if len(side.runs) == 1]
    if len(single) > 1:
        notes.append(
            f"{' and '.join(single)} are one run each, which does not show what is chance: repeat "
            "them with --append-result, which gives each value a range"
        )
    return notes


def _difference(sides: list[Side], key: str) -> list[str]:
    """A sentence if the sides differ; a setting that a tool does not write is not compared."""
    given = {
        side.name: sorted({_shown(run[key]) for run in side.runs if key in run}) for side in sides
    }
    if len({tuple(values) for values in given.values() if values}) <= 1:
        return []
    parts = [f"{' and '.join(values)} in {name}" for name, values in given.items() if values]
    return [f"the workloads differ: {key} is {', '.join(parts)}"]


def _difference_of_totals(sides: list[Side], key: str) -> list[str]:
    values = {side.name: value for side in sides if (value := _value(side, key))}
    middles = [value.middle for value in values.values()]
    if not middles or max(middles) - min(middles) <= _NOTABLE_SHARE * max(middles):
        return []
    parts = [f"{value.middle:,.0f} in {name}" for name, value in values.items()]
    return [f"the workloads differ: {key} is {', '.join(parts)}"]


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, dict):
        return " ".join(f"{name}:{_shown(each)}" for name, each in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def comparison_text(comparison: Comparison) -> str:
    sides = [f"{side.name}  {side.described()}" for side in comparison.sides]
    head, rows = table(comparison, lambda low, high: f" ({low}-{high})")
    cells = [[cell.text for cell in row] for row in (head, *rows)]
    return "\n".join([*sides, "", *aligned(cells, lambda column: not head[column].is_number)])


def aligned(
    rows: Sequence[Sequence[str]], is_text: Callable[[int], bool] = lambda column: column == 0
) -> list[str]:
    """Columns of text to the left, of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if is_text(column) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
