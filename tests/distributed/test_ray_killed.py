"""What is left of a Ray that is killed. A file of its own: one machine has ports for one Ray."""

import os
import signal
from pathlib import Path

import pytest

from tests.distributed.conftest import deploy


@pytest.mark.timeout(900)
def test_nothing_is_left_of_a_server_that_is_killed(tmp_path: Path) -> None:
    with deploy(tmp_path, is_killed=True) as deployed:
        names = " ".join(deployed.processes().values())
        assert all(name in names for name in ("raylet", "haproxy", "ServeReplica", "engine.ipc"))
        os.kill(deployed.session, signal.SIGKILL)
