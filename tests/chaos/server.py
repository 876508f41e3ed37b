"""A server in this process, over loopback, whose engine can be ended at any of its steps."""

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from penstock.engine.client import EngineClient, EngineState, OutputStream, StepReport
from penstock.engine.config import EngineConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request
from penstock.server.app import http_server
from penstock.server.config import DuringRestart, ServeConfig, ServerConfig
from penstock.server.service import Service, State
from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.serving import MODEL


class WatchedEngine(EngineClient):
    """Notes the requests that it is given, for their seeds."""

    def __init__(self, config: EngineConfig, module: str) -> None:
        super().__init__(config, module)
        self.requests: list[Request] = []

    def submit_alike(self, requests: Sequence[Request]) -> list[OutputStream]:
        self.requests += requests
        return super().submit_alike(requests)


@dataclass
class Killer:
    """Sends a signal to the engine at a step of each of its lives, which the seed decides."""

    engine: EngineClient
    random: random.Random
    max_steps: int
    number: signal.Signals = signal.SIGKILL
    num_kills: int = 0
    max_kills: int = 0  # none until somebody says so
    _victim: int | None = None
    _left: int = 0

    def rest(self) -> None:
        """Until `max_kills` is set again."""
        self.max_kills = 0

    def on_step(self, report: StepReport) -> None:
        pid = self.engine.process.pid
        if self.num_kills >= self.max_kills or pid is None or not report.step:
            return
        if pid != self._victim:
            self._victim, self._left = pid, self.random.randint(1, self.max_steps)
        self._left -= 1
        if not self._left:
            self.num_kills += 1
            os.kill(pid, self.number)


@dataclass
class Running:
    service: Service
    engine: WatchedEngine
    client: httpx.AsyncClient
    port: int

    async def until_ready(self) -> None:
        async with asyncio.timeout(120):
            while self.engine.state is not EngineState.READY:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def blocks_in_use(self, after_s: float = 1.0) -> int:
        """So long after the last answer has ended."""
        async with asyncio.timeout(600):
            while self.engine.streams.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(after_s)
        return self.service.metrics.stats.groups[0].num_used


@contextlib.asynccontextmanager
async def running(
    module: str = "penstock.engine.ipc.process", **settings: object
) -> AsyncIterator[Running]:
    """The demo model on one thread. settings: of `EngineConfig`."""
    os.environ["PYTHONPATH"] = str(ROOT)  # the engine's process finds `tests`
    small = {
        "model": str(DEMO_MODEL),
        "num_threads": 1,
        "max_engine_restarts": 100_000,
        "kv_cache_memory_bytes": 64 << 20,
        "scheduler": SchedulerConfig(max_num_seqs=128),
        "log_level": "error",
    }
    config = ServeConfig(
        server=ServerConfig(served_model_names=(MODEL,), port=0, during_restart=DuringRestart.WAIT),
        engine=EngineConfig(**(small | settings)),  # type: ignore[arg-type]
    )
    make_engine: Callable[[EngineConfig], EngineClient] = partial(WatchedEngine, module=module)
    service = Service(config, make_engine)
    server = http_server(service)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(600):  # on a machine that is busy with other things
                while service.state is not State.READY:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            engine = service._engine
            assert isinstance(engine, WatchedEngine)
            port = listener.getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=1800, limits=limits) as client:
                yield Running(service, engine, client, port)
        finally:
            await service.drain("the end of the test")
            server.should_exit = True
            await serving
