"""Who reaches a deployment on Ray, and what becomes of it when a replica is killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.distributed.conftest import Deployed, deploy
from tests.distributed.load import stream

pytestmark = pytest.mark.timeout(900)
KEY = "a key of an operator"
HEADERS = {"Authorization": f"Bearer {KEY}"}
_LISTENS = "0A"  # in /proc/net/tcp
_LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
_REPLICA = "ray::ServeReplica:penstock:penstock"
_REPLACED_S = 60.0
_CONNECT = """
import ray
ray.init(address="auto")
print("connected to", len(ray.nodes()), "node")
"""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    flags: dict[str, Any] = {"api-key": KEY}
    with deploy(tmp_path_factory.mktemp("ray"), **flags) as deployed:
        yield deployed


def test_no_process_listens_on_another_interface_than_loopback(deployed: Deployed) -> None:
    found = listening(deployed)
    for name in ("gcs_server", "raylet", "DashboardAgent", "RuntimeEnvAgent", "haproxy", _REPLICA):
        assert any(name in command for command in found.values()), name
    elsewhere = {a: c for a, c in found.items() if a.partition(":")[0] not in _LOOPBACK}
    assert elsewhere == {}


def test_a_job_is_taken_from_nobody_without_the_token(deployed: Deployed) -> None:
    codes = []
    for address, command in listening(deployed).items():
        if "DashboardAgent" in command:
            url = f"http://127.0.0.1:{int(address.rpartition(':')[2], 16)}/api/job_agent/jobs/"
            with contextlib.suppress(httpx.HTTPError):  # its other ports speak gRPC
                codes.append(httpx.post(url, json={"entrypoint": "true"}).status_code)
    assert 401 in codes and all(code >= 400 for code in codes)


def listening(deployed: Deployed) -> dict[str, str]:
    """The command of each address that a process listens on, as /proc/net/tcp writes it."""
    commands = {}
    for pid, command in deployed.processes().items():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for file in Path(f"/proc/{pid}/fd").iterdir():
                commands[str(file.readlink())] = command
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == _LISTENS and f"socket:[{inode}]" in commands:
                found[address] = commands[f"socket:[{inode}]"]
    return found


@pytest.mark.parametrize(("token", "reaches_it"), [(None, True), ("0" * 64, False)])
def test_only_who_has_the_token_of_this_user_reaches_ray(
    deployed: Deployed, token: str | None, reaches_it: bool
) -> None:
    assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    variables = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", _CONNECT],
        env=os.environ | variables | ({"RAY_AUTH_TOKEN": token} if token else {}),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ended.returncode == 0) is reaches_it, ended.stderr
    assert ("connected to 1 node" in ended.stdout) is reaches_it
    assert reaches_it or "token" in ended.stderr


async def test_a_key_is_asked_for_and_metrics_are_those_of_a_replica(deployed: Deployed) -> None:
    async with httpx.AsyncClient(base_url=deployed.url, timeout=60) as client:
        for path in ("/v1/models", "/metrics"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=HEADERS)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        client.headers = httpx.Headers(HEADERS)
        assert (await stream(client, deployed.url, "Count.", 5)).is_whole
        assert "penstock_requests_total" in (await client.get("/metrics")).text


async def test_a_killed_replica_takes_its_own_streams_alone_and_is_replaced(
    deployed: Deployed,
) -> None:
    async with httpx.AsyncClient(timeout=120, headers=HEADERS) as client:
        running = [
            asyncio.create_task(stream(client, deployed.url, f"{i}: count.", 200))
            for i in range(12)
        ]
        await asyncio.sleep(2.0)
        killed = replicas(deployed)
        assert len(killed) == 2
        os.kill(killed[0], signal.SIGKILL)
        streams = await asyncio.gather(*running)
        whole = [each for each in streams if each.is_whole]
        cut = [each for each in streams if not each.is_whole]
        # Cut in the middle, and seen as an error by the client, not as an end.
        assert whole and cut and all(each.error and each.token_s for each in cut)
        ends_s = time.monotonic() + _REPLACED_S
        while len(now := replicas(deployed)) < 2 or killed[0] in now:
            assert time.monotonic() < ends_s, now
            await asyncio.sleep(0.2)
        assert killed[1] in now
        answers = [await stream(client, deployed.url, f"{i}: again.", 20) for i in range(4)]
        assert all(each.is_whole for each in answers)


def replicas(deployed: Deployed) -> list[int]:
    """Their process ids."""
    lines = deployed.processes().items()
    return sorted(pid for pid, line in lines if line.strip("\0 ") == _REPLICA)
