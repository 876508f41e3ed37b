"""`Calibration`: one file with a step model, and of which server it is a model.

A running server is asked for its steps, and the costs of its front end are measured while it is
idle: short answers one after the other, one long answer, and many at once differ in how many
requests, steps and tokens there are; the processor time of the server's process for each gives the
three costs.
"""

import asyncio
import re
import secrets
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.step_times import read_calibration
from penstock.loadtest.bench.forecast import MAX_BAR_RATIO
from penstock.loadtest.bench.http1 import ConnectionPool, HttpFailed
from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import TargetUnusable, wait_until_ready
from penstock.loadtest.bench.replay import replay
from penstock.loadtest.calibrate.drafts import DraftsAssumed
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import make_requests
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.step_model.amounts import DEVICE_UNITS, HOST_UNITS
from penstock.scheduler.step_model.least_squares import NormalEquations
from penstock.scheduler.step_model.model import StepModel
from penstock.scheduler.step_model.samples import StepSample

PROBE_TOKENS = 16  # of each prompt
# Requests one after the other, and how many of the first are not counted.
_NUM_SHORT, _NUM_WARM_UP = 40, 10
_LONG_TOKENS = 128
_NUM_AT_ONCE, _TOKENS_AT_ONCE = 16, 32


class FrontEnd(NamedTuple):
    """Seconds. request_s: of the thread, for each request; report_s: for what a step reports, and
    token_s: for each token in it. delay_s: of a request besides, which keeps nobody else waiting:
    connections, and processes that wake up.
    """

    request_s: float = 0.0
    report_s: float = 0.0
    token_s: float = 0.0
    delay_s: float = 0.0

    @property
    def idle_s(self) -> float:
        """From a client to the engine and back, but for its work, on an idle server."""
        return self.request_s + self.report_s + self.token_s + self.delay_s


NO_FRONT_END = FrontEnd()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """name: the model's. ttft_s: the median of requests one after the other. costs: of the front
    end, without a delay, since that cannot be told from the engine's time."""

    name: str
    ttft_s: float
    costs: FrontEnd


async def measure_front_end(
    base_url: str, headers: dict[str, str], say: Callable[[str], None]
) -> Measured:
    """Takes as long as some two hundred steps. Raises TargetUnusable."""
    models = await wait_until_ready(base_url, timeout_s=60.0, say=say, headers=headers)
    config = TargetConfig(base_url=base_url, model=models[0].id, ignore_eos=True, headers=headers)
    equations = NormalEquations(3)
    async with HttpTarget(config) as target:
        await _send(target, _NUM_WARM_UP, 1, at_once=1)
        before = await read_steps(base_url, headers)
        start = await read_steps(base_url, headers)
        reading_s = start.front_end_cpu_s - before.front_end_cpu_s
        room = max(1, start.model.max_model_len - PROBE_TOKENS)
        ttfts: list[float] = []
        for num, length, at_once in (
            (_NUM_SHORT, 1, 1),
            (1, min(_LONG_TOKENS, room), 1),
            (_NUM_AT_ONCE, min(_TOKENS_AT_ONCE, room), _NUM_AT_ONCE),
        ):
            measured = await _send(target, num, length, at_once=at_once)
            ttfts = ttfts or measured
            end = await read_steps(base_url, headers)
            spent_s = end.front_end_cpu_s - start.front_end_cpu_s - reading_s
            row = (num, end.num_steps - start.num_steps, num * length)
            equations.add(row, spent_s, 1 / max(spent_s, 1e-6) ** 2)
            start = end
    costs = FrontEnd(*equations.solve())
    return Measured(name=models[0].id, ttft_s=median(ttfts), costs=costs)


