"""A self-contained HTML file: numbers, and figures as inline SVG. It loads nothing else."""

from collections.abc import Iterable
from html import escape

from penstock.loadtest.report.figures import Bars, Figure
from penstock.loadtest.report.report import Summary, readable_date
from penstock.loadtest.report.svg import NUM_COLOURS, figure_html

# Only a screen is dark: paper is white, whatever the system prefers.
CSS = """
:root{color-scheme:light;--page:#fff;--ink:#16181d;--soft:#5b6270;--grid:#e4e7ec;--good:#15803d;
--bad:#be123c;--c0:#2563eb;--c1:#c2410c;--c2:#059669;--c3:#be123c;--c4:#7c3aed}
@media screen and (prefers-color-scheme:dark){:root{color-scheme:dark;--page:#14161a;--ink:#e8eaee;
--soft:#9aa2b1;--grid:#2b2f37;--good:#4ade80;--bad:#fb7185;--c0:#7aa7ff;--c1:#f59e5b;--c2:#4ade9f;
--c3:#fb7185;--c4:#c4a5ff}}
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1340px;
margin:0 auto;padding:24px 16px}
h1{font-size:22px;line-height:1.3;margin:0;overflow-wrap:anywhere}p{color:var(--soft);margin:8px 0;
overflow-wrap:anywhere}h2{font-size:17px;margin:32px 0 8px}
.cards{display:flex;flex-wrap:wrap;gap:8px 32px}.cards b{display:block;font-size:22px}
.cards span{color:var(--soft)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:24px}
figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}.axis{stroke:var(--grid)}
.mark{stroke:var(--soft);stroke-width:.6;stroke-dasharray:2 3;fill:none}
.range{stroke:var(--ink);stroke-width:1.6}
.line{fill:none;stroke-width:1.8}pre{overflow-x:auto;font-size:13px}.scroll{overflow-x:auto}
@media(min-width:900px){pre{white-space:pre-wrap;overflow-wrap:anywhere}}
.numbers{columns:380px;column-gap:32px;font-size:14px;margin:0}.numbers div{display:flex;gap:12px;
justify-content:space-between;break-inside:avoid;border-bottom:1px solid var(--grid)}
.numbers dd{margin:0;font-variant-numeric:tabular-nums;overflow-wrap:anywhere;text-align:right}
table{border-collapse:collapse;font-size:14px}td,th{text-align:left;padding:2px 16px 2px 0;
white-space:nowrap}td{font-variant-numeric:tabular-nums}tr{border-bottom:1px solid var(--grid)}
.number{text-align:right}td small{color:var(--soft)}
@media(max-width:600px){td small{display:block}td,th{padding-right:10px}}
.good{color:var(--good)}.bad{color:var(--bad)}i{display:inline-block;width:14px;height:3px;
margin:0 6px 3px 0;vertical-align:middle}.key{font-size:13px;color:var(--soft);margin-right:16px;
white-space:nowrap}
@media print{body{max-width:none;padding:0;font-size:12px}figure,tr{break-inside:avoid}
h2{break-after:avoid}.grid{grid-template-columns:1fr 1fr}.numbers{columns:2;font-size:10px}
pre{white-space:pre-wrap;font-size:10px}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
""" + "".join(
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
