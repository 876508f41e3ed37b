"""`CapacityPlan`: as JSON, for programs and `penstock bench --check`, as CSV, and as text."""

import csv
import io
from dataclasses import asdict, dataclass
from typing import Any

from penstock.loadtest.bench.forecast import TOO_WIDE, Forecast
from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.choice import Choice, Cost, Sized, cost_of
from penstock.loadtest.plan.probe import Point, Targets
from penstock.loadtest.plan.refutation import Refutation
from penstock.loadtest.plan.search import Searched
from penstock.loadtest.report.comparison import aligned

FORMAT = 1
# Of a point; a plan has those of its forecast, and no others.
_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """rate: requests per second to carry; None for as many as one replica carries. front: see
    `front`. choice, refutation: None where no candidate meets the targets. notes: what to know
    before it is believed."""

    name: str
    date: str
    version: str
    rate: float | None
    targets: Targets
    searched: list[Searched]
    ranked: list[Sized]
    choice: Choice | None
    front: list[tuple[Candidate, Point]]
    refutation: Refutation | None
    notes: list[str]

    @property
    def cost(self) -> Cost | None:
        return cost_of(self.choice.sized.price, self.choice.point) if self.choice else None


def document(plan: CapacityPlan) -> dict[str, Any]:
    choice, refutation = plan.choice, plan.refutation
    return {
        "format": FORMAT,
        "model_id": plan.name,
        "date": plan.date,
        "version": plan.version,
        "request_rate": plan.rate,
        "targets_p99_ms": plan.targets.limits_ms,
        "plan": _chosen(choice, plan.cost) if choice else None,
        "serve": refutation.serve if refutation else "",
        "bench": refutation.bench if refutation else "",
        "forecast": asdict(choice.forecast) if choice else None,
        "candidates": [
            _flags(each.candidate)
            | {"max_request_rate": each.limit, "probes": [asdict(point) for point in each.points]}
            for each in plan.searched
        ],
        "front": [
            _flags(candidate) | {"figures": asdict(point)} for candidate, point in plan.front
        ],
        "notes": plan.notes,
    }


def _chosen(choice: Choice, cost: Cost | None) -> dict[str, Any]:
    sized = choice.sized
    return _flags(sized.candidate) | {
        "num_replicas": sized.num_replicas,
        "num_devices": sized.num_devices,
        "price_per_hour": sized.price,
        "is_confirmed": choice.meets_targets,
        "is_testable": choice.forecast.is_testable,
        "max_request_rate_per_replica": sized.limit,
        "figures": {
            key: value for key, value in asdict(choice.point).items() if key not in _LATENCIES
        },
        "cost_per_million_tokens": asdict(cost) if cost else None,
    }


def _flags(candidate: Candidate) -> dict[str, Any]:
    (seqs, tokens), (tensor_size, num_stages) = candidate.limits, candidate.ranks
    return {
        "device": candidate.device,
        "tensor_parallel_size": tensor_size,
        "pipeline_parallel_size": num_stages,
        "quantization": candidate.quantization,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "step_time_bias": step_time_bias(candidate),
    }


def step_time_bias(candidate: Candidate) -> float:
    """How far off its steps may be, of any class: what the error bars assume."""
    errors = candidate.server.step_model.errors.values()
    return max((error.bias for error in errors), default=0.0)


def as_csv(plan: CapacityPlan) -> str:
    """A row for each probe that was not ended early."""
    on_front = {id(point) for _, point in plan.front}
    rows = [
        (point.is_whole, _row(each.candidate, point, on_front=id(point) in on_front))
        for each in plan.searched
        for point in each.points
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0][1]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for is_whole, row in rows if is_whole)
    return text.getvalue()


def _row(candidate: Candidate, point: Point, *, on_front: bool) -> dict[str, object]:
    cost = cost_of(candidate.replica_price, point)
    return _flags(candidate) | {
        "request_rate": point.rate,
        "meets_targets": point.is_met,
        "on_front": on_front,
        "output_tokens_per_s_per_device": point.device_tokens_per_s,
        "tokens_per_s_per_user": point.user_tokens_per_s,
        **{key: getattr(point, key) for key in ("goodput", *_LATENCIES)},
        "cost_per_million_input_tokens": cost.input if cost else None,
        "cost_per_million_output_tokens": cost.output if cost else None,
    }


