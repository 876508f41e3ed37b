"""`python -m tests.bench.gpu.suite`: measures everything about this engine on one GPU, in 9
minutes.

What the machine needs: one GPU with its driver, torch for it (2.11 or later), Triton (torch brings
it), and the other dependencies of penstock; 20 GB of disk for the part `ready`; for the
comparison with FlashAttention 3 --flash-attn-3 with a folder that has
_vllm_fa3_C.abi3.so and flash_attn_interface.py of a vLLM wheel that was built for the same torch.
No weights and no network: models are random, in the shapes of configs/models.

Parts run one after another, by importance, each in its own processes and with a time limit, so that
the failure of one ends no other; the failures are in the results. The estimates of device
time are in `PARTS`: together nearly nine minutes on an H200. A JSON file gets everything; the
last lines give for each goal the target, the hardware's limit, the measurement, and whether it is
met.

`--tiny` runs the same code at toy sizes in a minute or two, without a GPU in Triton's interpreter;
its figures mean nothing.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.scheduler.errors import InvalidConfig, PenstockError
from tests.bench.gpu.goals import LLAMA, QWEN, SMALL, Row, table, verdicts, with_shares
from tests.bench.gpu.http import PartFailed, measure_http, measure_ready

_TAIL_CHARS = 2000


@dataclass(slots=True)
class Suite:
    """What has been measured so far."""

    tiny: bool
    flash_attn_3: Path | None
    ends_s: float
    rows: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def remaining_s(self, limit_s: float) -> float:
        return min(limit_s, self.ends_s - time.monotonic())

    def run(self, part: "Part") -> None:
        """Records its rows and its failure, if any; raises nothing but KeyboardInterrupt."""
        started_s = time.monotonic()
        limit_s = self.remaining_s(part.limit_s)
        if limit_s < 1:
            self.fail(part.name, "the time of --minutes was used up before it could start")
            return
        print(f"gpu_suite: {part.name}, some {part.estimate_s} s", file=sys.stderr, flush=True)
        try:
            part.measure(self, limit_s)
        except PenstockError as error:
            self.fail(part.name, str(error))
        except Exception as error:  # the other parts still run
            self.fail(part.name, f"{type(error).__name__}: {error}")
        self.seconds[part.name] = time.monotonic() - started_s

    def note(self, row: Row) -> None:
        self.rows.append(row)
        if "failed" in row:
            self.fail(str(row.get("group", row["part"])), str(row["failed"]))
        elif row.get("is_right") is False:
            what = ", ".join(f"{key}={row[key]}" for key in row if key not in ("part", "rivals"))
            self.fail("kernels", f"a result is wrong: {what}")

    def fail(self, part: str, message: str) -> None:
        self.failures.append({"part": part, "message": message})
        print(f"gpu_suite: {part} failed: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Part:
    """estimate_s: of an H200. limit_s: when it is stopped; rows printed by then count."""

    name: str
    estimate_s: int
    limit_s: int
    measure: Callable[[Suite, float], None]


def _bench(*arguments: str) -> Callable[[Suite, float], None]:
    """A part that is a process of `tests.bench.engine`, which prints rows."""

    def measure(suite: Suite, limit_s: float) -> None:
        command = [sys.executable, "-m", "tests.bench.engine", *arguments]
        if suite.tiny:
            command.append("--tiny")
        if suite.flash_attn_3 and "kernels" in arguments:
            command += ["--flash-attn-3", str(suite.flash_attn_3)]
        _run_and_note(suite, command, limit_s)

    return measure


def _run_and_note(suite: Suite, command: list[str], limit_s: float) -> None:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=out, stderr=log, text=True)
        reason = ""
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        out.seek(0)
        for line in out:
            if line.startswith("{") and line.endswith("}\n"):
                suite.note(json.loads(line))
        log.seek(0)
        if process.returncode:
            tail = log.read()[-_TAIL_CHARS:].strip()
            raise PartFailed(f"{reason or f'it ended with {process.returncode}'}; its log: {tail}")


def _http(suite: Suite, limit_s: float) -> None:
    for row in measure_http(QWEN, suite.tiny, limit_s):
        suite.note(row)


def _ready(suite: Suite, limit_s: float) -> None:
    suite.note(measure_ready(LLAMA, suite.tiny, limit_s))


PARTS: tuple[Part, ...] = (
    Part("device", 12, 60, _bench("device")),
    Part("steps-llama", 65, 120, _bench("steps", LLAMA)),
    Part("attention", 45, 90, _bench("kernels", "decode-attention", "prefill-attention")),
    Part("offline-small", 30, 80, _bench("offline", SMALL)),
    Part("offline-llama", 40, 90, _bench("offline", LLAMA)),
    Part("http", 70, 120, _http),
    Part("steps-small", 55, 90, _bench("steps", SMALL)),
    Part("ready", 60, 120, _ready),
    Part("linear", 60, 90, _bench("kernels", "linear")),
    Part("small", 30, 60, _bench("kernels", "small", "sampling", "tables")),
    Part("steps-qwen", 65, 120, _bench("steps", QWEN)),
)


def main(argv: list[str]) -> int:
    """0 where every part ran, 1 where one failed or a kernel is wrong, 2 for wrong flags."""
    args = _parser().parse_args(argv)
    try:
        parts = _chosen(args.parts)
    except InvalidConfig as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return 2
    suite = Suite(args.tiny, args.flash_attn_3, time.monotonic() + 60 * args.minutes)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        for part in parts:
            suite.run(part)
            _write(
                args.out, suite, started
            )  # after each part, so that stopping the suite keeps the results
    except KeyboardInterrupt:
        suite.fail("suite", "interrupted")
    result = _write(args.out, suite, started)
    print(_details(result["rows"]))
    print(table(verdicts(result["rows"])))
    if suite.tiny:
        print("toy sizes: these figures mean nothing")
    failed = f"{len(suite.failures)} failures" if suite.failures else "no failures"
    print(f"{failed}; {sum(suite.seconds.values()):.0f} s; written to {args.out}", flush=True)
    return 1 if suite.failures else 0


def _write(out: Path, suite: Suite, started: str) -> dict[str, Any]:
    device: Row = next((row for row in suite.rows if row["part"] == "device"), {})
    rows = [with_shares(row, device) for row in suite.rows]
    result = {
        "started": started,
        "commit": _commit(),
        "is_tiny": suite.tiny,
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version(), "penstock": _version("penstock")},
        "seconds": suite.seconds,
        "goals": [
            {"what": v.goal.what, "wanted": v.goal.wanted, "measured": v.measured, "is": v.word}
            for v in verdicts(rows)
        ],
        "failures": suite.failures,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _details(rows: list[Row]) -> str:
    """A short line for each measured row that has a time."""
    lines = []
    for row in rows:
        figures = [
            f"{key} {row[key]:,.3g}" if isinstance(row[key], float) else f"{key} {row[key]}"
            for key in _SHOWN
            if row.get(key) is not None
        ]
        if row["part"] not in ("device", "load") and len(figures) > 1:
            lines.append(f"{row['part']}: {', '.join(figures)}")
    return "\n".join(lines)


_SHOWN = (
    "kernel", "model", "layer", "rows", "batch", "context", "chunk", "before", "tokens", "mode",
    "us", "tpot_ms", "one_by_one_ms", "ttft_ms", "ready_s", "tokens_per_s", "of_copy",
    "of_matrix_rate", "host_ms", "waited_ms", "late_steps_ratio", "engine_idle_ratio",
    "kernels_per_step", "rivals", "skipped",
)  # fmt: skip


def _commit() -> str | None:
    """None without a git history."""
    root = Path(__file__).parents[3]
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=root, capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _chosen(names: list[str] | None) -> list[Part]:
    known = {part.name: part for part in PARTS}
    for name in names or ():
        if name not in known:
            raise InvalidConfig(f"--parts: unknown part {name!r}; choose from {', '.join(known)}")
    return [part for part in PARTS if names is None or part.name in names]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", metavar="PART", help="default: all")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu_suite.json"),
        help="the JSON file (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="for everything (default: %(default)s)"
    )
    parser.add_argument("--flash-attn-3", type=Path, metavar="DIR", help="see above")
    parser.add_argument("--tiny", action="store_true", help="see above")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
