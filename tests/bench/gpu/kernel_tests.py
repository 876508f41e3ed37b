"""The kernels' tests on the device: a process for each file, and one more for each it loses."""

import concurrent.futures
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.gpu.processes import Log, Process, Row
from tests.support.paths import ROOT

# The tests marked gpu, and those that use the device where there is one. The longest come first.
FILES = (
    "tests/engine/models/test_fused.py",
    "tests/engine/kernels/test_sample.py",
    "tests/engine/attention/test_paged.py",
    "tests/engine/executors/test_cuda.py",
    "tests/engine/executors/test_cuda_adapters.py",
    "tests/engine/kernels/test_kernels.py",
    "tests/engine/attention/test_backends.py",
    "tests/engine/executors/test_step_sampler.py",
    "tests/engine/kernels/test_launch.py",
    "tests/engine/kernels/test_blocks.py",
    "tests/engine/kernels/test_pieces.py",
    "tests/engine/executors/test_pool_mover.py",
    "tests/engine/sampling/test_sampler.py",
    "tests/engine/kernels/test_codes.py",
    "tests/engine/kernels/test_experts.py",
    "tests/engine/kernels/test_delta_net.py",
    "tests/engine/kernels/test_adapters.py",
    "tests/engine/kernels/test_scaled.py",
    "tests/engine/models/test_fused_linear.py",
)
# These measure the device, or take what is left of its memory: one by one, after the others.
ALONE = ("tests/engine/memory/test_hardware.py", "tests/engine/executors/test_cuda_setup.py")
# Two ranks on the device; and on two GPUs, where there are so many.
RANKS_FILES = ("tests/distributed/test_cuda_ranks.py",)
TINY_FILES = ("tests/engine/kernels/test_blocks.py", "tests/engine/kernels/test_launch.py")
# Most of a test's seconds are Triton's compiler on one core.
_CORES_PER_FILE = 2
# No test compiles for so long.
STALL_S = 60.0
_ENDED_WELL = ("passed", "skipped")
_OPTIONS = (
    *("-c", str(Path(__file__).with_name("on_device.ini")), "-p", "tests.bench.gpu.pytest_rows"),
    *(f"--rootdir={ROOT}", f"--confcutdir={ROOT}"),
)


@dataclass(frozen=True, slots=True)
class KernelTests:
    """alone: files that run after the others, one by one."""

    files: Sequence[str]
    alone: Sequence[str]
    note: Callable[[Row], None]
    fail: Callable[[str, str], None]
    log: Log
    environment: dict[str, str]
    stall_s: float = STALL_S

    def run(self, ends_s: float) -> None:
        """Fails by the name of each test that fails, and of each file that does not come to its
        end before ends_s of time.monotonic()."""
        at_once = max(1, min(len(self.files), (os.cpu_count() or 1) // _CORES_PER_FILE))
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda file: self._run(file, ends_s), self.files))
        for file in self.alone:
            self._run(file, ends_s)

    def _run(self, file: str, ends_s: float) -> None:
        done: dict[str, str] = {}  # the state of each test
        while True:
            before = set(done)
            problem = self._run_rest(file, done, ends_s)
            for test in done.keys() - before:
                if done[test] == "started":
                    done[test] = "failed"
                    self.fail(test, f"the process ended in it: {problem}")
            # Without progress, it would go on in the same way.
            if problem is None or done.keys() == before:
                break
        if problem:
            self.fail(file, f"not all of its tests ran: {problem}")
        self.note({"part": "tests", "file": file, "states": _counts(done)})

    def _run_rest(self, file: str, done: dict[str, str], ends_s: float) -> str | None:
        """Why tests may be left that did not run, or None."""
        limit_s = ends_s - time.monotonic()
        if limit_s <= 0:
            return "the time was used up"

        def note(row: Row) -> None:
            self.note(row)
            test, state = str(row["test"]), str(row["state"])
            # A test that passes may still fail as it is torn down.
            if state != "started" and done.get(test) != "failed":
                if state not in _ENDED_WELL:
                    self.fail(test, str(row["message"]))
                done[test] = state
            elif state == "started":
                done.setdefault(test, state)

        with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
            names.write("\n".join(done))
            names.flush()
            process = Process(
                [sys.executable, "-m", "pytest", *_OPTIONS, file],
                note,
                self.log,
                limit_s=limit_s,
                stall_s=self.stall_s,
                environment=self.environment
                | {"PENSTOCK_TESTS_DONE": names.name, "OMP_NUM_THREADS": str(_CORES_PER_FILE)},
            )
            ended = process.wait()
        # Of pytest: tests failed; and no test was left.
        return None if process.status in (0, 1, 5) else ended.problem


def _counts(states: dict[str, str]) -> dict[str, int]:
    found = list(states.values())
    return {state: found.count(state) for state in sorted(set(found))}
