"""A self-contained HTML file: numbers, and figures as inline SVG. It loads nothing else."""

import math
from html import escape

from penstock.loadtest.report.figures import PARTS, Figure, Lines, Series, Timeline
from penstock.loadtest.report.report import Summary

WIDTH, HEIGHT = 640, 300
WIDE = 2 * WIDTH  # spans both columns, so that its text has the size of the others'
LEFT, RIGHT, TOP, BOTTOM = 72, 28, 12, 42
NUM_TICKS = 6
ROW_HEIGHT = 5
CSS = """
:root{color-scheme:light dark;--page:#fff;--ink:#16181d;--soft:#5b6270;--grid:#e4e7ec;--c0:#2563eb;
--c1:#c2410c;--c2:#059669;--c3:#be123c}
@media(prefers-color-scheme:dark){:root{--page:#14161a;--ink:#e8eaee;--soft:#9aa2b1;--grid:#2b2f37;
--c0:#7aa7ff;--c1:#f59e5b;--c2:#4ade9f;--c3:#fb7185}}
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1340px;
margin:0 auto;padding:24px 16px}
h1{font-size:22px;margin:0}p,figcaption small{color:var(--soft)}h2{font-size:17px;margin:32px 0 8px}
.cards{display:flex;flex-wrap:wrap;gap:8px 32px}.cards b{display:block;font-size:22px}
.cards span{color:var(--soft)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:24px}
figure{margin:0}.wide{grid-column:1/-1}figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}.axis{stroke:var(--grid)}
.line{fill:none;stroke-width:1.8}pre{overflow-x:auto;font-size:13px}
table{border-collapse:collapse;font-size:14px}td,th{text-align:left;padding:2px 16px 2px 0}
td{font-variant-numeric:tabular-nums}i{display:inline-block;width:14px;height:3px;margin:0 6px 3px
0;vertical-align:middle}.key{font-size:13px;color:var(--soft);margin-right:16px}
""" + "".join(
    f".s{n}{{stroke:var(--c{n})}}.f{n},i.f{n}{{fill:var(--c{n});background:var(--c{n})}}"
    for n in range(4)
)
_CARDS = (
    ("request_rate", "requests/s sent", 2),
    ("request_throughput", "requests/s completed", 2),
    ("output_throughput", "output tokens/s", 0),
    ("median_ttft_ms", "median TTFT, ms", 1),
    ("median_tpot_ms", "median TPOT, ms", 2),
    ("goodput_ratio", "share of good requests", 3),
    ("completed", "completed", 0),
    ("failed", "failed", 0),
)


def html_report(summary: Summary, figures: list[Figure], text: str, notes: list[str]) -> str:
    """text: the terminal's output, which the page repeats. notes: why it may be misleading."""
    title = f"{summary['model_id']}: load test of {summary['date']}"
    cards = "".join(_card(summary.get(key), label, digits) for key, label, digits in _CARDS)
    drawn = "".join(_figure(figure) for figure in figures)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(_workload(summary))}</p>{_notes(summary, notes)}"
        f'<div class="cards">{cards}</div><h2>Figures</h2><div class="grid">{drawn}</div>'
        f"<h2>Terminal output</h2><pre>{escape(text)}</pre>"
        f"<h2>All numbers</h2><table>{_rows(summary)}</table></body></html>\n"
    )


def _workload(summary: Summary) -> str:
    return (
        f"{summary['dataset_name']} dataset, seed {summary['seed']}, through {summary['backend']}; "
        "by penstock bench"
    )


def _notes(summary: Summary, notes: list[str]) -> str:
    """Each reason of failures and its count, and the other notes."""
    reasons = summary.get("failure_reasons") or {}
    lines = [f"{num} failed: {reason}" for reason, num in reasons.items()]
    failures = [f"{num} x {reason}" for reason, num in reasons.items()]
    lines += [note for note in notes if note not in failures]
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _card(value: object, label: str, digits: int) -> str:
    if not isinstance(value, int | float):
        return ""  # unknown, or a rate of "inf"
    shown = f"{value:,.{digits}f}"
    return f"<div><b>{escape(shown)}</b><span>{escape(label)}</span></div>"