async def _send(target: HttpTarget, num: int, length: int, *, at_once: int) -> list[float]:
    """So many requests with answers of so many tokens; returns each TTFT in seconds."""
    workload = WorkloadConfig(
        seed=secrets.randbits(64),  # what the server has seen is in its prefix cache
        num_prompts=num,
        input_len=PROBE_TOKENS,
        output_len=length,
    )
    observed = await replay(target, make_requests(workload), max_concurrency=at_once)
    if observed.failed:
        raise TargetUnusable(f"the server refused a short request: {observed.failed[0].error}")
    if observed.is_interrupted:
        raise asyncio.CancelledError
    return [result.ttft_s for result in observed.results]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSteps:
    """The answer of GET /steps: see `server.observability.predictions`."""

    version: str
    model: ModelInfo
    scheduler: SchedulerConfig
    num_steps: int
    front_end_cpu_s: float
    steps: list[StepSample]


async def read_steps(base_url: str, headers: dict[str, str]) -> ServerSteps:
    """Raises TargetUnusable."""
    data = await _get(base_url, headers, "/steps")
    try:
        return msgspec.json.decode(data, type=ServerSteps)
    except msgspec.MsgspecError as error:
        raise TargetUnusable(f"{base_url}/steps cannot be read: {error}") from error


async def read_metrics(base_url: str, headers: dict[str, str]) -> str:
    """Raises TargetUnusable."""
    return (await _get(base_url, headers, "/metrics")).decode()


def cached_share(metrics: str) -> float:
    """The share of the prompt tokens since the server's start that its prefix cache had."""
    found = re.findall(r"^penstock_prefix_(query|hit)_tokens_total (\S+)", metrics, re.MULTILINE)
    counts = {name: float(value) for name, value in found}
    return counts.get("hit", 0.0) / max(1.0, counts.get("query", 0.0))


async def _get(base_url: str, headers: dict[str, str], path: str) -> bytes:
    """Raises TargetUnusable."""
    try:
        async with aclosing(ConnectionPool(base_url, headers)) as pool:
            response = await pool.fetch("GET", path)
    except HttpFailed as error:
        raise TargetUnusable(f"{base_url}{path} cannot be read: {error}") from error
    if response.status != 200:
        raise TargetUnusable(
            f"{base_url}{path} answers HTTP {response.status}; penstock calibrate needs a "
            "Penstock server, and its key in OPENAI_API_KEY if it has one"
        )
    return response.data


_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """model: the served model, named `name`, its device, types and limits. scheduler: the flags
    that it was measured with. front_end: what is not the engine's: HTTP, the tokenizer, messages;
    nothing of it where there was no server. drafts: what became of the server's own; None where it
    had few. source: where the steps came from, for people. date: as in results. units: of the step
    model's coefficients, which are seconds of each.
    """

    name: str
    source: str
    date: str
    version: str
    model: ModelInfo
    scheduler: SchedulerConfig
    step_model: StepModel
    front_end: FrontEnd = NO_FRONT_END
    drafts: DraftsAssumed | None = None
    format: int = _FORMAT
    device_units: tuple[str, ...] = DEVICE_UNITS
    host_units: tuple[str, ...] = HOST_UNITS

    @property
    def is_poor(self) -> bool:
        """Whether most steps are of classes so far off that no forecast could be refuted."""
        errors = self.step_model.errors.values()
        poor = sum(e.num_steps for e in errors if 1 + e.bias > MAX_BAR_RATIO * (1 - e.bias))
        return 2 * poor > sum(e.num_steps for e in errors)

    def write(self, path: Path) -> None:
        """Raises InvalidConfig."""
        data = msgspec.json.format(msgspec.json.encode(self))
        try:
            path.write_bytes(data + b"\n")
        except OSError as error:
            raise InvalidConfig(f"--output {path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Raises InvalidConfig."""
        read = read_calibration(path, cls)
        if (read.format, read.device_units, read.host_units) != (_FORMAT, DEVICE_UNITS, HOST_UNITS):
            raise InvalidConfig(
                f"--calibration {path} is of another version of Penstock, {read.version}; make it "
                "anew with penstock calibrate"
            )
        return read
