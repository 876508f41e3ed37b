"""A running server's own steps, and what a request costs there besides the engine."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import msgspec

from penstock.engine.model_info import ModelInfo
from penstock.loadtest.bench.http1 import BufferedResponse, ConnectionPool, HttpFailed
from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import TargetUnusable, wait_until_ready
from penstock.loadtest.workload.config import DEFAULT_VOCAB_SIZE
from penstock.loadtest.workload.workload import TimedRequest, make_prompt
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.step_model.samples import StepSample

PROBE_TOKENS = 16
_NUM_PROBES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSteps:
    """What GET /steps answers."""

    version: str
    model: ModelInfo
    scheduler: SchedulerConfig
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


async def ttft_when_idle(
    base_url: str, headers: dict[str, str], say: Callable[[str], None]
) -> tuple[str, float]:
    """The model's name, and the median TTFT in seconds of short prompts, one after the other.

    Raises TargetUnusable. Meaningful if nothing else uses the server.
    """
    models = await wait_until_ready(base_url, timeout_s=60.0, say=say, headers=headers)
    config = TargetConfig(base_url=base_url, model=models[0].id, ignore_eos=True, headers=headers)
    ttfts = []
    async with HttpTarget(config) as target:
        for index in range(_NUM_PROBES):
            # Not seeded: what the server has seen is in its prefix cache.
            ids = make_prompt(f"{secrets.randbits(64)}", PROBE_TOKENS, DEFAULT_VOCAB_SIZE)
            request = TimedRequest(
                index=index,
                arrival_s=0.0,
                prompt=ids,
                num_prompt_tokens=PROBE_TOKENS,
                max_tokens=2,
            )
            result = await target.send(request, target.encode(request), 0.0)
            if result.error is not None:
                raise TargetUnusable(f"{base_url} refused a short request: {result.error}")
            ttfts.append(result.ttft_s)
    return models[0].id, median(ttfts[_NUM_PROBES // 4 :])