def _rows(summary: Summary) -> str:
    """Lists are only in the JSON file."""
    rows = []
    for key, value in summary.items():
        if value is not None and not isinstance(value, list | dict):
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            rows.append(f"<tr><th>{escape(key)}</th><td>{escape(shown)}</td></tr>")
    return "".join(rows)


def _figure(figure: Figure) -> str:
    if isinstance(figure, Timeline):
        return _frame(figure.title, _timeline(figure), list(PARTS), ' class="wide"')
    names = [series.name if series.xs else "" for series in figure.series]
    return _frame(figure.title, _lines(figure), names)


def _frame(title: str, svg: str, names: list[str], kind: str = "") -> str:
    """names: the legend, by colour; empty for a series without data."""
    keys = ""
    if len(names) > 1:
        keys = "".join(
            f'<span class="key"><i class="f{index}"></i>{escape(name)}</span>'
            for index, name in enumerate(names)
            if name
        )
    return f"<figure{kind}><figcaption>{escape(title)}</figcaption>{keys}{svg}</figure>"


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
    x = _Scale(highest_x, LEFT, WIDTH - RIGHT)
    y = _Scale(highest_y, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, figure.x_label, figure.y_label, HEIGHT)]
    for index, series in enumerate(figure.series):
        if series.has_line:
            parts.append(_line(series, index, x, y))
        if series.has_marks:
            parts += _marks(series, index, x, y)
    return _svg(figure.title, HEIGHT, "".join(parts))


def _line(series: Series, index: int, x: _Scale, y: _Scale) -> str:
    points = " ".join(
        f"{x(at):.1f},{y(value):.1f}" for at, value in zip(series.xs, series.ys, strict=True)
    )
    return f'<polyline class="line s{index}" points="{points}"/>'


def _marks(series: Series, index: int, x: _Scale, y: _Scale) -> list[str]:
    return [
        f'<circle class="f{index}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3.5">'
        f"<title>{escape(series.name)}: {value:.4g} at {at:.4g}</title></circle>"
        for at, value in zip(series.xs, series.ys, strict=True)
    ]


def _timeline(figure: Timeline) -> str:
    height = TOP + BOTTOM + max(40, ROW_HEIGHT * len(figure.rows))
    highest = max((span.end_s for row in figure.rows for span in row), default=0.0)
    x = _Scale(highest, LEFT, WIDE - RIGHT)
    bars = [
        f'<rect class="f{PARTS.index(span.part)}" x="{x(span.start_s):.1f}" '
        f'y="{TOP + row * ROW_HEIGHT}" height="{ROW_HEIGHT - 1}" '
        f'width="{max(0.3, x(span.end_s) - x(span.start_s)):.1f}"/>'
        for row, spans in enumerate(figure.rows)
        for span in spans
    ]
    axes = _axes(x, None, figure.x_label, "requests", height, WIDE)
    return _svg(figure.title, height, axes + "".join(bars), WIDE)


def _axes(
    x: _Scale, y: _Scale | None, x_label: str, y_label: str, height: int, width: int = WIDTH
) -> str:
    floor, middle = height - BOTTOM, (TOP + height - BOTTOM) / 2
    parts = []
    for tick in x.ticks:
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {TOP}V{floor}"/>')
        parts.append(_text(x(tick), floor + 16, f"{tick:,.6g}", "middle"))
    for tick in y.ticks if y else ():
        assert y is not None
        parts.append(f'<path class="axis" d="M{LEFT} {y(tick):.1f}H{width - RIGHT}"/>')
        parts.append(_text(LEFT - 6, y(tick) + 4, f"{tick:,.6g}", "end"))
    parts.append(_text((LEFT + width - RIGHT) / 2, height - 6, x_label, "middle"))
    turned = f' transform="rotate(-90 14 {middle:.1f})"'
    return "".join([*parts, _text(14, middle, y_label, "middle", turned)])


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _svg(title: str, height: int, inner: str, width: int = WIDTH) -> str:
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{inner}</svg>"
