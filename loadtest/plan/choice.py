"""Which candidate carries the load at the least cost, with how many replicas."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from penstock.loadtest.bench.forecast import Forecast
from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.probe import Point, Targets, probe
from penstock.loadtest.plan.search import Load, Searched

# The plan is simulated whole, behind a router; more replicas are, for a shorter time.
_MAX_WHOLE = 8
_LEAST_S = 30.0
# Replicas that are added where a router does worse than the arithmetic, or a rate that is lowered
# so often, by so much, where the forecast of the highest one misses the targets.
_MAX_MORE = 3
_LOWER = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A candidate for the whole load. limit: the highest rate of one replica."""

    searched: Searched
    limit: float
    num_replicas: int

    @property
    def candidate(self) -> Candidate:
        return self.searched.candidate

    @property
    def num_devices(self) -> int:
        """All replicas together."""
        return self.num_replicas * self.candidate.num_devices

    @property
    def price(self) -> float | None:
        """All devices, an hour."""
        return None if self.candidate.price is None else self.candidate.price * self.num_devices


@dataclass(frozen=True, slots=True)
class Choice:
    """point: all replicas under the whole load, simulated. forecast: of one server with its share
    of it, the only forecast that a plan has."""

    sized: Sized
    point: Point
    forecast: Forecast

    @property
    def meets_targets(self) -> bool:
        return self.point.is_met and self.forecast.meets_targets


def sized(searched: Iterable[Searched], rate: float | None) -> list[Sized]:
    """Those that meet the targets at some rate, the best first. rate: None for as much as one
    replica carries."""
    able = [
        Sized(
            searched=each,
            limit=limit,
            # A limit that is just missed by rounding is not missed.
            num_replicas=1 if rate is None else math.ceil(rate / limit - 1e-9),
        )
        for each in searched
        if (limit := each.limit)
    ]
    return sorted(able, key=_price_of_a_request if rate is None else _price_of_all)


def _price_of_a_request(each: Sized) -> tuple[float, ...]:
    """The order without a load: the cheapest first for each request that is carried."""
    price = (each.candidate.price or 1.0) * each.candidate.num_devices
    return price / each.limit, each.candidate.quantization is not None


def _price_of_all(each: Sized) -> tuple[float, ...]:
    """The cheapest first; among equals, weights as they are, then those that carry most."""
    return (
        each.num_devices if each.price is None else each.price,
        each.num_devices,
        each.candidate.quantization is not None,
        -each.limit * each.num_replicas,
    )


def choose(
    best: Sized,
    load: Load,
    targets: Targets,
    rate: float | None,
    forecast_at: Callable[[Candidate, float], Forecast],
) -> Choice:
    """Simulates the whole, behind a router, with more replicas while the targets are missed;
    without a rate, one replica at a rate that falls. forecast_at: of one server at a rate."""
    for more in range(_MAX_MORE + 1):
        if rate is None:
            tried = replace(best, limit=best.limit * _LOWER**more)
        else:
            tried = replace(best, num_replicas=best.num_replicas + more)
        num, tried_rate = tried.num_replicas, tried.limit if rate is None else rate
        seconds = max(min(_LEAST_S, load.seconds), load.seconds * min(1.0, _MAX_WHOLE / num))
        requests = load.at(tried_rate, seconds)
        point = probe(best.candidate, requests, tried_rate, targets, num_replicas=num)
        choice = Choice(tried, point, forecast_at(best.candidate, tried_rate / num))
        if choice.meets_targets:
            break
    return choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A million prompt tokens, and a million output tokens, each with its share of the devices'
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
    """The Pareto front: among the points that meet the targets, those that no other one beats in
    both output tokens per second of a device and of a user. In order of the latter, rising."""
    points = [
        (user, each.candidate, point)
        for each in searched
        for point in each.points
        if point.is_met and (user := point.user_tokens_per_s)
    ]
    points.sort(key=lambda each: (-each[2].device_tokens_per_s, -each[0]))
    unbeaten, fastest = [], 0.0
    for user, candidate, point in points:
        if user > fastest:
            fastest = user
            unbeaten.append((candidate, point))
    return unbeaten
