"""The kernels' tests on the device: processes for each file, and one more for each they lose."""

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


@dataclass(frozen=True, slots=True)
class TestFile:
    """processes: by which its tests are divided, as most of their seconds are Triton's compiler on
    one core. On an H200 a test took 6 s where nothing was compiled before."""

    __test__ = False

    name: str
    processes: int = 1


# The tests marked gpu, and those that use the device where there is one. Those come first without
# which no goal's figure means anything: the kernels of a step, then models, then what few use.
FILES = (
    TestFile("tests/engine/kernels/test_kernels.py", 3),
    TestFile("tests/engine/attention/test_paged.py", 3),
    TestFile("tests/engine/kernels/test_latent_attention.py", 3),
    TestFile("tests/engine/kernels/test_sample.py", 2),
    TestFile("tests/engine/executors/test_cuda.py"),
    TestFile("tests/engine/models/test_fused.py", 4),
    TestFile("tests/engine/kernels/test_launch.py"),
    TestFile("tests/engine/attention/test_backends.py"),
    TestFile("tests/engine/attention/test_flash_prefill.py"),
    TestFile("tests/engine/executors/test_step_sampler.py"),
    TestFile("tests/engine/kernels/test_codes.py", 4),
    TestFile("tests/engine/kernels/test_experts.py", 2),
    TestFile("tests/engine/kernels/test_blocks.py"),
    TestFile("tests/engine/kernels/test_pieces.py"),
    TestFile("tests/engine/sampling/test_sampler.py", 2),
    TestFile("tests/engine/executors/test_cuda_adapters.py", 2),
    TestFile("tests/engine/executors/test_pool_mover.py"),
    TestFile("tests/engine/kernels/test_delta_net.py"),
    TestFile("tests/engine/kernels/test_adapters.py"),
    TestFile("tests/engine/kernels/test_scaled.py"),
    TestFile("tests/engine/models/test_fused_linear.py"),
)
# These measure the device, or take what is left of its memory: one by one, after the others.
ALONE = (
    TestFile("tests/engine/memory/test_hardware.py"),
    TestFile("tests/engine/executors/test_cuda_setup.py"),
)
# Two ranks on the device; and on two GPUs, where there are so many.
RANKS_FILES = (TestFile("tests/distributed/test_cuda_ranks.py"),)
TINY_FILES = (
    TestFile("tests/engine/kernels/test_blocks.py"),
    TestFile("tests/engine/kernels/test_launch.py"),
)
# Of the time that is left, for each file that runs alone.
_SHARE_ALONE = 0.08
# No test compiles for so long.
STALL_S = 60.0
_ENDED_WELL = ("passed", "skipped")
OPTIONS = (
    f"--config-file={Path(__file__).with_name('on_device.ini')}",
    f"--rootdir={ROOT}",
    f"--confcutdir={ROOT}",
)
_ROWS = ("-p", "tests.bench.gpu.pytest_rows")


@dataclass(frozen=True, slots=True)
class KernelTests:
    """alone: files that run after the others, one by one."""

    files: Sequence[TestFile]
    alone: Sequence[TestFile]
    note: Callable[[Row], None]
    fail: Callable[[str, str], None]
    log: Log
    environment: dict[str, str]
    stall_s: float = STALL_S

    def run(self, ends_s: float) -> None:
        """Fails by the name of each test that fails, and of each file that does not come to its
        end before ends_s of time.monotonic(). A row says of each what did not run."""
        shares = [(file, share) for file in self.files for share in range(file.processes)]
        left_s = ends_s - time.monotonic()
        together_s = ends_s - _SHARE_ALONE * len(self.alone) * max(0.0, left_s)
        at_once = max(1, min(len(shares), os.cpu_count() or 1))
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda each: self._run(each[0], each[1], together_s), shares))
        for file in self.alone:
            self._run(file, 0, ends_s)

    def _run(self, file: TestFile, share: int, ends_s: float) -> None:
        part = f"{share}/{file.processes}"
        names: list[str] = []
        done: dict[str, str] = {}  # the state of each test
        while True:
            before = set(done)
            problem = self._run_rest(file.name, part, names, done, ends_s)
            for test in done.keys() - before:
                if done[test] == "started":
                    done[test] = "failed"
                    self.fail(test, f"the process ended in it: {problem}")
            # Without progress, it would go on in the same way.
            if problem is None or done.keys() == before:
                break
        not_run = [name for name in names if name not in done]
        row: Row = {"part": "tests", "file": file.name, "states": _counts(done)}
        if file.processes > 1:
            row["share"] = f"{share + 1} of {file.processes}"
        if problem:
            row |= {"not_run": len(not_run) if names else "all", "tests_not_run": not_run}
            count = f"{len(not_run)} of {len(names)}" if names else "all"
            self.fail(file.name, f"{count} of its tests did not run: {problem}")
        self.note(row)

    def _run_rest(
        self, file: str, share: str, names: list[str], done: dict[str, str], ends_s: float
    ) -> str | None:
        """Why tests may be left that did not run, or None. names: gets those of all tests."""
        limit_s = ends_s - time.monotonic()
        if limit_s <= 0:
            return "the time was used up"

        def note(row: Row) -> None:
            if "tests" in row:
                names[:] = row["tests"]
                return
            self.note(row)
            test, state = str(row["test"]), str(row["state"])
            # A test that passes may still fail as it is torn down.
            if state != "started" and done.get(test) != "failed":
                if state not in _ENDED_WELL:
                    self.fail(test, str(row["message"]))
                done[test] = state
            elif state == "started":
                done.setdefault(test, state)

        with tempfile.NamedTemporaryFile("w", suffix=".txt") as finished:
            finished.write("\n".join(done))
            finished.flush()
            process = Process(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    *OPTIONS,
                    "-p",
                    "tests.bench.gpu.pytest_rows",
                    file,
                ],
                note,
                self.log,
                limit_s=limit_s,
                stall_s=self.stall_s,
                environment=self.environment
                | {
                    "PENSTOCK_TESTS_DONE": finished.name,
                    "PENSTOCK_TESTS_SHARE": share,
                    "OMP_NUM_THREADS": "1",
                },
            )
            ended = process.wait()
        # Of pytest: tests failed; and no test was left.
        return None if process.status in (0, 1, 5) else ended.problem


def _counts(states: dict[str, str]) -> dict[str, int]:
    found = list(states.values())
    return {state: found.count(state) for state in sorted(set(found))}
