"""Waiting times of the M/D/1 queue: Poisson arrivals, one server, a constant time of service."""

import math
from collections.abc import Callable


def share_that_waits_at_most(rate: float, service_s: float, wait_s: float) -> float:
    """Source: Erlang 1909, as in Gross and Harris, Fundamentals of Queueing Theory, section 5.1.

    P(W <= t) = (1 - rho) * sum of (rate (kD - t))^k / k! * exp(-rate (kD - t)) over k <= t / D,
    written so that all terms are of the same sign's magnitude up to some thirty services.
    """
    total = math.fsum(
        (-1.0) ** k * math.exp(_log_term(rate * (wait_s - k * service_s), k))
        for k in range(int(wait_s / service_s) + 1)
        if wait_s > k * service_s or k == 0
    )
    return (1 - rate * service_s) * total


def _log_term(x: float, k: int) -> float:
    """Of x^k e^x / k!, for x >= 0."""
    if k == 0:
        return x
    return k * math.log(x) + x - math.lgamma(k + 1)


def highest_rate(service_s: float, limit_s: float, share: float) -> float:
    """At which this share of the requests waits and is served within limit_s."""

    def excess(rate: float) -> float:
        return share_that_waits_at_most(rate, service_s, limit_s - service_s) - share

    return _root(excess, 1e-6, 0.999 / service_s)


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """f falls."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return low
