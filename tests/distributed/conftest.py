"""A Ray with two replicas of the scripted engine, for all tests of a file."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.serving import free_port, wait_until

# Longer than any stream of these tests.
DRAIN_S = 60
_START_S = 280.0
_STOP_S = 120.0
# Ray's own end by themselves when the one that started them has. If it was killed, its agents first
# try for a minute to tell it to the GCS, which has ended too.
_LEFT_S, _LEFT_BY_A_KILLED_S = 30.0, 150.0
# A variable that all processes of one deployment have, but those whose title took its place.
_MARK = "PENSTOCK_TESTS_DEPLOYMENT"


@dataclass(frozen=True, slots=True)
class Deployed:
    """url: of HAProxy. flags: what `build` is given. mark: see `_MARK`. session: of the server and
    of what it started, but for the engines."""

    url: str
    flags: dict[str, Any]
    log: Path
    mark: str
    session: int

    def processes(self) -> dict[int, str]:
        """The command line of each, by its process id."""
        found = {}
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                # After the command, in parentheses: state, parent, group, session.
                state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
                variables = (process / "environ").read_bytes()
                is_ours = int(session) == self.session or _variable(self.mark) in variables
                if is_ours and state != "Z":
                    found[int(process.name)] = (process / "cmdline").read_text()
        return found

    def redeploy(self, **changes: Any) -> subprocess.Popen[bytes]:
        flags = {**self.flags, **changes}
        command = [sys.executable, "-m", "tests.distributed.redeploy", json.dumps(flags)]
        return subprocess.Popen(command, cwd=ROOT)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deploy(tmp_path_factory.mktemp("ray")) as deployed:
        yield deployed


@contextlib.contextmanager
def deploy(folder: Path, *, is_killed: bool = False, **more_flags: Any) -> Iterator[Deployed]:
    """Also when a test has failed, none of its processes is left at the end. is_killed: the server
    is, by the test."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'penstock[ray]'")
    port, log, mark = free_port(), folder / "log", uuid.uuid4().hex
    flags = {
        "scripted": True,
        "scripted-step-ms": 20,
        "num-replicas": 2,
        "num-cpus": 0.5,
        "port": port,
        "shutdown-timeout": DRAIN_S,
        **more_flags,
    }
    words = [f"--{k}" if v is True else f"--{k}={v}" for k, v in flags.items()]
    command = [sys.executable, "-m", "penstock", "ray", *words]
    with log.open("wb") as file:
        variables = os.environ | {"RAY_DEDUP_LOGS": "0", _MARK: mark}
        server = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=ROOT, env=variables, start_new_session=True
        )
    deployed = Deployed(f"http://127.0.0.1:{port}", flags, log, mark, server.pid)
    try:
        _until_ready(server, log)
        yield deployed
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
            raise
    assert server.returncode == (-signal.SIGKILL if is_killed else 0)
    wait_until(lambda: not deployed.processes(), _LEFT_BY_A_KILLED_S if is_killed else _LEFT_S)


def _variable(mark: str) -> bytes:
    return f"{_MARK}={mark}".encode()


def _until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while "penstock: ready on" not in log.read_text(errors="replace"):
        text = log.read_text(errors="replace")
        assert server.poll() is None and time.monotonic() < deadline, text[-5000:]
        time.sleep(0.2)
