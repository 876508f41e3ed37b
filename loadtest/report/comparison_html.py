"""A comparison as a self-contained HTML file: bars, and a table of all numbers."""

from html import escape

from penstock.loadtest.report.comparison import Comparison, Metric, Row, Value
from penstock.loadtest.report.figures import Bar, Bars
from penstock.loadtest.report.html import page
from penstock.loadtest.report.report import METRIC_TITLES
from penstock.loadtest.report.svg import figure_html

_THROUGHPUT = {
    "output_throughput": "mean",
    "max_output_tokens_per_s": "peak",
}


def comparison_html(comparison: Comparison) -> str:
    names = comparison.names
    sides = "".join(
        f'<p><i class="f{index}"></i><b>{escape(side.name)}</b> {escape(side.described())}</p>'
        for index, side in enumerate(comparison.sides)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in comparison.notes)
    drawn = "".join(figure_html(figure) for figure in _figures(comparison))
    head = "".join(_head(names))
    rows = "".join(_row(row, names) for row in comparison.rows)
    table = f"<table><tr>{head}</tr>{rows}</table>"
    figures = f'<h2>Figures</h2><div class="grid">{drawn}</div>' if drawn else ""
    return page(
        f"Load tests compared: {', '.join(names[:-1])} and {names[-1]}",
        f'{sides}{notes}<h2>Numbers</h2><div class="scroll">{table}</div>{figures}',
    )


def _head(names: list[str]) -> list[str]:
    first, *others = map(escape, names)
    cells = ["<th></th>", _number_cell(first, "th")]
    for name in others:
        cells += [
            _number_cell(name, "th"),
            _number_cell(f"{name}/{first}", "th"),
            "<th>better</th>",
        ]
    return cells


def _number_cell(inner: str, tag: str = "td", kind: str = "") -> str:
    return f'<{tag} class="number{kind}">{inner}</{tag}>'


def _row(row: Row, names: list[str]) -> str:
    values = [_value(row.metric, value) for value in row.values]
    cells = [f"<th>{escape(row.metric.label)}</th>", _number_cell(values[0])]
    for index in range(1, len(names)):
        ratio, is_better = row.ratio(index), row.is_better(index)
        kind = {True: " good", False: " bad", None: ""}[is_better]
        shown = "-" if ratio is None else f"{ratio:.3f}"
        cells += [_number_cell(values[index]), _number_cell(shown, kind=kind)]
        cells.append(f'<td class="{kind.strip()}">{escape(row.verdict(index, names))}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _value(metric: Metric, value: Value | None) -> str:
    if value is None:
        return "-"
    if value.low == value.high:
        return metric.shown(value.middle)
    spread = f"{metric.shown(value.low)}-{metric.shown(value.high)}"
    return f"{metric.shown(value.middle)} <small>{spread}</small>"


def _figures(comparison: Comparison) -> list[Bars]:
    """Throughput, then each latency that the results have."""
    by_key = {row.metric.key: row for row in comparison.rows}
    throughput = [(name, by_key[key]) for key, name in _THROUGHPUT.items() if key in by_key]
    figures = [_bars(comparison, "throughput", "Output throughput", "tokens/s", throughput)]
    for metric, (short, title) in METRIC_TITLES.items():
        rows = [
            (key.split("_")[0], row)
            for key, row in by_key.items()
            if key.endswith(f"_{metric}_ms") and key.count("_") == metric.count("_") + 2
        ]
        figures.append(_bars(comparison, metric, title, f"{short}, ms", rows))
    return [figure for figure in figures if figure.groups]


def _bars(
    comparison: Comparison, slug: str, title: str, x_label: str, rows: list[tuple[str, Row]]
) -> Bars:
    return Bars(
        slug=slug,
        title=title,
        x_label=x_label,
        names=comparison.names,
        groups=[(name, [_bar(value) for value in row.values]) for name, row in rows],
    )


def _bar(value: Value | None) -> Bar | None:
    if value is None:
        return None
    return Bar(value=value.middle, low=value.low, high=value.high)
