"""The kernels' tests as a part of the GPU suite: what a test that ends its process loses."""

import time
from pathlib import Path

import pytest

from tests.bench.gpu.kernel_tests import ALONE, FILES, KernelTests
from tests.bench.gpu.record import Log
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

LOSSES = """
import os, signal, time

def test_first(): pass
def test_that_aborts(): os.abort()
def test_second(): pass
def test_that_loses_the_device(): raise RuntimeError("CUDA error: an illegal memory access")
def test_third(): pass
def test_that_hangs():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
def test_that_is_wrong(): assert 1 == 2
def test_last(): pass
"""


@pytest.fixture
def failures(tmp_path: Path) -> dict[str, str]:
    """Of `LOSSES`, by the test's name."""
    file = tmp_path / "test_losses.py"
    file.write_text(LOSSES)
    rows: list[dict[str, object]] = []
    failed: dict[str, str] = {}
    tests = KernelTests(
        [str(file)], [], rows.append, failed.__setitem__, Log(tmp_path / "log.txt"), {}, stall_s=6
    )
    tests.run(time.monotonic() + 240)
    assert rows[-1]["states"] == {"failed": 4, "passed": 4}
    return {name.rpartition("::")[2]: message for name, message in failed.items()}


@pytest.mark.slow
def test_a_test_that_ends_its_process_ends_no_other(failures: dict[str, str]) -> None:
    assert list(failures) == [
        "test_that_aborts", "test_that_loses_the_device", "test_that_hangs", "test_that_is_wrong",
    ]  # fmt: skip
    assert "SIGABRT" in failures["test_that_aborts"]
    assert "illegal memory access" in failures["test_that_loses_the_device"]
    assert "without a result" in failures["test_that_hangs"]
    assert "assert 1 == 2" in failures["test_that_is_wrong"]


def test_every_file_with_a_test_for_a_gpu_is_run() -> None:
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests" / "engine").rglob("test_*.py")
        if any(word in file.read_text() for word in ("mark.gpu", "import DEVICE", "DEVICE ="))
    }
    assert marked <= {*FILES, *ALONE}
    assert all((ROOT / file).is_file() for file in (*FILES, *ALONE))
