"""A comparison as a self-contained HTML file: bars, and a table of all numbers."""

from html import escape

from penstock.loadtest.report.comparison import Cell, Comparison, table
from penstock.loadtest.report.figures import Bars
from penstock.loadtest.report.html import figures_html, page, paragraphs
from penstock.loadtest.report.report import LATENCIES, METRIC_TITLES

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
    head, rows = table(comparison, lambda low, high: f" <small>{low}-{high}</small>")
    shown = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    shown = f"<table><tr>{''.join(map(_head_cell, head))}</tr>{shown}</table>"
    return page(
        f"Load tests compared: {', '.join(names[:-1])} and {names[-1]}",
        f"{sides}{paragraphs(comparison.notes)}<h2>Numbers</h2>"
        f'<div class="scroll">{shown}</div>{figures_html(_figures(comparison))}',
    )


def _head_cell(cell: Cell) -> str:
    kind = ' class="number"' if cell.is_number else ""
    return f"<th{kind}>{escape(cell.text)}</th>"


def _cell(cell: Cell) -> str:
    """Text that is no number is escaped: labels and names."""
    kind = {True: " good", False: " bad", None: ""}[cell.is_better]
    if cell.is_number:
        return f'<td class="number{kind}">{cell.text}</td>'
    return f'<td class="{kind.strip()}">{escape(cell.text)}</td>'


def _figures(comparison: Comparison) -> list[Bars]:
    """Throughput, then each latency that the results have."""
    by_key = {row.metric.key: row for row in comparison.rows}
    throughput = [(name, by_key[key]) for key, name in _THROUGHPUT.items() if key in by_key]
    titled = [("Output throughput", "tokens/s", throughput)]
    for metric in LATENCIES:
        short, title = METRIC_TITLES[metric]
        rows = [
            (key.split("_")[0], row) for key, row in by_key.items() if key.endswith(f"_{metric}_ms")
        ]
        titled.append((title, f"{short}, ms", rows))
    return [
        Bars(
            title=title,
            x_label=x_label,
            names=comparison.names,
            groups=[(name, row.values) for name, row in rows],
        )
        for title, x_label, rows in titled
        if rows
    ]
