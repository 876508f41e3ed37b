"""A plan as a self-contained HTML page, in the style of the load test's report."""

from html import escape

from penstock.loadtest.plan.document import CapacityPlan, load_text, targets_text, untestable
from penstock.loadtest.report.figures import Lines, Series
from penstock.loadtest.report.html import card, figures_html, page, paragraphs
from penstock.loadtest.report.report import readable_date
from penstock.loadtest.report.svg import NUM_COLOURS


def plan_page(plan: CapacityPlan, text: str) -> str:
    """text: the terminal's output, which the page repeats."""
    cards = "".join(card(value, label) for label, value in _cards(plan))
    notes = [*untestable(plan), *plan.notes]
    return page(
        f"{plan.name}: plan of {readable_date(plan.date)}",
        f"<p>{escape(load_text(plan))}; {escape(targets_text(plan))}; by penstock plan "
        f'{escape(plan.version)}</p>{paragraphs(notes)}<div class="cards">{cards}</div>'
        f"{figures_html(figures(plan))}<h2>Terminal output</h2><pre>{escape(text)}</pre>",
    )


def _cards(plan: CapacityPlan) -> list[tuple[str, str]]:
    if plan.choice is None:
        return [("candidates that meet the targets", "0")]
    sized, point, cost = plan.choice.sized, plan.choice.point, plan.cost
    forecast = plan.choice.forecast
    tensor_size, num_stages = sized.candidate.ranks
    cards = [
        (sized.candidate.device, f"{sized.num_devices} x"),
        ("TP x PP x replicas", f"{tensor_size} x {num_stages} x {sized.num_replicas}"),
    ]
    for label, value, digits in (
        ("price per hour", sized.price, 2),
        ("per million input tokens", cost.input if cost else None, 3),
        ("per million output tokens", cost.output if cost else None, 3),
        ("output tokens/s per device", point.device_tokens_per_s, 0),
        ("tokens/s per user", point.user_tokens_per_s, 1),
        ("good requests/s", point.goodput, 2),
        ("forecast TTFT p99, ms", forecast.value("p99_ttft_ms"), 0),
        ("forecast TPOT p99, ms", forecast.value("p99_tpot_ms"), 1),
    ):
        if value:
            cards.append((label, f"{value:,.{digits}f}"))
    return cards


def figures(plan: CapacityPlan) -> list[Lines]:
    """The front among all points, and each percentile with a target against the rate."""
    drawn = [_front(plan)] if plan.front else []
    drawn += [_against_rate(plan, metric) for metric in ("ttft", "tpot")]
    return [figure for figure in drawn if any(series.xs for series in figure.series)]


def _front(plan: CapacityPlan) -> Lines:
    on_front = {id(point) for _, point in plan.front}
    whole = [
        point
        for each in plan.searched
        for point in each.points
        if point.user_tokens_per_s and id(point) not in on_front
    ]
    groups = [
        ("Pareto front", [point for _, point in plan.front], True),
        ("meets the targets", [point for point in whole if point.is_met], False),
        ("misses them", [point for point in whole if not point.is_met], False),
    ]
    if plan.choice and plan.choice.point.user_tokens_per_s:
        groups.append(("the plan", [plan.choice.point], False))
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


def _against_rate(plan: CapacityPlan, metric: str) -> Lines:
    """One series for each of the best candidates."""
    series = []
    for each in plan.ranked[:NUM_COLOURS]:
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
