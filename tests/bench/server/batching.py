"""`python -m tests.bench.server.batching`: continuous batching against the older disciplines.

Servers with continuous, dynamic and static batching are started in turn and get the same requests:
first all at once, which gives the capacity, then in Poisson arrivals at a share of the capacity of
continuous batching. Prefix caching is off, so that the first run does not speed up the second. The
table has the median of all rounds and their range, which shows the noise of a busy machine. The
table is Markdown; the last line is JSON.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import TargetUnusable, wait_until_ready, warm_up
from penstock.loadtest.bench.replay import replay, run
from penstock.loadtest.command_line import HelpFormatter
from penstock.loadtest.report.report import ReportConfig, Summary, summarize
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import make_requests
from penstock.scheduler.config import Batching
from penstock.scheduler.errors import PenstockError

MODES = (Batching.CONTINUOUS, Batching.DYNAMIC, Batching.STATIC)
# Heading, key in the report, whether it is taken from the run that sends all at once.
COLUMNS = (
    ("capacity, output tokens/s", "output_throughput", True),
    ("output tokens/s", "output_throughput", False),
    ("TTFT p50, ms", "p50_ttft_ms", False),
    ("TTFT p99, ms", "p99_ttft_ms", False),
    ("TPOT p50, ms", "p50_tpot_ms", False),
    ("latency p99, ms", "p99_e2el_ms", False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One mode in one round: the requests all at once, and in Poisson arrivals."""

    burst: Summary
    arrivals: Summary


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--model", help="for penstock serve (default: the demo model)")
    parser.add_argument("--num-prompts", type=int, default=150, help="requests of one run")
    parser.add_argument(
        "--random-input-len", type=int, default=64, help="tokens of a prompt, on average"
    )
    parser.add_argument(
        "--random-output-len", type=int, default=64, help="output tokens, on average"
    )
    parser.add_argument("--random-range-ratio", type=float, default=0.9, help="mixed lengths")
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="sequences that run together")
    parser.add_argument("--num-threads", type=int, default=1, help="of the server")
    parser.add_argument("--load", type=float, default=0.75, help="share of continuous' capacity")
    parser.add_argument("--num-rounds", type=int, default=3, help="the table shows their median")
    args = parser.parse_args(argv)
    try:
        workload = WorkloadConfig(
            seed=args.seed,
            num_prompts=args.num_prompts,
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
        )
        rounds, rate = measure_rounds(args, workload)
    except PenstockError as error:
        _say(str(error))
        return 1
    prompts, outputs = _range(workload.input_len, args), _range(workload.output_len, args)
    print(table(rounds))
    print(
        f"\n{args.num_prompts} requests of seed {args.seed}: prompts of {prompts} tokens, outputs "
        f"of {outputs}, at most {args.max_num_seqs} together. Capacity: all at once. The rest: "
        f"Poisson arrivals at {rate:.1f} per second, {args.load:.0%} of what continuous batching "
        f"carried. float32, {args.num_threads} CPU thread(s). "
        f"Median of {args.num_rounds} rounds (lowest-highest).\n"
    )
    summary: dict[str, Any] = {**vars(args), "request_rate": rate}
    for mode in MODES:
        summary[mode] = {
            heading: round(median(_values(rounds, mode, key, is_burst)), 2)
            for heading, key, is_burst in COLUMNS
        }
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


def measure_rounds(
    args: argparse.Namespace, workload: WorkloadConfig
) -> tuple[list[dict[Batching, Measured]], float]:
    """Every round's figures, and the request rate, which the first burst decides."""
    rounds: list[dict[Batching, Measured]] = []
    rate: float | None = None
    for number in range(args.num_rounds):
        rounds.append({})
        for mode in MODES:
            with serving(args, mode) as base_url:
                measured, rate = run(_measure(base_url, workload, rate, args.load))
            rounds[-1][mode] = measured
            burst, arrivals = measured.burst, measured.arrivals
            _say(
                f"round {number + 1}/{args.num_rounds} {mode}: carries "
                f"{burst['output_throughput']:.0f} tok/s, {burst['request_throughput']:.1f} req/s; "
                f"at {rate:.1f} req/s TTFT p99 {arrivals['p99_ttft_ms']:.0f} ms"
            )
    assert rate is not None, "no rounds"
    return rounds, rate


async def _measure(
    base_url: str, workload: WorkloadConfig, rate: float | None, load: float
) -> tuple[Measured, float]:
    models = await wait_until_ready(base_url, timeout_s=120.0, say=lambda _: None)
    config = TargetConfig(base_url=base_url, model=models[0].id, ignore_eos=True)
    async with HttpTarget(config) as target:
        await warm_up(target, workload, 8, None)
        burst = await _replayed(target, workload)
        rate = rate or burst["request_throughput"] * load
        arrivals = await _replayed(target, replace(workload, request_rate=rate))
    return Measured(burst=burst, arrivals=arrivals), rate


async def _replayed(target: HttpTarget, workload: WorkloadConfig) -> Summary:
    observed = await replay(target, make_requests(workload))
    if observed.is_interrupted:
        raise asyncio.CancelledError
    if observed.failed:
        raise TargetUnusable(f"a request failed: {observed.failed[0].error}")
    return summarize(observed, ReportConfig(percentiles=(50.0, 99.0)))


@contextlib.contextmanager
def serving(args: argparse.Namespace, mode: Batching) -> Iterator[str]:
    """The base URL of a server of our own, which may still be loading; stopped at the end."""
    port = _free_port()
    command = [sys.executable, "-m", "penstock", "serve", *([args.model] if args.model else [])]
    command += ["--port", str(port), "--batching", mode, "--max-num-seqs", str(args.max_num_seqs)]
    command += ["--max-num-queued-reqs", str(args.num_prompts), "--num-threads"]
    command += [str(args.num_threads), "--dtype", "float32", "--no-enable-prefix-caching"]
    # Idle OpenMP threads that spin would take the cores that the load generator needs.
    environ = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        try:
            yield f"http://127.0.0.1:{port}"
        except TargetUnusable:
            log.seek(0)
            _say("the server's log:\n" + log.read()[-2000:].decode(errors="replace"))
            raise
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def table(rounds: list[dict[Batching, Measured]]) -> str:
    lines = [
        "| batching | " + " | ".join(heading for heading, _, _ in COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for mode in MODES:
        cells = [_cell(_values(rounds, mode, key, is_burst)) for _, key, is_burst in COLUMNS]
        lines.append(f"| {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _values(
    rounds: list[dict[Batching, Measured]], mode: Batching, key: str, is_burst: bool
) -> list[float]:
    measured = [one[mode] for one in rounds]
    return [(one.burst if is_burst else one.arrivals)[key] for one in measured]


def _cell(values: list[float]) -> str:
    digits = 1 if max(values) < 100 else 0
    low, middle, high = (
        f"{value:,.{digits}f}" for value in (min(values), median(values), max(values))
    )
    return f"{middle} ({low}-{high})"


def _range(length: int, args: argparse.Namespace) -> str:
    ratio = args.random_range_ratio
    return f"{max(1, int(length * (1 - ratio)))}-{-int(-length * (1 + ratio) // 1)}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _say(text: str) -> None:
    print(f"tests.bench.server.batching: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
