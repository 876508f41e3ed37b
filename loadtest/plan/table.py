"""A plan as text for a terminal."""

from collections.abc import Sequence

from penstock.loadtest.plan.choice import cost_of
from penstock.loadtest.plan.document import Made, step_time_bias

_WIDTH = 100
# More rows hide what matters; all of them are in the JSON and the CSV.
_MAX_ROWS = 20


def render_plan(made: Made) -> str:
    parts = [_title("Plan"), *_headline(made)]
    if made.ranked:
        parts += ["", _title("Candidates, the best first", "-"), *_candidates(made)]
    if made.front:
        parts += ["", _title("Throughput against speed: what no other beats", "-"), *_front(made)]
    if made.expectation:
        parts += ["", _title("What would refute it", "-"), *_refutation(made)]
    return "\n".join([*parts, "=" * _WIDTH])


def _title(text: str, fill: str = "=") -> str:
    return f"{f' {text} ':{fill}^{_WIDTH}}"


def targets_text(made: Made) -> str:
    limits = made.targets.limits_ms.items()
    return ", ".join(f"{metric.upper()} p99 {limit:g} ms" for metric, limit in limits)


def load_text(made: Made) -> str:
    return (
        "as many requests/s as a replica carries"
        if made.rate is None
        else f"{made.rate:g} requests/s"
    )


def _headline(made: Made) -> list[str]:
    rows = [("Model:", made.name), ("Load:", load_text(made)), ("Targets:", targets_text(made))]
    if made.choice is None:
        rows.append(("Plan:", "no candidate meets the targets at any rate"))
        return [f"{label:<36}{value}" for label, value in rows]
    choice, point, candidate = made.choice, made.choice.point, made.choice.sized.candidate
    seqs, tokens = candidate.limits
    tensor_size, num_stages = candidate.ranks
    num = choice.num_replicas
    ranks = f"TP {tensor_size} x PP {num_stages} x {num} replica{'s'[: num != 1]}"
    rows += [
        ("Devices:", f"{choice.num_devices} x {candidate.device} ({ranks})"),
        ("Weights:", candidate.quantization or f"as they are ({candidate.server.info.dtype})"),
        ("--max-num-seqs:", str(seqs)),
        ("--max-num-batched-tokens:", str(tokens)),
        ("Meets the targets, simulated whole:", "yes" if choice.is_confirmed else "NO"),
        ("Steps may be longer or shorter by:", f"{step_time_bias(candidate):.0%}"),
        ("Highest rate of one replica:", f"{choice.sized.searched.limit:.2f} requests/s"),
    ]
    if choice.price is not None:
        rows.append(("Price per hour:", f"{choice.price:.2f}"))
    if (cost := made.cost) is not None:
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
    return [f"{label:<36}{value}" for label, value in rows]


def _candidates(made: Made) -> list[str]:
    head = ("device", "weights", "TP", "seqs", "tokens", "req/s", "devices", "price/h", "in/M",
            "out/M", "tok/s each", "TTFT p99", "TPOT p99")  # fmt: skip
    rows = []
    for each in made.ranked[:_MAX_ROWS]:
        candidate, best = each.candidate, each.searched.best
        cost = cost_of(candidate.replica_price, best) if best else None
        rows.append(
            (
                candidate.device,
                candidate.quantization or "as is",
                str(candidate.ranks[0]),
                *map(str, candidate.limits),
                _number(each.searched.limit),
                str(each.num_devices),
                _number(each.price),
                _number(cost.input if cost else None, 3),
                _number(cost.output if cost else None, 3),
                _number(best.device_tokens_per_s if best else None, 0),
                _number(best.ttft_p99_ms if best else None, 0),
                _number(best.tpot_p99_ms if best else None, 1),
            )
        )
    lines = columns(head, rows, num_left=2)
    if (num_more := len(made.ranked) - _MAX_ROWS) > 0:
        lines.append(f"and {num_more} more, in the JSON")
    num_unable = len(made.searched) - len(made.ranked)
    if num_unable:
        lines.append(f"{num_unable} more meet the targets at no rate")
    lines.append(
        "each row: one replica at the highest rate that meets the targets; tok/s each: of a device"
    )
    return lines


def _front(made: Made) -> list[str]:
    head = ("device", "weights", "TP", "seqs", "tokens", "req/s", "tok/s each", "tok/s user",
            "TTFT p99", "TPOT p99")  # fmt: skip
    rows = [
        (
            candidate.device,
            candidate.quantization or "as is",
            str(candidate.ranks[0]),
            *map(str, candidate.limits),
            _number(point.rate),
            _number(point.device_tokens_per_s, 0),
            _number(point.user_tokens_per_s, 1),
            _number(point.ttft_p99_ms, 0),
            _number(point.tpot_p99_ms, 1),
        )
        for candidate, point in made.front
    ]
    return columns(head, rows, num_left=2)


def _refutation(made: Made) -> list[str]:
    assert made.expectation is not None
    figures = [
        (each.figure, f"{each.value:.2f}", f"{each.low:.2f} to {each.high:.2f}")
        for each in made.expectation.figures
    ]
    return [
        "One server with its share of the load must show these figures:",
        *columns(("figure", "expected", "error bar"), figures, num_left=1),
        "",
        f"  {made.serve}",
        f"  {made.bench}",
    ]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> list[str]:
    """Aligned; the first num_left columns at the left."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i < num_left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
