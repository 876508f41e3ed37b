"""Draws figures as inline SVG, in the classes and colours that the page's style defines.

A drawing is as wide as one column of the page, so that its text is readable in a narrow window.
"""

import math
from html import escape

from penstock.loadtest.report.figures import (
    PARTS,
    Bars,
    Figure,
    Lines,
    Mark,
    Series,
    Timeline,
    Value,
)

NUM_COLOURS = 5
WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 66, 22, 12, 44
# Beside the plot: the names and values of marks, one above the other.
MARKS_WIDTH, LABEL_HEIGHT = 96, 16
NUM_TICKS = 5
ROW_HEIGHT = 2
BAR_HEIGHT, GROUP_GAP, BAR_LABEL_WIDTH = 15, 8, 62


def figure_html(figure: Figure | Bars) -> str:
    if isinstance(figure, Timeline):
        return _frame(figure.title, _timeline(figure), list(PARTS))
    if isinstance(figure, Bars):
        return _frame(figure.title, _bars(figure), figure.names)
    names = [series.name if series.xs else "" for series in figure.series]
    return _frame(figure.title, _lines(figure), names)


def _frame(title: str, svg: str, names: list[str]) -> str:
    """names: the legend, by colour; empty for a series without data."""
    keys = ""
    if len(names) > 1:
        keys = "".join(
            f'<span class="key"><i class="f{index}"></i>{escape(name)}</span>'
            for index, name in enumerate(names)
            if name
        )
    return f"<figure><figcaption>{escape(title)}</figcaption>{keys}{svg}</figure>"


class _Scale:
    """From values to coordinates; the axis runs from 0 to a round number."""

    def __init__(self, highest: float, start: float, end: float) -> None:
        self.ticks = ticks(highest)
        self._start, self._per_unit = start, (end - start) / self.ticks[-1]

    def __call__(self, value: float) -> float:
        return self._start + value * self._per_unit


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to the first at or above `highest`, NUM_TICKS or a few fewer."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / (NUM_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    num = max(1, math.ceil(highest / step - 1e-6))
    return [index * step for index in range(num + 1)]


def _lines(figure: Lines) -> str:
    highest_x = max(max(series.xs, default=0.0) for series in figure.series)
    highest_y = max(max(series.ys, default=0.0) for series in figure.series)
    right = WIDTH - (MARKS_WIDTH if figure.marks else RIGHT)
    x = _Scale(highest_x, LEFT, right)
    y = _Scale(highest_y, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, figure.x_label, figure.y_label, HEIGHT, right)]
    for index, series in enumerate(figure.series):
        if series.has_line:
            points = zip(map(x, series.xs), map(y, series.ys), strict=True)
            path = " ".join(f"{at:.1f},{value:.1f}" for at, value in points)
            parts.append(f'<polyline class="line s{index}" points="{path}"/>')
        if series.has_marks:
            parts += _points(series, index, x, y)
    parts += _marks(figure.marks, x, y, right)
    return _svg(figure.title, HEIGHT, "".join(parts))


def _points(series: Series, index: int, x: _Scale, y: _Scale) -> list[str]:
    return [
        f'<circle class="f{index}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3">'
        f"<title>{escape(series.name)}: {value:.4g} at {at:.4g}</title></circle>"
        for at, value in zip(series.xs, series.ys, strict=True)
    ]


def _marks(marks: list[Mark], x: _Scale, y: _Scale, right: float) -> list[str]:
    """Each with a line to its name and value at the right, where labels keep their distance."""
    parts, label_y = [], 0.0
    for mark in sorted(marks, key=lambda mark: -mark.y):
        at_x, at_y = x(mark.x), y(mark.y)
        label_y = max(at_y, label_y + LABEL_HEIGHT)
        parts += [
            f'<path class="mark" d="M{at_x:.1f} {at_y:.1f}H{right}L{right + 8} {label_y:.1f}"/>',
            f'<circle class="f1" cx="{at_x:.1f}" cy="{at_y:.1f}" r="3"/>',
            _text(right + 11, label_y + 4, f"{mark.name} {short_number(mark.x)}", "start"),
        ]
    return parts


