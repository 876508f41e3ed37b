"""`python -m tests.bench.gpu.suite`: the first day on a GPU, and every one after it.

What the machine needs: one GPU with its driver, torch for it (2.11 or later), Triton (torch brings
it), and the other dependencies of penstock and of its tests, which are taken from build/gpu-bundle
where they are missing (`make gpu-bundle`); 20 GB of disk for the part `ready`; for the comparison
with FlashAttention 3 --flash-attn-3 with a folder that has _vllm_fa3_C.abi3.so and
flash_attn_interface.py of a vLLM wheel that was built for the same torch, unless the bundle has
them. No weights and no network: models are random, in the shapes of configs/models.

The first part, `probe`, climbs from one kernel to the engine's own start, and finds how kernels may
be launched here: in CUDA graphs or one by one, started early (PDL) or not. All later parts run in
that way. Then come compilation on all cores, the points that goals name, the kernels' tests, what
decides the constants of the linear kernel, and the rest. Every part has processes of its own, and a
limit; the failure of one ends no other, and none takes the time that the goals behind it need.

A GPU that is lent for minutes is enough: `--parts probe,tests,compile` is useful alone, and
`--resume FOLDER/rows.jsonl` goes on where an earlier run ended, with what it found. `--list` prints
the parts and the seconds that each takes.

The folder --out gets five files: rows.jsonl (each row as it is measured), log.txt (what the
processes said), summary.json, summary.txt (rows, goals and failures for people), and
triton_cache.tar.xz, which --resume and `make gpu-bundle` take, so that nothing compiles twice.
`--tiny` runs
the same code at toy sizes in a few minutes, without a GPU in Triton's interpreter; its figures mean
nothing.
"""

import argparse
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.scheduler.errors import InvalidConfig
from tests.bench.gpu import carried, triton_cache
from tests.bench.gpu.goals import table
from tests.bench.gpu.memory import GpuMemory
from tests.bench.gpu.parts import PARTS, Part, Run, chosen, estimates
from tests.bench.gpu.processes import end_all
from tests.bench.gpu.record import Record, details, failures_table
from tests.bench.gpu.rungs import RUNGS
from tests.bench.gpu.simulated import KINDS
from tests.bench.gpu.ways import WAYS, Way

