"""`Made`: a whole plan, as JSON for programs and `penstock bench --check`, and as rows of CSV."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from penstock.loadtest.bench.expectation import Expectation
from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.choice import Choice, Cost, Sized, cost_of
from penstock.loadtest.plan.probe import Point
from penstock.loadtest.plan.search import Searched
from penstock.loadtest.plan.targets import Targets

FORMAT = 1
# Of a plan from a datasheet; a calibration has the stages that were measured.
NO_STAGES = (
    "PP stays at 1: how long states take from the GPUs of a stage to those of the next is not in "
    "the step model, and a plan does not recommend what it cannot predict. More devices than a "
    "replica has are more replicas, behind a router of your own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """rate: requests per second to carry; None for what one replica carries. front: see `front`.
    choice, expectation, serve, bench: None and empty where no candidate meets the targets. notes:
    what to know before it is believed."""

    name: str
    date: str
    version: str
    rate: float | None
    targets: Targets
    searched: list[Searched]
    ranked: list[Sized]
    choice: Choice | None
    front: list[tuple[Candidate, Point]]
    expectation: Expectation | None
    serve: str
    bench: str
    notes: list[str]

    @property
    def cost(self) -> Cost | None:
        if self.choice is None:
            return None
        return cost_of(self.choice.price, self.choice.point)


def document(made: Made) -> dict[str, Any]:
    choice = made.choice
    return {
        "format": FORMAT,
        "model_id": made.name,
        "date": made.date,
        "version": made.version,
        "request_rate": made.rate,
        "targets_p99_ms": made.targets.limits_ms,
        "plan": None
        if choice is None
        else _flags(choice.sized.candidate)
        | {
            "num_replicas": choice.num_replicas,
            "num_devices": choice.num_devices,
            "price_per_hour": choice.price,
            "is_confirmed": choice.is_confirmed,
            "max_request_rate_per_replica": choice.sized.searched.limit,
            "figures": asdict(choice.point),
            "cost_per_million_tokens": None if made.cost is None else asdict(made.cost),
        },
        "serve": made.serve,
        "bench": made.bench,
        "expectation": None if made.expectation is None else asdict(made.expectation),
        "candidates": [
            _flags(each.candidate)
            | {"max_request_rate": each.limit, "probes": [asdict(point) for point in each.points]}
            for each in made.searched
        ],
        "front": [
            _flags(candidate) | {"figures": asdict(point)} for candidate, point in made.front
        ],
        "notes": made.notes,
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


_COLUMNS = (
    "device",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "quantization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "step_time_bias",
    "request_rate",
    "meets_targets",
    "on_front",
    "output_tokens_per_s_per_device",
    "tokens_per_s_per_user",
    "goodput",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "cost_per_million_input_tokens",
    "cost_per_million_output_tokens",
)


def as_csv(made: Made) -> str:
    """A row for each probe that was not ended early."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(_rows(made.searched, {id(point) for _, point in made.front}))
    return text.getvalue()


def _rows(searched: Iterable[Searched], on_front: set[int]) -> Iterator[list[object]]:
    for each in searched:
        candidate = each.candidate
        for point in each.points:
            if point.is_whole:
                cost = cost_of(candidate.replica_price, point)
                yield [
                    *_flags(candidate).values(),
                    point.rate,
                    point.is_met,
                    id(point) in on_front,
                    point.device_tokens_per_s,
                    point.user_tokens_per_s,
                    point.goodput,
                    point.ttft_p50_ms,
                    point.ttft_p99_ms,
                    point.tpot_p50_ms,
                    point.tpot_p99_ms,
                    None if cost is None else cost.input,
                    None if cost is None else cost.output,
                ]
