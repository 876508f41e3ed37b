"""`python -m tests.bench.server.front_end`: streamed tokens per second through HTTP, and their
cost in CPU.

The server runs without a model (`--scripted`), so the measurement is a token's path from the
engine's message to the client's socket. Server, engine and client share the cores: of the three
figures of CPU per token, the server's is the result.

Unpaced, the engine runs ahead, and each event has all waiting tokens. At a rate that the server can
sustain, each token is an event; `python -m tests.bench.server.sse_event` measures what that costs.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import wait_until_ready, warm_up
from penstock.loadtest.bench.replay import raise_open_file_limit, replay, run
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import make_requests

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=1000, help="of each stream")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.0, 60_000.0],
        help="tokens/s that the engine makes at most; 0: as fast as it can",
    )
    args = parser.parse_args(argv)
    raise_open_file_limit()
    for rate in args.rates:
        step_ms = args.num_streams / rate * 1e3 if rate else 0.0
        with serving(args.num_streams, step_ms) as (server, base_url):
            summary = run(measure(server, base_url, args.num_streams, args.num_tokens))
        print(
            f"{f'paced to {rate:,.0f}' if rate else 'unpaced'}: {summary['tokens_per_s']:,.0f} "
            f"tokens/s over {args.num_streams} connections; CPU per token, us: server "
            f"{summary['server_us']:.1f}, engine {summary['engine_us']:.1f}, client "
            f"{summary['client_us']:.1f}; an event held {summary['tokens_per_event']:.2f} tokens",
            flush=True,
        )
        print(msgspec.json.encode({**vars(args), "rate": rate, **summary}).decode(), flush=True)
    return 0


async def measure(
    server: int, base_url: str, num_streams: int, num_tokens: int
) -> dict[str, float]:
    """server: its process id."""
    models = await wait_until_ready(base_url, timeout_s=20.0, say=lambda _: None)
    config = TargetConfig(base_url=base_url, model=models[0].id, ignore_eos=True)
    workload = WorkloadConfig(num_prompts=num_streams, input_len=16, output_len=num_tokens)
    async with HttpTarget(config) as target:
        await warm_up(target, workload, 8, None)
        engine = _child_of(server)
        before = _cpu_s(server), _cpu_s(engine), time.process_time()
        observed = await replay(target, make_requests(workload))
        after = _cpu_s(server), _cpu_s(engine), time.process_time()
    assert not observed.failed, observed.failed[0].error
    num_sent = num_streams * num_tokens
    num_events = sum(len(result.arrivals_s) for result in observed.completed)
    costs = [(b - a) / num_sent * 1e6 for a, b in zip(before, after, strict=True)]
    return {
        "tokens_per_s": num_sent / observed.duration_s,
        "tokens_per_event": num_sent / num_events,
        **dict(zip(("server_us", "engine_us", "client_us"), costs, strict=True)),
    }


@contextlib.contextmanager
def serving(num_streams: int, step_ms: float) -> Iterator[tuple[int, str]]:
    """The process id and the base URL of a scripted server, which may still be loading."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "penstock", "serve", "--scripted", "--port", str(port)]
    command += ["--max-num-seqs", str(num_streams), "--no-enable-prefix-caching"]
    command += ["--scripted-step-ms", str(step_ms)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield server.pid, f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _child_of(process: int) -> int:
    """The engine, the server's only child."""
    return int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])


def _cpu_s(process: int) -> float:
    """What it has used so far, by the kernel's count. Source: proc(5), fields 14 and 15."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
