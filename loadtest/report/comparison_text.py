"""A comparison as a table for the terminal."""

from collections.abc import Callable

from penstock.loadtest.report.comparison import Comparison, Metric, Row, Value


def comparison_text(comparison: Comparison) -> str:
    """Each value; of all sides but the first, the ratio to the first and which is better."""
    sides = [f"{side.name}  {side.described()}" for side in comparison.sides]
    rows = [_head(comparison.names), *(_cells(row, comparison.names) for row in comparison.rows)]
    return "\n".join([*sides, "", *aligned(rows, _is_text)])


def _head(names: list[str]) -> list[str]:
    first, *others = names
    cells = ["", first]
    for name in others:
        cells += [name, f"{name}/{first}", "better"]
    return cells


def _cells(row: Row, names: list[str]) -> list[str]:
    cells = [row.metric.label, _value(row.metric, row.values[0])]
    for index in range(1, len(names)):
        ratio = row.ratio(index)
        cells.append(_value(row.metric, row.values[index]))
        cells.append("-" if ratio is None else f"{ratio:.3f}")
        cells.append(row.verdict(index, names))
    return cells


def _value(metric: Metric, value: Value | None) -> str:
    if value is None:
        return "-"
    shown = metric.shown(value.middle)
    if value.low == value.high:
        return shown
    return f"{shown} ({metric.shown(value.low)}-{metric.shown(value.high)})"


def aligned(
    rows: list[list[str]], is_text: Callable[[int], bool] = lambda column: column == 0
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


def _is_text(column: int) -> bool:
    """The label, and after each side's value and ratio which is better."""
    return column == 0 or (column >= 4 and column % 3 == 1)
