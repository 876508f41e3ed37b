"""The line in the log every ten seconds while there is work: what runs, how fast, how full."""

import asyncio
import logging
import time
from typing import NamedTuple

from penstock.engine.client import ModelInfo
from penstock.server.observability.metrics import Metrics

logger = logging.getLogger("penstock")

_INTERVAL_S = 10.0


class _Counts(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    query_tokens: int
    hit_tokens: int


class Activity:
    """Logs what the server does. `run` is a task that starts once the model is loaded."""

    def __init__(self, metrics: Metrics, model: ModelInfo, interval_s: float = _INTERVAL_S) -> None:
        self._metrics = metrics
        self._model = model
        self._interval_s = interval_s
        self._last = self._counts()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if line := self.line():
                logger.info("%s", line)

    def line(self) -> str | None:
        """The work since the previous line and the current state; None if there was no work."""
        before, now = self._last, self._counts()
        self._last = now
        stats, num_waiting = self._metrics.stats, self._metrics.num_waiting
        is_idle = now[1:3] == before[1:3] and not stats.num_running and not num_waiting
        if is_idle:
            return None
        elapsed_s = max(now.at_s - before.at_s, 1e-9)
        parts = [
            f"running {stats.num_running}",
            f"waiting {num_waiting}",
            f"prompt {(now.prompt_tokens - before.prompt_tokens) / elapsed_s:.1f} tokens/s",
            f"output {(now.output_tokens - before.output_tokens) / elapsed_s:.1f} tokens/s",
            *self._utilization(),
            f"KV use {stats.kv_usage:.1%}",
        ]
        if num_queried := now.query_tokens - before.query_tokens:
            parts.append(f"prefix hits {(now.hit_tokens - before.hit_tokens) / num_queried:.1%}")
        return ", ".join(parts)

    def _utilization(self) -> list[str]:
        """MBU relative to the datasheet's bandwidth, or to the measured one if that is unknown."""
        model = self._metrics.model or self._model
        peak = model.peak_bandwidth_bytes_per_s or model.measured_bandwidth_bytes_per_s
        return [f"MBU {self._metrics.recent().bytes_per_s / peak:.1%}"] if peak else []

    def _counts(self) -> _Counts:
        metrics, stats = self._metrics, self._metrics.stats
        return _Counts(
            time.monotonic(),
            metrics.prefill_tokens,
            metrics.generated_tokens,
            stats.prefix_query_tokens_total,
            stats.prefix_hit_tokens_total,
        )
