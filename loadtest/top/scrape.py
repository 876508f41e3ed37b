"""Reads a Penstock server's /metrics: scrapes, what changed between two, quantiles.

Knows HTTP and Prometheus's text format; draws nothing. Imports only the standard library and
prometheus_client's parser, so that it starts fast.
"""

import http.client
import math
import socket
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from penstock.scheduler.errors import PenstockError

PREFIX = "penstock_"
_START_TIME = "process_start_time_seconds"
_SCRAPE_TIMEOUT_S = 5.0
_MAX_SCRAPE_BYTES = 32 << 20  # our own are tens of KB; a longer body is not ours
_MAX_VALUE = 1e30  # likewise
_COUNTER_ENDINGS = ("_total", "_count", "_bucket")

Labels = frozenset[tuple[str, str]]


class ServerUnreachable(PenstockError):
    """The server does not respond now, and may later."""


class NotPenstock(PenstockError):
    """Not a Penstock server, or it refuses the key: a retry does not help."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: ascending upper bounds and the cumulative count of each."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def since(self, earlier: "Buckets") -> "Buckets":
        """The observations after `earlier`; all if its bounds differ, as an empty one's do."""
        if earlier.bounds != self.bounds:
            return self
        counts = tuple(b - a for a, b in zip(earlier.counts, self.counts, strict=True))
        return Buckets(self.bounds, counts, self.sum - earlier.sum)

    def quantile(self, q: float) -> float | None:
        """As Prometheus's histogram_quantile: linear inside a bucket, the first of which starts at
        0; above the last finite bound, that bound. None where Prometheus returns NaN.

        q: from 0 to 1. Source: prometheus.io/docs/prometheus/latest/querying/functions.
        """
        if len(self.bounds) < 2 or not math.isinf(self.bounds[-1]) or not self.count:
            return None
        rank = q * self.count
        index = next(i for i, count in enumerate(self.counts) if count >= rank)
        if index == len(self.bounds) - 1:
            return self.bounds[-2]
        upper = self.bounds[index]
        if index == 0 and upper <= 0:
            return upper
        lower, below = (self.bounds[index - 1], self.counts[index - 1]) if index else (0.0, 0.0)
        inside = self.counts[index] - below
        return lower + (upper - lower) * (rank - below) / inside if inside else None


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one GET /metrics, by name and labels. time_s: of the monotonic clock."""

    time_s: float
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float | None:
        """The sum over the series of penstock_`name` with these labels; None if there are none."""
        found = [value for _, value in self._matching(name, labels)]
        return sum(found) if found else None

    def info(self, name: str) -> dict[str, str]:
        """The labels of an info metric; empty if it is missing."""
        return dict(next((key for key, _ in self._matching(name, {})), ()))

    def histogram(self, name: str, **labels: str) -> Buckets:
        """Summed over the series with these labels; empty if there are none."""
        counts: dict[float, float] = {}
        for key, value in self._matching(f"{name}_bucket", labels, "le"):
            bound = float(dict(key)["le"])
            counts[bound] = counts.get(bound, 0.0) + value
        bounds = tuple(sorted(counts))
        total = self.value(f"{name}_sum", **labels) or 0.0
        return Buckets(bounds, tuple(counts[bound] for bound in bounds), total)

    def restarted_since(self, earlier: "Scrape") -> bool:
        """Whether a counter decreased: the server, or its engine, has restarted."""
        return any(
            value < earlier.values.get(name, {}).get(labels, 0.0)
            for name, series in self.values.items()
            if name.endswith(_COUNTER_ENDINGS)
            for labels, value in series.items()
        )

    def _matching(
        self, name: str, labels: dict[str, str], *needed: str
    ) -> Iterator[tuple[Labels, float]]:
        wanted = frozenset(labels.items())
        full_name = name if name == _START_TIME else PREFIX + name
        for key, value in self.values.get(full_name, {}).items():
            if wanted <= key and all(label in dict(key) for label in needed):
                yield key, value

    @property
    def age_s(self) -> float | None:
        """The uptime of the server's process, by this machine's clock."""
        started = self.value(_START_TIME)
        return max(0.0, time.time() - started) if started else None


@dataclass(frozen=True, slots=True)
class Window:
    """The changes between two scrapes. With an empty `earlier`: since the server started."""

    earlier: Scrape
    later: Scrape

    @property
    def seconds(self) -> float:
        return self.later.time_s - self.earlier.time_s

    def increase(self, name: str, **labels: str) -> float | None:
        """Returns that of a counter; None if the server has no such counter."""
        after = self.later.value(name, **labels)
        if after is None:
            return None
        return after - (self.earlier.value(name, **labels) or 0.0)

    def rate(self, name: str, **labels: str) -> float | None:
        increase = self.increase(name, **labels)
        return increase / self.seconds if increase is not None and self.seconds > 0 else None

    def share(self, part: str, whole: str) -> float | None:
        """One counter's increase as a share of another's; None if the other did not increase."""
        of = self.increase(whole)
        return (self.increase(part) or 0.0) / of if of else None

    def histogram(self, name: str, **labels: str) -> Buckets:
        earlier = self.earlier.histogram(name, **labels)
        return self.later.histogram(name, **labels).since(earlier)


class History:
    """The scrapes of the last span_s seconds, oldest first. A restart of the server clears it."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._scrapes: deque[Scrape] = deque()

    def add(self, scrape: Scrape) -> None:
        if self._scrapes and scrape.restarted_since(self._scrapes[-1]):
            self._scrapes.clear()
        self._scrapes.append(scrape)
        # The newest scrape that is at least as old as the span is kept: the span starts there.
        while len(self._scrapes) > 2 and self._scrapes[1].time_s <= scrape.time_s - self._span_s:
            self._scrapes.popleft()

    @property
    def latest(self) -> Scrape | None:
        return self._scrapes[-1] if self._scrapes else None

    def last_interval(self) -> Window | None:
        return Window(self._scrapes[-2], self._scrapes[-1]) if len(self._scrapes) > 1 else None

    def whole(self) -> Window | None:
        """Between the first scrape that is kept and the last."""
        return Window(self._scrapes[0], self._scrapes[-1]) if len(self._scrapes) > 1 else None

    def intervals(self) -> Iterator[Window]:
        """Between each scrape and the next, oldest first."""
        for earlier, later in pairwise(self._scrapes):
            yield Window(earlier, later)


