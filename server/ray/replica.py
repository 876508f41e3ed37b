"""One replica: the app of `penstock serve`, in an actor of Ray, with the engine as its child."""

import asyncio
import time

from starlette.types import ASGIApp

from penstock.engine.client import configure_logs
from penstock.server.app import build_app
from penstock.server.config import ServeConfig
from penstock.server.http.last_resort import LastResort
from penstock.server.observability.request_log import request_id
from penstock.server.ray.autoscaling import LOAD, load
from penstock.server.service import Service, State

NUM_OPEN, AT_S = "num_open", "at_s"
_LOADING_CHECK_S = 0.05


class Replica:
    """Ray builds the app once this is made, runs its lifespan, and asks `check_health` before the
    first request and every few seconds from then on."""

    def __init__(self, config: ServeConfig) -> None:
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