# For a part's memory to be given back. A process that cannot be ended may hold it for ever.
_MEMORY_PATIENCE_S = 15.0
_CACHE = "triton_cache.tar.xz"
# Less than this is not worth a start.
_LEAST_S = 5.0
# Modules that some part imports: their absence is said before any second of the GPU is spent.
_MODULES = (
    "torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "jinja2", "msgspec",
    "zmq", "llguidance", "fastapi", "pydantic", "uvicorn", "httptools", "prometheus_client", "yaml",
    "pytest", "hypothesis", "httpx",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """0 where every part ran, 1 where one failed or a result is wrong, 2 for wrong flags."""
    args = _parser().parse_args(argv)
    try:
        parts = chosen(args.parts)
        if args.list:
            print(estimates(parts, args.minutes))
            return 0
        record = Record(args.out, args.resume)
        run = Run(
            record,
            tiny=args.tiny,
            flash_attn_3=args.flash_attn_3 or (None if args.tiny else carried.flash_attn_3()),
            way=_way(record, args),
            is_way_forced=args.way is not None,
            simulated=_simulated(args.simulate),
            patience=args.patience,
        )
    except InvalidConfig as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return 2
    if args.resume:
        known = record.ended()
        parts = [part for part in parts if args.parts or part.name not in known]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record.event("run", **_description(args))
    print(estimates(parts, args.minutes), file=sys.stderr, flush=True)
    with _compiled(record, args):
        try:
            _run(run, parts, time.monotonic() + 60 * args.minutes)
        except KeyboardInterrupt:
            run.fail("", "interrupted")
        finally:
            end_all()
        _conclude(run)
    return 1 if record.failures() else 0


@contextmanager
def _compiled(record: Record, args: argparse.Namespace) -> Iterator[None]:
    """In this context, Triton has what the bundle and the run to go on from have compiled. What it
    has at the end is written to the record's folder."""
    before = [carried.TRITON_CACHE]
    if args.resume:
        before.append(args.resume.parent / _CACHE)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(os.environ.setdefault("TRITON_CACHE_DIR", folder))
        try:
            for file in before:
                if file.exists():
                    triton_cache.unpack(file, cache)
            yield
        finally:
            if os.environ["TRITON_CACHE_DIR"] == folder:
                del os.environ["TRITON_CACHE_DIR"]
        if not triton_cache.pack(cache, record.folder / _CACHE):
            print(f"gpu_suite: {cache} is too large to be given back", file=sys.stderr)


def _run(run: Run, parts: list[Part], ends_s: float) -> None:
    run.part = "suite"
    if missing := carried.use(_MODULES):
        run.fail("", f"these modules are missing: {', '.join(missing)}")
    memory = GpuMemory(run.record.log)
    for number, part in enumerate(parts, 1):
        run.part = part.name
        limit_s = part.allowed_s(parts[number:], ends_s - time.monotonic(), run.patience)
        if limit_s < min(_LEAST_S, part.limit_s * run.patience):
            run.fail("", "the time of --minutes was used up before it could start")
            continue
        _run_part(run, part, limit_s)
        in_use = memory.wait_until_free(_MEMORY_PATIENCE_S * run.patience)
        if in_use:
            run.fail("memory", in_use)
        run.record.write_summary()


def _run_part(run: Run, part: Part, limit_s: float) -> None:
    """Raises nothing but KeyboardInterrupt."""
    started_s = time.monotonic()
    run.record.event("start", of=part.name, way=run.way.name)
    print(f"gpu_suite: {part.name}, some {part.estimate_s} s", file=sys.stderr, flush=True)
    try:
        part.measure(run, limit_s)
    except Exception as error:  # the other parts still run
        run.fail("", f"{type(error).__name__}: {error}")
    run.record.event("end", of=part.name, seconds=time.monotonic() - started_s)


def _conclude(run: Run) -> None:
    record = run.record
    record.write_summary()
    rows, failures, seconds = record.rows(), record.failures(), record.ended()
    print(details(rows))
    print(table(rows))
    if run.tiny:
        print("toy sizes: these figures mean nothing")
    if failures:
        print(failures_table(failures))
    print(f"{run.way.name}; {len(failures)} failures; {sum(seconds.values()):.0f} s")
    left = [part.name for part in PARTS if part.name not in seconds]
    file = record.folder / "rows.jsonl"
    if left:
        print(f"not run: {', '.join(left)}; --resume {file} goes on with them")
    print(f"written to {record.folder}", flush=True)


def _way(record: Record, args: argparse.Namespace) -> Way:
    """As --way has it, or as the probe of the run that this one goes on from found it."""
    if args.way:
        return WAYS[args.way]
    found = record.events("way")
    if found:
        return Way(overlaps=found[-1]["overlaps"], graphs=found[-1]["graphs"])
    return Way(overlaps=os.environ.get("PENSTOCK_PDL") != "0")


def _simulated(wanted: list[str]) -> dict[str, str]:
    names = {part.name for part in PARTS} | {rung.name for rung in RUNGS} | {"all"}
    simulated = {}
    for text in wanted:
        name, _, kind = text.partition("=")
        if name not in names or kind not in KINDS:
            raise InvalidConfig(
                f"--simulate {text}: it is NAME=KIND, the name of a part or a rung or `all`, and "
                f"one of {', '.join(KINDS)}"
            )
        simulated[name] = kind
    return simulated


def _description(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "is_tiny": args.tiny,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("penstock", "torch", "triton")},
    }


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", nargs="+", metavar="PART", help="default: all; commas separate them too")
    add("--list", action="store_true", help="print the parts and their seconds, and run nothing")
    add(
        "--out",
        type=Path,
        default=Path("gpu_results"),
        metavar="FOLDER",
        help="what it writes to (default: %(default)s)",
    )
    add(
        "--resume",
        type=Path,
        metavar="FILE",
        help="rows.jsonl of an earlier run: go on with what it found, and run what it did not",
    )
    add("--minutes", type=float, default=9.0, help="for everything (default: %(default)s)")
    add("--way", choices=WAYS, help="how kernels are launched, whatever the probe finds")
    add("--flash-attn-3", type=Path, metavar="DIR", help="see above")
    add("--tiny", action="store_true", help="see above")
    add(
        "--simulate",
        action="append",
        default=[],
        metavar="NAME=KIND",
        help=f"in place of a part or a rung (or `all`), one of {', '.join(KINDS)}",
    )
    add("--patience", type=float, default=1.0, help="times every limit, for simulations")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
