"""A running server's own steps."""

from dataclasses import dataclass

import msgspec

from penstock.engine.step.model_info import ModelInfo
from penstock.loadtest.bench.http1 import BufferedResponse, ConnectionPool, HttpFailed
from penstock.loadtest.bench.readiness import TargetUnusable
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.step_model.samples import StepSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSteps:
    """What GET /steps answers: see `server.observability.step_record`."""

    version: str
    model: ModelInfo
    scheduler: SchedulerConfig
    num_steps: int
    front_end_cpu_s: float
    steps: list[StepSample]


async def read_steps(base_url: str, headers: dict[str, str]) -> ServerSteps:
    """Raises TargetUnusable."""
    pool = ConnectionPool(base_url, headers)
    response = BufferedResponse()
    try:
        await pool.request(pool.encode("GET", "/steps"), response)
        if response.status != 200:
            raise TargetUnusable(
                f"{base_url}/steps answers HTTP {response.status}; penstock calibrate needs a "
                "Penstock server, and its key in OPENAI_API_KEY if it has one"
            )
        return msgspec.json.decode(response.data, type=ServerSteps)
    except (HttpFailed, msgspec.MsgspecError) as error:
        raise TargetUnusable(f"{base_url}/steps cannot be read: {error}") from error
    finally:
        await pool.close()