def short_number(value: float) -> str:
    """Three digits or more, as 0.0123, 1.23, 12.3, 123 and 1,234."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _timeline(figure: Timeline) -> str:
    height = TOP + BOTTOM + max(100, ROW_HEIGHT * len(figure.rows))
    row_height = (height - TOP - BOTTOM) / len(figure.rows)
    highest = max((span.end_s for row in figure.rows for span in row), default=0.0)
    x = _Scale(highest, LEFT, WIDTH - RIGHT)
    bars = [
        f'<rect class="f{PARTS.index(span.part)}" x="{x(span.start_s):.1f}" '
        f'y="{TOP + row * row_height:.1f}" height="{row_height * 0.8:.1f}" '
        f'width="{max(0.3, x(span.end_s) - x(span.start_s)):.1f}"/>'
        for row, spans in enumerate(figure.rows)
        for span in spans
    ]
    axes = _axes(x, None, figure.x_label, "requests", height)
    return _svg(figure.title, height, axes + "".join(bars))


def _bars(figure: Bars) -> str:
    """One group under the other; a thin line over a bar is the range of its runs."""
    group_height = BAR_HEIGHT * len(figure.names) + GROUP_GAP
    height = TOP + BOTTOM + group_height * len(figure.groups)
    right = WIDTH - BAR_LABEL_WIDTH
    highest = max((bar.high for _, bars in figure.groups for bar in bars if bar), default=0.0)
    x = _Scale(highest, LEFT, right)
    parts = [_axes(x, None, figure.x_label, "", height, right)]
    for number, (name, bars) in enumerate(figure.groups):
        top = TOP + number * group_height
        parts.append(_text(LEFT - 6, top + (group_height - GROUP_GAP) / 2 + 4, name, "end"))
        for index, bar in enumerate(bars):
            if bar is not None:
                parts.append(_bar(bar, index, top + index * BAR_HEIGHT, x))
    return _svg(figure.title, height, "".join(parts))


def _bar(bar: Value, index: int, top: float, x: _Scale) -> str:
    middle, left = top + BAR_HEIGHT / 2, x(0)
    parts = [
        f'<rect class="f{index}" x="{left:.1f}" y="{top + 1:.1f}" height="{BAR_HEIGHT - 3}" '
        f'width="{max(0.3, x(bar.middle) - left):.1f}"/>'
    ]
    if bar.high > bar.low:
        ends = f"M{x(bar.low):.1f} {middle:.1f}H{x(bar.high):.1f}"
        parts.append(f'<path class="range" d="{ends}"/>')
    end = max(x(bar.middle), x(bar.high))
    parts.append(_text(end + 4, middle + 3, short_number(bar.middle), "start"))
    return "".join(parts)


def _axes(
    x: _Scale,
    y: _Scale | None,
    x_label: str,
    y_label: str,
    height: int,
    right: float = WIDTH - RIGHT,
) -> str:
    floor, middle = height - BOTTOM, (TOP + height - BOTTOM) / 2
    parts = []
    for tick in x.ticks:
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {TOP}V{floor}"/>')
        parts.append(_text(x(tick), floor + 16, f"{tick:,.6g}", "middle"))
    if y is not None:
        for tick in y.ticks:
            parts.append(f'<path class="axis" d="M{LEFT} {y(tick):.1f}H{right}"/>')
            parts.append(_text(LEFT - 6, y(tick) + 4, f"{tick:,.6g}", "end"))
    parts.append(_text((LEFT + right) / 2, height - 6, x_label, "middle"))
    turned = f' transform="rotate(-90 14 {middle:.1f})"'
    return "".join([*parts, _text(14, middle, y_label, "middle", turned) if y_label else ""])


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _svg(title: str, height: int, inner: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{inner}</svg>"
