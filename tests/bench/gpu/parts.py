"""The parts of the suite, by importance, and what each runs."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.scheduler.errors import InvalidConfig
from tests.bench.gpu import carried
from tests.bench.gpu.goals import LLAMA, QWEN, SMALL, Row
from tests.bench.gpu.kernel_tests import (
    ALONE,
    FILES,
    RANKS_FILES,
    STALL_S,
    TINY_FILES,
    KernelTests,
    TestFile,
)
from tests.bench.gpu.probe import Climb
from tests.bench.gpu.processes import Process
from tests.bench.gpu.record import Record
from tests.bench.gpu.ways import Way

# See `tests.bench.gpu.probe`.
_CORES_FOR_RUNGS = 8


@dataclass(slots=True)
class Run:
    """One command of the suite. simulated: see `tests.bench.gpu.simulated`, by part or rung.

    patience: of all limits; less than 1 for simulations. part: the one that runs. is_way_forced:
    the probe does not choose.
    """

    record: Record
    tiny: bool = False
    flash_attn_3: Path | None = None
    way: Way = field(default_factory=Way)
    is_way_forced: bool = False
    simulated: dict[str, str] = field(default_factory=dict)
    patience: float = 1.0
    part: str = ""

    def note(self, row: Row) -> None:
        """Records a row, and a failure if it says one."""
        self.record.note(row)
        if row.get("failed"):
            self.fail(str(row.get("kernel", row.get("group", ""))), str(row["failed"]))
        elif row.get("is_right") is False and "rung" not in row:
            fields = ", ".join(f"{key}={row[key]}" for key in row if key not in ("part", "rivals"))
            self.fail("", f"a result is wrong: {fields}")

    def fail(self, what: str, message: str) -> None:
        """what: the rung, test or kernel, if it is one of several."""
        self.record.event("failure", of=self.part, what=what, message=message)
        name = f"{self.part}, {what}" if what else self.part
        print(f"gpu_suite: {name} failed: {message}", file=sys.stderr, flush=True)

    @property
    def kind(self) -> str | None:
        """Of the simulation that takes this part's place."""
        return self.simulated.get(self.part, self.simulated.get("all"))

    def run_module(self, limit_s: float, *arguments: str, packages: Path | None = None) -> None:
        """`python -m ARGUMENTS`, in the way that was found. Records its rows, and how it ends.

        packages: a folder that it may import from besides.
        """
        process = self.start_module(limit_s, *arguments, packages=packages)
        problem = process.wait().problem
        if problem:
            self.fail("", problem)

    def start_module(
        self,
        limit_s: float,
        *arguments: str,
        has_flags: bool = True,
        packages: Path | None = None,
    ) -> Process:
        """has_flags: it takes --tiny and --enforce-eager."""
        flags = [*(["--tiny"] if self.tiny else []), *self.way.flags] if has_flags else []
        if self.kind:
            arguments, flags = ("tests.bench.gpu.simulated", self.kind, self.part), self.way.flags
        environment = dict(self.way.environment)
        if not has_flags:  # what only compiles has nothing to do where tests interpret
            environment["TRITON_INTERPRET"] = "0"
        if packages is not None:
            before = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(packages))))
        return Process(
            [sys.executable, "-m", *arguments, *flags],
            self.note,
            self.record.log,
            limit_s=limit_s,
            environment=environment,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """estimate_s: on an H200, where all is well. limit_s: when it is stopped; its rows count.
    for_goals: goals name its rows, or need it, so that no part before it takes its estimate."""

    name: str
    estimate_s: int
    limit_s: int
    measure: Callable[[Run, float], None]
    for_goals: bool = False

    def allowed_s(self, later: Sequence["Part"], left_s: float, patience: float = 1.0) -> float:
        """Of the seconds that are left, without those that the goals of later parts take. Those
        that are for goals have their own estimate first: they are worth more than those behind."""
        kept_s = patience * sum(part.estimate_s for part in later if part.for_goals)
        own_s = min(patience * self.estimate_s, left_s) if self.for_goals else 0.0
        return min(patience * self.limit_s, max(left_s - kept_s, own_s))


def _probe(run: Run, limit_s: float) -> None:
    # What its rungs launch is compiled meanwhile, on the cores that they leave.
    cores = 0 if run.tiny or run.simulated else (os.cpu_count() or 1) - _CORES_FOR_RUNGS
    ahead = _start_compiling(run, limit_s, ["probe"], max(0, cores))
    climb = Climb(run.tiny, run.simulated, run.note, run.fail, run.record.log, run.patience)
    found = climb.way(time.monotonic() + limit_s)
    if not run.is_way_forced:
        run.way = found
    run.record.event("way", overlaps=run.way.overlaps, graphs=run.way.graphs, name=run.way.name)
    _wait_for_compilers(run, ahead)


def _pytest(
    files: Sequence[TestFile], alone: Sequence[TestFile] = (), stall_s: float = STALL_S
) -> Callable[[Run, float], None]:
    """A part that runs these files of tests."""

    def measure(run: Run, limit_s: float) -> None:
        if run.kind:
            run.run_module(limit_s)
            return
        of_part = (TINY_FILES, ()) if run.tiny else (files, alone)
        record, environment = run.record, run.way.environment
        tests = KernelTests(*of_part, record.note, run.fail, record.log, environment, stall_s)
        tests.run(time.monotonic() + limit_s)

    return measure


def _ranks(run: Run, limit_s: float) -> None:
    """Its tests, and what two GPUs are worth, each way; a row says so where there are fewer."""
    ends_s = time.monotonic() + limit_s
    _pytest(RANKS_FILES, stall_s=120.0)(run, limit_s)
    if run.kind:
        return
    flags = ("--pipeline-parallel-size", "--tensor-parallel-size")
    for flag in flags[:1] if run.tiny else flags:
        left_s = max(1.0, ends_s - time.monotonic())
        run.run_module(left_s, "tests.bench.engine", "ranks", LLAMA, flag, "2")


def _compile(run: Run, limit_s: float) -> None:
    num_shares = 1 if run.tiny or run.kind else os.cpu_count() or 1
    what = ["probe", "--most", "3"] if run.tiny else ["models", "tiles"]
    _wait_for_compilers(run, _start_compiling(run, limit_s, what, num_shares))


def _start_compiling(run: Run, limit_s: float, what: list[str], num_shares: int) -> list[Process]:
    """Together they compile each kernel once."""
    command = ("tests.bench.gpu.compile", *what, "--share")
    return [
        run.start_module(limit_s, *command, f"{share}/{num_shares}", has_flags=False)
        for share in range(num_shares)
    ]


def _wait_for_compilers(run: Run, processes: list[Process]) -> None:
    for number, process in enumerate(processes):
        problem = process.wait().problem
        if problem:
            run.fail(f"compiler {number}", problem)


def _bench(*arguments: str) -> Callable[[Run, float], None]:
    """A part that is a process of `tests.bench.engine`."""

    def measure(run: Run, limit_s: float) -> None:
        more: list[str] = []
        if run.flash_attn_3 and "kernels" in arguments:
            more = ["--flash-attn-3", str(run.flash_attn_3)]
        run.run_module(limit_s, "tests.bench.engine", *arguments, *more)

    return measure


def _prefill_steps(run: Run, limit_s: float) -> None:
    """Times to a first token with our prefill, and with FlashAttention 3 where it is there."""
    ends_s = time.monotonic() + limit_s
    command = ("tests.bench.engine", "steps", LLAMA, "--points", "prefill")
    run.run_module(limit_s, *command, "--attention-backend", "triton")
    if run.flash_attn_3 and not run.kind:
        left_s = max(1.0, ends_s - time.monotonic())
        run.run_module(left_s, *command, packages=carried.as_package(run.flash_attn_3))


def _codes(quantization: str) -> Callable[[Run, float], None]:
    flags = ("--points", "codes", "--quantization", quantization)
    return _bench("steps", LLAMA, *flags)


def _http(part: str, model: str) -> Callable[[Run, float], None]:
    def measure(run: Run, limit_s: float) -> None:
        # A second less, so that it says itself why it was late.
        limit = f"{max(1.0, limit_s - 1):.0f}"
        run.run_module(limit_s, "tests.bench.gpu.http", part, model, "--limit-s", limit)

    return measure


_attention = _bench("kernels", "decode-attention", "--first", "1")

# First what the others depend on, then what the goals name, in their order, then the rest.
PARTS: tuple[Part, ...] = (
    Part("probe", 75, 200, _probe, for_goals=True),
    Part("device", 12, 60, _bench("device"), for_goals=True),
    Part("compile", 25, 60, _compile, for_goals=True),
    Part("goals-llama", 35, 80, _bench("steps", LLAMA, "--points", "goals"), for_goals=True),
    Part("goals-small", 20, 60, _bench("steps", SMALL, "--points", "goals"), for_goals=True),
    Part("offline-small", 30, 80, _bench("offline", SMALL), for_goals=True),
    Part("offline-llama", 40, 90, _bench("offline", LLAMA), for_goals=True),
    Part("http", 70, 120, _http("http", QWEN), for_goals=True),
    Part("goals-attention", 10, 40, _attention, for_goals=True),
    Part("ready", 60, 120, _http("ready", LLAMA), for_goals=True),
    Part("tests", 150, 150, _pytest(FILES, ALONE)),
    Part("linear", 75, 120, _bench("linear-tiles")),
    Part("overlap", 30, 60, _bench("steps", LLAMA, "--points", "overlap")),
    Part("decode-attention", 30, 60, _bench("kernels", "decode-attention")),
    Part("prefill-attention", 25, 60, _bench("kernels", "prefill-attention")),
    Part("prefill-steps", 50, 120, _prefill_steps),
    Part("steps-llama", 60, 120, _bench("steps", LLAMA)),
    Part("steps-small", 50, 90, _bench("steps", SMALL)),
    Part("drafts", 45, 90, _bench("steps", LLAMA, "--points", "drafts")),
    Part("steps-qwen", 60, 120, _bench("steps", QWEN)),
    Part("linear-layers", 50, 90, _bench("kernels", "linear")),
    Part("codes", 60, 120, _bench("kernels", "coded")),
    Part("experts", 10, 40, _bench("kernels", "experts")),
    Part("delta-net", 20, 60, _bench("kernels", "delta-net")),
    Part("offload", 45, 120, _bench("offload", LLAMA)),
    *(Part(f"steps-{codes}", 45, 120, _codes(codes)) for codes in ("int8", "int4", "fp8")),
    Part("small", 15, 40, _bench("kernels", "small")),
    Part("sampling", 12, 40, _bench("kernels", "sampling")),
    Part("tables", 8, 30, _bench("kernels", "tables")),
    Part("ranks", 180, 480, _ranks),
)


def chosen(names: list[str] | None) -> list[Part]:
    """In the order of `PARTS`; all if there are no names. Raises InvalidConfig."""
    known = {part.name: part for part in PARTS}
    wanted = [name for names_ in names or () for name in names_.split(",") if name]
    for name in wanted:
        if name not in known:
            raise InvalidConfig(f"--parts: unknown part {name!r}; choose from {', '.join(known)}")
    return [part for part in PARTS if not wanted or part.name in wanted]


def estimates(parts: list[Part], minutes: float) -> str:
    """A line for each part, with the seconds up to its end."""
    total, lines = 0, []
    for part in parts:
        total += part.estimate_s
        late = "  may not fit" if total > 60 * minutes else ""
        lines.append(f"{part.name:<18} {part.estimate_s:>4} s {total:>6} s{late}")
    lines.append(f"{'together':<18} {total:>4} s, of {60 * minutes:.0f} s that --minutes allows")
    return "\n".join(lines)
