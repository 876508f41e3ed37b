"""A self-contained HTML file: numbers, and figures as inline SVG. It loads nothing else."""

from collections.abc import Iterable
from html import escape
from importlib.resources import files

from penstock.loadtest.report.figures import Bars, Figure
from penstock.loadtest.report.report import Summary, readable_date
from penstock.loadtest.report.svg import NUM_COLOURS, figure_html

CSS = files(__package__).joinpath("report.css").read_text(encoding="utf-8") + "".join(
    f".s{n}{{stroke:var(--c{n})}}.f{n},i.f{n}{{fill:var(--c{n});background:var(--c{n})}}"
    for n in range(NUM_COLOURS)
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
    cards = "".join(_card(summary.get(key), label, digits) for key, label, digits in _CARDS)
    what = "simulation" if summary.get("run_class") else "load test"
    return page(
        f"{summary['model_id']}: {what} of {readable_date(summary['date'])}",
        f"<p>{escape(_workload(summary))}</p>{_notes(summary, notes)}"
        f'<div class="cards">{cards}</div>{figures_html(figures)}'
        f"<h2>Terminal output</h2><pre>{escape(text)}</pre>"
        f'<h2>All numbers</h2><dl class="numbers">{_numbers(summary)}</dl>',
    )


def paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def card(value: str, label: str) -> str:
    return f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"


def figures_html(drawn: Iterable[Figure | Bars]) -> str:
    """The figures below their title; nothing where there are none."""
    grid = "".join(map(figure_html, drawn))
    return f'<h2>Figures</h2><div class="grid">{grid}</div>' if grid else ""


def page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>"
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _workload(summary: Summary) -> str:
    return (
        f"{summary['dataset_name']} dataset, seed {summary['seed']}, through {summary['backend']}; "
        f"by penstock {'simulate' if summary.get('run_class') else 'bench'}"
    )


def _notes(summary: Summary, notes: list[str]) -> str:
    """Each reason of failures and its count, and the other notes."""
    reasons = summary.get("failure_reasons") or {}
    lines = [f"{num} failed: {reason}" for reason, num in reasons.items()]
    failures = [f"{num} x {reason}" for reason, num in reasons.items()]
    lines += [note for note in notes if note not in failures]
    return paragraphs(lines)


def _card(value: object, label: str, digits: int) -> str:
    if not isinstance(value, int | float):
        return ""  # unknown, or a rate of "inf"
    return card(f"{value:,.{digits}f}", label)


def _numbers(summary: Summary) -> str:
    """Lists are only in the JSON file."""
    rows = []
    for key, value in summary.items():
        if value is not None and not isinstance(value, list | dict):
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            rows.append(f"<div><dt>{escape(key)}</dt><dd>{escape(shown)}</dd></div>")
    return "".join(rows)
