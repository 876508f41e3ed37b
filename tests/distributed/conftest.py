"""One Ray, with two replicas of the scripted engine, for all tests of a file."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.serving import free_port

# Longer than any stream of these tests.
DRAIN_S = 60
_START_S = 280.0
_STOP_S = 120.0


@dataclass(frozen=True, slots=True)
class Deployed:
    """url: of HAProxy. flags: what `build` is given."""

    url: str
    flags: dict[str, Any]
    log: Path

    def redeploy(self, **changes: Any) -> subprocess.Popen[bytes]:
        flags = {**self.flags, **changes}
        command = [sys.executable, "-m", "tests.distributed.redeploy", json.dumps(flags)]
        return subprocess.Popen(command, cwd=ROOT)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'penstock[ray]'")
    port, log = free_port(), tmp_path_factory.mktemp("ray") / "log"
    flags = {
        "scripted": True,
        "scripted-step-ms": 20,
        "num-replicas": 2,
        "num-cpus": 0.5,
        "port": port,
        "shutdown-timeout": DRAIN_S,
    }
    words = [f"--{k}" if v is True else f"--{k}={v}" for k, v in flags.items()]
    command = [sys.executable, "-m", "penstock", "ray", *words]
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=ROOT, env=os.environ | {"RAY_DEDUP_LOGS": "0"}
        )
    try:
        _until_ready(server, log)
        yield Deployed(f"http://127.0.0.1:{port}", flags, log)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
            raise
    assert server.returncode == 0


def _until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while "penstock: ready on" not in log.read_text(errors="replace"):
        text = log.read_text(errors="replace")
        assert server.poll() is None and time.monotonic() < deadline, text[-5000:]
        time.sleep(0.2)
