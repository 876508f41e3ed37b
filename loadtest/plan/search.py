"""The highest rate at which a candidate meets the targets, and how it does below that rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.load import Load
from penstock.loadtest.plan.probe import Point, probe
from penstock.loadtest.plan.targets import Targets
from penstock.loadtest.simulate.simulation import Plan, simulate

# Below the limit, for the front of throughput against speed: shares of the highest rate.
SHARES = (0.25, 0.5, 0.75)
# A first guess is the throughput with all slots taken; a load with targets carries less.
_START_SHARE = 0.8
_MAX_GUESSED = 1200  # requests of that guess
# It is good, so that the first step from it is small; where targets are tight it may be far off.
_FIRST_FACTOR, _MAX_FACTOR, _MAX_RATIO = 1.3, 4.0, 4000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """points: in the order of the search. limit: the highest rate that met the targets; None where
    no rate did, nor where none missed them."""

    candidate: Candidate
    points: list[Point]
    limit: float | None

    @property
    def best(self) -> Point | None:
        """At the limit."""
        return next((point for point in self.points if point.rate == self.limit), None)


class Limit(NamedTuple):
    """met: the highest rate that met the targets; missed: the lowest one that did not. None where
    there is none."""

    met: float | None
    missed: float | None


class Judged(Protocol):
    """A measurement at a rate. is_met: whether all targets were."""

    @property
    def is_met(self) -> bool: ...


AnyJudged = TypeVar("AnyJudged", bound=Judged)


def find_limit(
    measure: Callable[[float], AnyJudged], start: float, precision: float
) -> tuple[list[AnyJudged], Limit]:
    """Raises or lowers the rate until one meets the targets and one does not, in steps that grow,
    then bisects, until the two are within the precision, relative to the lower one."""
    points: list[AnyJudged] = []
    met = missed = None
    rate, factor = start, _FIRST_FACTOR
    while start / _MAX_RATIO <= rate <= start * _MAX_RATIO:
        point = measure(rate)
        points.append(point)
        if point.is_met:
            met = rate
        else:
            missed = rate
        if met is None or missed is None:
            rate = rate * factor if point.is_met else rate / factor
            factor = min(factor * factor, _MAX_FACTOR)
        elif missed <= met * (1 + precision):
            break
        else:
            rate = math.sqrt(met * missed)
    return points, Limit(met, missed)


def search(
    candidate: Candidate,
    load: Load,
    targets: Targets,
    *,
    precision: float,
    has_front: bool = True,
    on_point: Callable[[Point], None] = lambda point: None,
) -> Searched:
    """has_front: whether to probe at SHARES of the limit too. on_point: called after each probe."""

    def measure(rate: float) -> Point:
        point = probe(candidate, load.at(rate), rate, targets)
        on_point(point)
        return point

    points, (limit, _) = find_limit(measure, _first_rate(candidate, load), precision)
    if limit is not None and has_front:
        points += [measure(share * limit) for share in SHARES]
    return Searched(candidate=candidate, points=points, limit=limit)


def _first_rate(candidate: Candidate, load: Load) -> float:
    server = candidate.server
    num = min(_MAX_GUESSED, 3 * server.scheduler.max_num_seqs)
    requests = [replace(request, arrival_s=0.0) for request in load.at(1.0)[:num]]
    concurrency = server.scheduler.max_num_seqs
    plan = Plan(server=server, max_concurrency=concurrency, seed=None)
    observed = simulate(plan, requests).observed
    return _START_SHARE * max(1, len(observed.completed)) / observed.duration_s
