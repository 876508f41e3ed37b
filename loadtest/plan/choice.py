"""Which candidate carries the load at the least cost, with how many replicas."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.load import Load
from penstock.loadtest.plan.probe import Point, probe
from penstock.loadtest.plan.search import Searched
from penstock.loadtest.plan.targets import Targets

# The plan is simulated whole, behind a router; more replicas are, for a shorter time.
_MAX_WHOLE = 8
_LEAST_S = 30.0
# Replicas that are added where a router does worse than the arithmetic.
_MAX_MORE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A candidate for the whole load. num_replicas: what the limit of one says."""

    searched: Searched
    num_replicas: int

    @property
    def candidate(self) -> Candidate:
        return self.searched.candidate

    @property
    def num_devices(self) -> int:
        """Of all replicas."""
        return self.num_replicas * self.candidate.num_devices

    @property
    def price(self) -> float | None:
        """Of all devices, an hour."""
        return None if self.candidate.price is None else self.candidate.price * self.num_devices

    @property
    def rank(self) -> tuple[float, int, bool, float]:
        """The cheapest first; among equals, weights as they are, then what carries most."""
        cost = self.num_devices if self.price is None else self.price
        return (
            cost,
            self.num_devices,
            self.candidate.quantization is not None,
            -(self.searched.limit or 0.0) * self.num_replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """point: all replicas under the whole load. is_confirmed: whether it met the targets there."""

    sized: Sized
    num_replicas: int
    point: Point
    is_confirmed: bool

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.sized.candidate.num_devices

    @property
    def price(self) -> float | None:
        """Of all devices, an hour."""
        each = self.sized.candidate.price
        return None if each is None else each * self.num_devices


def sized(searched: Iterable[Searched], rate: float | None) -> list[Sized]:
    """Those that meet the targets at some rate, the best first. rate: None for what one replica
    carries."""
    able = [each for each in searched if each.limit]
    return sorted(
        (
            Sized(
                searched=each,
                # A limit that is just missed by rounding is not missed.
                num_replicas=1 if rate is None else math.ceil(rate / (each.limit or 1.0) - 1e-9),
            )
            for each in able
        ),
        key=_rank(rate),
    )


def _rank(rate: float | None) -> Callable[[Sized], tuple[float, ...]]:
    """Without a load, what costs least for each request that is carried."""

    def per_request(each: Sized) -> tuple[float, ...]:
        limit = each.searched.limit or 1e-9
        cost = (each.candidate.price or 1.0) * each.candidate.num_devices
        return (cost / limit, each.candidate.quantization is not None)

    return per_request if rate is None else lambda each: each.rank


def choose(best: Sized, load: Load, targets: Targets, rate: float) -> Choice:
    """Simulates the whole, behind a router, with more replicas while the targets are missed."""
    candidate, num = best.candidate, best.num_replicas
    while True:
        seconds = max(min(_LEAST_S, load.seconds), load.seconds * min(1.0, _MAX_WHOLE / num))
        requests = load.at(rate, seconds)
        point = probe(candidate, requests, rate, targets, num_replicas=num)
        if point.is_met or num >= best.num_replicas + _MAX_MORE:
            return Choice(sized=best, num_replicas=num, point=point, is_confirmed=point.is_met)
        num += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a million tokens: prompt tokens, and output tokens, each with its share of the devices'
    time."""

    input: float
    output: float


def cost_of(price: float | None, point: Point) -> Cost | None:
    """price: of all devices of the point, an hour. None without a price or complete figures."""
    if price is None or not (point.input_tokens_per_s and point.output_tokens_per_s):
        return None
    a_second, share = price / 3600, point.input_share or 0.0
    return Cost(
        input=a_second * share / point.input_tokens_per_s * 1e6,
        output=a_second * (1 - share) / point.output_tokens_per_s * 1e6,
    )


def front(searched: Iterable[Searched]) -> list[tuple[Candidate, Point]]:
    """The Pareto front: of the points that meet the targets, those that no other one beats in both
    output tokens per second of a device and of a user. In order of the latter, rising."""
    points = [
        (each.candidate, point)
        for each in searched
        for point in each.points
        if point.is_met and point.user_tokens_per_s
    ]
    points.sort(key=lambda each: (-each[1].device_tokens_per_s, -(each[1].user_tokens_per_s or 0)))
    kept, fastest = [], 0.0
    for candidate, point in points:
        if (point.user_tokens_per_s or 0) > fastest:
            fastest = point.user_tokens_per_s or 0
            kept.append((candidate, point))
    return kept
