"""The demo model on several processes ("ranks") behind a real `EngineClient`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.engine.config import Device, EngineConfig
from penstock.engine.ipc.client import EngineClient
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request
from tests.support.paths import DEMO_MODEL
from tests.support.scheduling import make_request

REQUESTS = [
    make_request("greedy", 40, max_tokens=400, temperature=0.0),
    make_request("sampled", 9, max_tokens=300, temperature=1.0, seed=3, n=2),
]


def config(**changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "model": str(DEMO_MODEL),
        "device": Device.CPU,
        "num_threads": 1,
        "scheduler": SchedulerConfig(max_num_seqs=8),
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 16 * 2**20,
    }
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def started(**changes: object) -> AsyncIterator[EngineClient]:
    client = EngineClient(config(**changes))
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def children(pid: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_of(client: EngineClient) -> list[int]:
    """The processes of the ranks after the first."""
    assert client.process.pid is not None
    return children(client.process.pid)


def rank_of(client: EngineClient) -> int:
    """That of the only further rank."""
    (rank,) = ranks_of(client)
    return rank


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def until_ended(*pids: int) -> None:
    async with asyncio.timeout(30):  # a few ms, unless the machine is busy
        while any(map(is_running, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def ids_of(client: EngineClient, request: Request) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(request.n)]
    async for outputs in client.submit(request):
        for output in outputs:
            ids[output.index] += output.token_ids
    return ids
