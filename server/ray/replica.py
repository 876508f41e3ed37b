"""One replica: the app of `penstock serve`, in an actor of Ray, with the engine as its child."""

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.types import ASGIApp

from penstock.engine.client import configure_logs
from penstock.server.app import build_app
from penstock.server.config import ServeConfig
from penstock.server.http.middleware import LastResort
from penstock.server.observability.request_log import request_id
from penstock.server.ray.environment import close_to_others
from penstock.server.service import Service, State

NUM_OPEN, AT_S = "num_open", "at_s"
_LOADING_CHECK_S = 0.05


class Replica:
    """Ray builds the app once this is made, runs its lifespan, and asks `check_health` before the
    first request and every few seconds from then on."""

    def __init__(self, config: ServeConfig) -> None:
        close_to_others()
        self._config = config
        self._service: Service | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:  # a name of Ray's
        configure_logs(
            self._config.server.log_level, self._config.server.log_format, request_id.get
        )
        self._service = Service(self._config)
        return LastResort(build_app(self._service))

    async def check_health(self) -> None:
        """Raises NotServing, for which Ray replaces the replica, as soon as the engine has ended or
        a step hangs. While the model loads, it waits: the replica gets requests only then."""
        assert self._service
        while self._service.state is State.STARTING:  # noqa: ASYNC110  # once, at the start
            await asyncio.sleep(_LOADING_CHECK_S)
        self._service.check_health()

    def record_routing_stats(self) -> dict[str, float]:
        """For the router: what is open, and when that was."""
        assert self._service
        return {NUM_OPEN: self._service.num_open, AT_S: time.time()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        assert self._service
        report = self._service.last_report
        if report is None:
            return {LOAD: 0.0}
        stats = report.stats
        max_num_seqs = self._config.engine.scheduler.max_num_seqs
        return {LOAD: load(stats.num_running, stats.num_waiting, max_num_seqs, stats.kv_usage)}


LOAD = "load"
# A share of a replica's capacity, beyond which answers wait for one another.
_TARGET = 0.75


class Context(Protocol):
    """The part of Ray's AutoscalingContext that is read."""

    target_num_replicas: int
    policy_state: dict[str, Any]

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


def load(num_running: int, num_waiting: int, max_num_seqs: int, kv_usage: float) -> float:
    """Returns the load of one replica, as a share of its capacity: of sequences or of the KV cache,
    whichever is scarcer. Above 1 where requests wait. kv_usage: the share of the cache that
    sequences hold."""
    waiting = num_waiting / max_num_seqs
    return max((num_running + num_waiting) / max_num_seqs, kv_usage + waiting)


def replicas_for_load(context: Context) -> tuple[int, dict[str, Any]]:
    """As many as hold the whole load at three quarters of their capacity. Ray averages the loads
    over look_back_period_s, and damps what this says by its delays."""
    loads = (context.aggregated_metrics or {}).get(LOAD)
    if not loads:
        return context.target_num_replicas, context.policy_state
    # Rounded first: 1.5 / 0.75 must not become three replicas.
    return max(1, math.ceil(round(sum(loads.values()) / _TARGET, 6))), context.policy_state
