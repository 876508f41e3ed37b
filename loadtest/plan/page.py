"""A plan as a self-contained HTML page, in the style of the load test's report."""

from html import escape

from penstock.loadtest.plan.document import Made
from penstock.loadtest.plan.table import load_text, targets_text
from penstock.loadtest.report.figures import Lines, Series
from penstock.loadtest.report.html import page
from penstock.loadtest.report.report import readable_date
from penstock.loadtest.report.svg import figure_html


def plan_page(made: Made, text: str) -> str:
    """text: the terminal's output, which the page repeats."""
    drawn = "".join(figure_html(figure) for figure in figures(made))
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
        for label, value in _cards(made)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in made.notes)
    graphs = f'<h2>Figures</h2><div class="grid">{drawn}</div>' if drawn else ""
    return page(
        f"{made.name}: plan of {readable_date(made.date)}",
        f"<p>{escape(load_text(made))}; {escape(targets_text(made))}; by penstock plan "
        f'{escape(made.version)}</p>{notes}<div class="cards">{cards}</div>{graphs}'
        f"<h2>Terminal output</h2><pre>{escape(text)}</pre>",
    )


def _cards(made: Made) -> list[tuple[str, str]]:
    choice = made.choice
    if choice is None:
        return [("candidates that meet the targets", "0")]
    candidate, point = choice.sized.candidate, choice.point
    tensor_size, num_stages = candidate.ranks
    cards = [
        (candidate.device, f"{choice.num_devices} x"),
        ("TP x PP x replicas", f"{tensor_size} x {num_stages} x {choice.num_replicas}"),
    ]
    if choice.price is not None:
        cards.append(("price per hour", f"{choice.price:,.2f}"))
    if (cost := made.cost) is not None:
        cards += [
            ("per million input tokens", f"{cost.input:,.3f}"),
            ("per million output tokens", f"{cost.output:,.3f}"),
        ]
    for label, value, digits in (
        ("output tokens/s per device", point.device_tokens_per_s, 0),
        ("tokens/s per user", point.user_tokens_per_s, 1),
        ("good requests/s", point.goodput, 2),
        ("TTFT p99, ms", point.ttft_p99_ms, 0),
        ("TPOT p99, ms", point.tpot_p99_ms, 1),
    ):
        if value:
            cards.append((label, f"{value:,.{digits}f}"))
    return cards


def figures(made: Made) -> list[Lines]:
    """The front among all points, and each percentile with a target against the rate."""
    drawn = [_front(made)] if made.front else []
    drawn += [_against_rate(made, metric) for metric in ("ttft", "tpot")]
    return [figure for figure in drawn if any(series.xs for series in figure.series)]


def _front(made: Made) -> Lines:
    on_front = {id(point) for _, point in made.front}
    whole = [
        point
        for each in made.searched
        for point in each.points
        if point.user_tokens_per_s and id(point) not in on_front
    ]
    groups = [
        ("Pareto front", [point for _, point in made.front], True),
        ("meets the targets", [point for point in whole if point.is_met], False),
        ("misses them", [point for point in whole if not point.is_met], False),
    ]
    if made.choice and made.choice.point.user_tokens_per_s:
        groups.append(("the plan", [made.choice.point], False))
    return Lines(
        slug="front",
        title="Throughput of a device against speed of a user",
        x_label="tokens/s of one user",
        y_label="output tokens/s of one device",
        series=[
            Series(
                name=name,
                xs=[point.user_tokens_per_s or 0.0 for point in points],
                ys=[point.device_tokens_per_s for point in points],
                has_marks=True,
                has_line=has_line,
            )
            for name, points, has_line in groups
        ],
    )


def _against_rate(made: Made, metric: str) -> Lines:
    """Of the best candidates, as many as there are colours."""
    series = []
    for each in made.ranked[:5]:
        points = sorted(
            (p for p in each.searched.points if p.is_whole), key=lambda point: point.rate
        )
        seqs, tokens = each.candidate.limits
        weights = each.candidate.quantization or "as is"
        series.append(
            Series(
                name=f"{each.candidate.device}, TP {each.candidate.ranks[0]}, {weights}, "
                f"{seqs}/{tokens}",
                xs=[point.rate for point in points],
                ys=[getattr(point, f"{metric}_p99_ms") for point in points],
                has_marks=True,
            )
        )
    return Lines(
        slug=f"{metric}-against-rate",
        title=f"{metric.upper()} p99 of one replica against its rate",
        x_label="requests/s",
        y_label=f"{metric.upper()} p99, ms",
        series=series,
    )
