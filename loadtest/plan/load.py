"""`Load`: the same requests at any rate. One seed gives the same prompts and lengths, and another
rate only stretches their arrivals, so that two probes differ in nothing else."""

import math
from dataclasses import replace

from penstock.loadtest.simulate.simulation import as_ids
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.token_counter import TokenCounter, estimate_tokens
from penstock.loadtest.workload.workload import TimedRequest, make_requests

# Fewer say nothing of a 99th percentile.
MIN_REQUESTS = 200
# Ids below it take no memory of their own in Python; which ids a prompt has changes nothing here.
_VOCAB_SIZE = 256
# The next probe is often of a somewhat higher rate, and making all prompts again takes seconds.
_SPARE = 1.35


class Load:
    """config: lengths and prompts; of a trace without a rate, its own arrivals, else Poisson ones.
    seconds: of each probe, if that is MIN_REQUESTS or more."""

    def __init__(
        self, config: WorkloadConfig, seconds: float, count: TokenCounter | None = None
    ) -> None:
        self._config = replace(
            config,
            vocab_size=min(config.vocab_size, _VOCAB_SIZE),
            request_rate=math.inf if config.follows_trace else 1.0,
        )
        self._count = count or estimate_tokens
        self.seconds = seconds
        self._requests: list[TimedRequest] = []
        self._is_whole = False  # a file has no more

    @property
    def follows_trace(self) -> bool:
        return self._config.follows_trace

    def own_rate(self) -> float:
        """The mean rate of the trace's own arrivals."""
        self._make(1_000_000)
        return self._mean_rate()

    def at(self, rate: float, seconds: float | None = None) -> list[TimedRequest]:
        """Requests of so many seconds at this mean rate, in order of arrival."""
        num = max(MIN_REQUESTS, math.ceil(rate * (seconds or self.seconds)))
        if num > len(self._requests) and not self._is_whole:
            self._make(math.ceil(_SPARE * num))
        factor = self._mean_rate() / rate
        return [
            replace(request, arrival_s=request.arrival_s * factor)
            for request in self._requests[:num]
        ]

    def _mean_rate(self) -> float:
        """1 but for a trace."""
        if not self.follows_trace:
            return 1.0
        span_s = self._requests[-1].arrival_s - self._requests[0].arrival_s
        return (len(self._requests) - 1) / max(span_s, 1e-9) if len(self._requests) > 1 else 1.0

    def _make(self, num: int) -> None:
        config = replace(self._config, num_prompts=num)
        self._requests = as_ids(make_requests(config, self._count), config)
        self._is_whole = len(self._requests) < num
