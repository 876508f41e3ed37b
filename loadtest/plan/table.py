"""A plan as text for a terminal."""

from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.choice import cost_of
from penstock.loadtest.plan.document import CapacityPlan, step_time_bias
from penstock.loadtest.report.comparison import aligned

_WIDTH = 100
# More rows hide what matters; all of them are in the JSON and the CSV.
_MAX_ROWS = 20
# Columns of both tables: first those that name a candidate, at the end its speeds.
_FLAGS = ("device", "weights", "TP", "seqs", "tokens")
_SPEEDS = ("tok/s each", "TTFT p99", "TPOT p99")


def render_plan(plan: CapacityPlan) -> str:
    parts = [_title("Plan"), *_headline(plan)]
    if plan.ranked:
        parts += ["", _title("Candidates, the best first", "-"), *_candidates(plan)]
    if plan.front:
        parts += ["", _title("Throughput against speed: what no other beats", "-"), *_front(plan)]
    if plan.refutation:
        parts += ["", _title("What would refute it", "-"), *_refutation(plan)]
    return "\n".join([*parts, "=" * _WIDTH])


def _title(text: str, fill: str = "=") -> str:
    return f"{f' {text} ':{fill}^{_WIDTH}}"


def targets_text(plan: CapacityPlan) -> str:
    limits = plan.targets.limits_ms.items()
    return ", ".join(f"{metric.upper()} p99 {limit:g} ms" for metric, limit in limits)


def load_text(plan: CapacityPlan) -> str:
    return (
        "as many requests/s as a replica carries"
        if plan.rate is None
        else f"{plan.rate:g} requests/s"
    )


def _headline(plan: CapacityPlan) -> list[str]:
    rows = [("Model:", plan.name), ("Load:", load_text(plan)), ("Targets:", targets_text(plan))]
    if plan.choice is None:
        rows.append(("Plan:", "no candidate meets the targets at any rate"))
        return _labelled(rows)
    sized, point = plan.choice.sized, plan.choice.point
    candidate, num = sized.candidate, sized.num_replicas
    (seqs, tokens), (tensor_size, num_stages) = candidate.limits, candidate.ranks
    ranks = f"TP {tensor_size} x PP {num_stages} x {num} replica{'s'[: num != 1]}"
    rows += [
        ("Devices:", f"{sized.num_devices} x {candidate.device} ({ranks})"),
        ("Weights:", candidate.quantization or f"as they are ({candidate.server.info.dtype})"),
        ("--max-num-seqs:", str(seqs)),
        ("--max-num-batched-tokens:", str(tokens)),
        ("Meets the targets, simulated whole:", "yes" if point.is_met else "NO"),
        ("Steps may be longer or shorter by:", f"{step_time_bias(candidate):.0%}"),
        ("Highest rate of one replica:", f"{sized.limit:.2f} requests/s"),
    ]
    if sized.price is not None:
        rows.append(("Price per hour:", f"{sized.price:.2f}"))
    if (cost := plan.cost) is not None:
        rows.append(("Cost per million input tokens:", f"{cost.input:.4f}"))
        rows.append(("Cost per million output tokens:", f"{cost.output:.4f}"))
    if point.is_whole:
        rows += [
            ("Output tokens/s per device:", f"{point.device_tokens_per_s:,.0f}"),
            ("Tokens/s per user:", _number(point.user_tokens_per_s, 1)),
            ("Goodput:", f"{_number(point.goodput)} requests/s"),
            ("TTFT p50, p99 (ms):", f"{_number(point.ttft_p50_ms)}, {_number(point.ttft_p99_ms)}"),
            ("TPOT p50, p99 (ms):", f"{_number(point.tpot_p50_ms)}, {_number(point.tpot_p99_ms)}"),
        ]
    return _labelled(rows)


def _labelled(rows: list[tuple[str, str]]) -> list[str]:
    return [f"{label:<36}{value}" for label, value in rows]


def _candidates(plan: CapacityPlan) -> list[str]:
    head = [*_FLAGS, "req/s", "devices", "price/h", "in/M", "out/M", *_SPEEDS]
    rows = []
    for each in plan.ranked[:_MAX_ROWS]:
        candidate, best = each.candidate, each.searched.best
        assert best is not None  # a limit is a rate that was probed
        cost = cost_of(candidate.replica_price, best)
        rows.append(
            [
                *_flags(candidate),
                _number(each.limit),
                str(each.num_devices),
                _number(each.price),
                _number(cost.input if cost else None, 3),
                _number(cost.output if cost else None, 3),
                _number(best.device_tokens_per_s, 0),
                _number(best.ttft_p99_ms, 0),
                _number(best.tpot_p99_ms, 1),
            ]
        )
    lines = aligned([head, *rows], _is_name)
    if (num_more := len(plan.ranked) - _MAX_ROWS) > 0:
        lines.append(f"and {num_more} more, in the JSON")
    num_unable = len(plan.searched) - len(plan.ranked)
    if num_unable:
        lines.append(f"{num_unable} more meet the targets at no rate")
    lines.append(
        "each row: one replica at the highest rate that meets the targets; tok/s each: of a device"
    )
    return lines


def _front(plan: CapacityPlan) -> list[str]:
    tokens, *latencies = _SPEEDS
    head = [*_FLAGS, "req/s", tokens, "tok/s user", *latencies]
    rows = [
        [
            *_flags(candidate),
            _number(point.rate),
            _number(point.device_tokens_per_s, 0),
            _number(point.user_tokens_per_s, 1),
            _number(point.ttft_p99_ms, 0),
            _number(point.tpot_p99_ms, 1),
        ]
        for candidate, point in plan.front
    ]
    return aligned([head, *rows], _is_name)


def _flags(candidate: Candidate) -> list[str]:
    """The cells under _FLAGS."""
    weights = candidate.quantization or "as is"
    return [candidate.device, weights, str(candidate.ranks[0]), *map(str, candidate.limits)]


def _is_name(column: int) -> bool:
    return column < 2


def _refutation(plan: CapacityPlan) -> list[str]:
    assert plan.refutation is not None
    figures = [
        [each.figure, f"{each.value:.2f}", f"{each.low:.2f} to {each.high:.2f}"]
        for each in plan.refutation.expectation.figures
    ]
    return [
        "One server with its share of the load must show these figures:",
        *aligned([["figure", "expected", "error bar"], *figures]),
        "",
        f"  {plan.refutation.serve}",
        f"  {plan.refutation.bench}",
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