_WIDTH = 100
# More rows hide what matters; all of them are in the JSON and the CSV.
_MAX_ROWS = 20
# Columns of both tables: first those that name a candidate, at the end its speeds.
_FLAGS = ("device", "weights", "TP", "seqs", "tokens")
_SPEEDS = ("tok/s each", "TTFT p99", "TPOT p99")


def render_plan(plan: CapacityPlan) -> str:
    parts = [_title("Plan"), *_headline(plan)]
    if warning := untestable(plan):
        parts[1:1] = [*warning, ""]
    if plan.ranked:
        parts += ["", _title("Candidates, the best first", "-"), *_candidates(plan)]
    if plan.front:
        parts += ["", _title("Throughput against speed: what no other beats", "-"), *_front(plan)]
    if plan.choice and plan.refutation:
        title = "Forecast of one server with its share of the load, and what would refute it"
        parts += ["", _title(title, "-"), *_forecast(plan.choice.forecast, plan.refutation)]
    return "\n".join([*parts, "=" * _WIDTH])


def _title(text: str, fill: str = "=") -> str:
    return f"{f' {text} ':{fill}^{_WIDTH}}"


def untestable(plan: CapacityPlan) -> list[str]:
    """Names what no measurement could refute, before all else that a plan says."""
    if plan.choice is None or not (wide := plan.choice.forecast.too_wide):
        return []
    what = "this plan" if not plan.choice.forecast.is_testable else f"{len(wide)} of its targets"
    return [
        f"No measurement could refute {what}: {', '.join(f'{each} ms' for each in wide)}.",
        f"{TOO_WIDE[0].upper()}{TOO_WIDE[1:]}.",
        "Calibrate again with nothing else running, or plan for a lower --request-rate.",
    ]


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
        ("Meets the targets:", _verdict(plan.choice)),
        ("Steps may be longer or shorter by:", f"{step_time_bias(candidate):.0%}"),
        ("Highest rate of one replica:", f"{sized.limit:.2f} requests/s"),
    ]
    if candidate.server.drafts is not None:
        rows.append(("Drafts, assumed:", str(candidate.server.drafts)))
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
        ]
    return _labelled([*rows, *_latencies(plan.choice.forecast)])


def _latencies(forecast: Forecast) -> list[tuple[str, str]]:
    return [
        (
            f"Forecast {name} p50, p99 (ms):",
            ", ".join(_number(forecast.value(f"{p}_{name.lower()}_ms")) for p in ("p50", "p99")),
        )
        for name in ("TTFT", "TPOT")
    ]


def _verdict(choice: Choice) -> str:
    if not choice.meets_targets:
        return "NO"
    undecided = [each.figure.partition(",")[0] for each in choice.forecast.undecided]
    if not undecided:
        return "yes, with the whole error bar of the forecast"
    return f"yes by the forecast, but not with the whole error bar of {' and '.join(undecided)}"


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
                *_flag_cells(candidate),
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
        "each row: one probe of a replica at the highest rate that meets the targets, not the "
        "forecast; tok/s each: of a device"
    )
    return lines


def _front(plan: CapacityPlan) -> list[str]:
    tokens, *latencies = _SPEEDS
    head = [*_FLAGS, "req/s", tokens, "tok/s user", *latencies]
    rows = [
        [
            *_flag_cells(candidate),
            _number(point.rate),
            _number(point.device_tokens_per_s, 0),
            _number(point.user_tokens_per_s, 1),
            _number(point.ttft_p99_ms, 0),
            _number(point.tpot_p99_ms, 1),
        ]
        for candidate, point in plan.front
    ]
    return aligned([head, *rows], _is_name)


def _flag_cells(candidate: Candidate) -> list[str]:
    """The cells under _FLAGS."""
    weights = candidate.quantization or "as is"
    return [candidate.device, weights, str(candidate.ranks[0]), *map(str, candidate.limits)]


def _is_name(column: int) -> bool:
    return column < 2


def _forecast(forecast: Forecast, refutation: Refutation) -> list[str]:
    targets = {each.key: f"{limit:g}" for each, limit in forecast.aimed_at}
    figures = [
        [
            each.figure,
            f"{each.value:.2f}",
            f"{each.low:.2f} to {each.high:.2f}",
            targets.get(each.key, ""),
        ]
        for each in forecast.figures
    ]
    return [
        *aligned([["figure", "forecast", "error bar", "target"], *figures]),
        "",
        f"  {refutation.serve}",
        f"  {refutation.bench}",
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
