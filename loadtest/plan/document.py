"""`CapacityPlan`: as JSON for programs and `penstock bench --check`, and as rows of CSV."""

import csv
import io
from dataclasses import asdict, dataclass
from typing import Any

from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.choice import Choice, Cost, Sized, cost_of
from penstock.loadtest.plan.probe import Point, Targets
from penstock.loadtest.plan.refutation import Refutation
from penstock.loadtest.plan.search import Searched

FORMAT = 1


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
        "expectation": asdict(refutation.expectation) if refutation else None,
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
        "is_confirmed": choice.point.is_met,
        "max_request_rate_per_replica": sized.limit,
        "figures": asdict(choice.point),
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
        "goodput": point.goodput,
        "ttft_p50_ms": point.ttft_p50_ms,
        "ttft_p99_ms": point.ttft_p99_ms,
        "tpot_p50_ms": point.tpot_p50_ms,
        "tpot_p99_ms": point.tpot_p99_ms,
        "cost_per_million_input_tokens": cost.input if cost else None,
        "cost_per_million_output_tokens": cost.output if cost else None,
    }