def parse(text: str, time_s: float) -> Scrape:
    """Keeps Penstock's series and the process's start time. Raises ValueError."""
    values: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(PREFIX) or family.name == _START_TIME:
            for sample in family.samples:
                float(sample.labels.get("le", 0))  # a histogram's bound must be a number
                series = values.setdefault(sample.name, {})
                if 0 <= sample.value < _MAX_VALUE:  # false for NaN
                    series[frozenset(sample.labels.items())] = float(sample.value)
    return Scrape(time_s, values)


class Scraper:
    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A redirect is not followed: it would send the key to another address.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def scrape(self) -> Scrape:
        """Raises ServerUnreachable or NotPenstock."""
        text = self._get()
        try:
            scrape = parse(text, time.monotonic())
        except ValueError:
            scrape = Scrape(0.0)
        if not any(name.startswith(PREFIX) for name in scrape.values):
            raise self._not_penstock("has no Penstock metrics")
        return scrape

    def _get(self) -> str:
        request = urllib.request.Request(f"{self.url}/metrics", headers=self._headers)
        try:
            with self._opener.open(request, timeout=_SCRAPE_TIMEOUT_S) as response:
                body: bytes = response.read(_MAX_SCRAPE_BYTES)
                return body.decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refusal(error.code) from error
        except urllib.error.URLError as error:
            raise self._unreachable(error.reason) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _refusal(self, status: int) -> PenstockError:
        if status in (401, 403):
            return NotPenstock(
                f"{self.url} requires a valid API key (status {status}); give it with --api-key, "
                "or in $PENSTOCK_API_KEY"
            )
        if status in (429, 500, 502, 503, 504):
            return ServerUnreachable(f"it is loading or unhealthy (status {status})")
        return self._not_penstock(f"returned status {status}")

    def _unreachable(self, reason: object) -> PenstockError:
        if isinstance(reason, socket.gaierror):
            return NotPenstock(
                f"{self.url}: unknown host name; give the address that `penstock serve` printed"
            )
        if isinstance(reason, ConnectionRefusedError):
            return ServerUnreachable("connection refused")
        if isinstance(reason, TimeoutError):
            return ServerUnreachable(f"no response within {_SCRAPE_TIMEOUT_S:.0f} s")
        return ServerUnreachable(str(reason) or type(reason).__name__)

    def _not_penstock(self, what: str) -> NotPenstock:
        return NotPenstock(
            f"{self.url}/metrics {what}; give the address that `penstock serve` printed"
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        """None: the redirect becomes an HTTPError."""
