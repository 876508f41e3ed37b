"""The kernels' tests as a part of the GPU suite: what a test that ends its process loses."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu.kernel_tests import ALONE, FILES, KernelTests, TestFile
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


Rows = list[dict[str, Any]]


def _ran(
    folder: Path, code: str, limit_s: float, *, processes: int = 1, stall_s: float = 60
) -> tuple[Rows, dict[str, str]]:
    """The rows of a file of tests, and why it or some of them failed."""
    file = folder / "test_losses.py"
    file.write_text(code)
    rows: Rows = []
    failed: dict[str, str] = {}
    of_file, log = TestFile(str(file), processes), Log(folder / "log.txt")
    tests = KernelTests([of_file], [], rows.append, failed.__setitem__, log, {}, stall_s)
    tests.run(time.monotonic() + limit_s)
    return rows, failed


@pytest.fixture
def failures(tmp_path: Path) -> dict[str, str]:
    """Of `LOSSES`, by the test's name."""
    rows, failed = _ran(tmp_path, LOSSES, 240, stall_s=6)
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


TYPES = """
import pytest, torch

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
def test_of_types(dtype, rows): pass

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_bfloat16(dtype): pass

def test_of_none(): pass
"""


def test_of_types_a_device_tries_bfloat16_alone_and_each_test_runs_in_one_process(
    tmp_path: Path,
) -> None:
    rows, failed = _ran(tmp_path, TYPES, 120, processes=2)
    started = [str(row["test"]) for row in rows if row.get("state") == "started"]
    assert sorted(name.partition("::")[2] for name in started) == [
        "test_of_none", "test_of_types[1-dtype2]", "test_of_types[2-dtype2]",
        "test_without_bfloat16[dtype0]",
    ]  # fmt: skip
    assert {row["share"] for row in rows if row["part"] == "tests"} == {"1 of 2", "2 of 2"}
    assert failed == {}


def test_what_did_not_run_in_time_is_said_in_a_row(tmp_path: Path) -> None:
    code = "import time\ndef test_first(): time.sleep(600)\ndef test_second(): pass\n"
    rows, failed = _ran(tmp_path, code, 20)
    (row,) = [row for row in rows if row["part"] == "tests"]
    assert [str(name).partition("::")[2] for name in row["tests_not_run"]] == ["test_second"]
    assert "1 of 2 of its tests did not run" in failed[str(tmp_path / "test_losses.py")]
    rows, failed = _ran(tmp_path, code, 0)
    assert rows[-1]["not_run"] == "all"
    assert "all of its tests did not run: the time was used up" in next(iter(failed.values()))


_RECORD = """
import torch
from triton.runtime import driver
from tests.bench.gpu.compile import HopperDriver
from tests.bench.gpu.recorded_tests import launches_of
found = list(launches_of("tests/engine/kernels/test_experts.py"))
driver.set_active(HopperDriver())
next(launch for launch in found if launch.name == "_route").warm_up()
for launch in found:
    types = {getattr(value, "dtype", None) for value in launch.arguments.values()}
    print(launch.name, torch.bfloat16 in types, torch.float16 in types, launch.arguments["PDL"])
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="the GPU's stand-in needs g++")
def test_what_the_tests_launch_on_a_gpu_is_found_and_compiled_without_one(tmp_path: Path) -> None:
    cache = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _RECORD],
        cwd=ROOT,
        env=os.environ | cache,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert {"_route", "_gate_up", "_down"} <= {name for name, *_ in found}
    assert ["_gate_up", "True", "False", "True"] in found
    assert {(of_float16, is_early) for *_, of_float16, is_early in found} == {("False", "True")}
    assert list(tmp_path.glob("*/_route.cubin"))


def test_every_file_with_a_test_for_a_gpu_is_run() -> None:
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests" / "engine").rglob("test_*.py")
        if any(word in file.read_text() for word in ("mark.gpu", "import DEVICE", "DEVICE ="))
    }
    names = {file.name for file in (*FILES, *ALONE)}
    assert marked <= names
    assert all((ROOT / name).is_file() for name in names)
