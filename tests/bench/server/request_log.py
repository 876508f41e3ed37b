"""`python -m tests.bench.server.request_log`: what `--log-requests` costs a request and a stream.

CPU time of the server process for each request, without the log, with text, and with JSON. One
server for each, asked in turns by one connection; the best of several rounds, since other work on
the machine only adds to it.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import httpx
import msgspec

from tests.support.serving import MODEL, RunningServer

_FLAGS = {
    "off": (),
    "text": ("--log-requests",),
    "json": ("--log-requests", "--log-format", "json"),
}
_BODY = {"model": MODEL, "prompt": "Once upon a time", "ignore_eos": True}
_WORK = {
    "a short request": {"max_tokens": 1},
    "a stream of 100 tokens": {"max_tokens": 100, "stream": True},
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--num-requests", type=int, default=500, help="of each round")
    parser.add_argument("--num-rounds", type=int, default=5)
    args = parser.parse_args(argv)
    costs_us = measure(args.num_requests, args.num_rounds)
    for work, by_log in costs_us.items():
        shown = "  ".join(f"{name} {cost_us:7.1f}" for name, cost_us in by_log.items())
        print(f"{work:<28}us of the server's CPU: {shown}")
    print(msgspec.json.encode({**vars(args), "us": costs_us}).decode())
    return 0


def measure(num_requests: int, num_rounds: int) -> dict[str, dict[str, float]]:
    best = {work: dict.fromkeys(_FLAGS, float("inf")) for work in _WORK}
    with contextlib.ExitStack() as stack:
        servers = {name: _started(stack, flags) for name, flags in _FLAGS.items()}
        for _ in range(num_rounds):
            for work, fields in _WORK.items():
                for name, server in servers.items():
                    cost_us = _cost_us(server, _BODY | fields, num_requests)
                    best[work][name] = min(best[work][name], cost_us)
    return best


def _started(stack: contextlib.ExitStack, flags: tuple[str, ...]) -> RunningServer:
    server = RunningServer("--scripted", "--no-enable-prefix-caching", *flags)
    stack.callback(server.stop)
    server.wait_until_ready()
    return server


def _cost_us(server: RunningServer, body: dict[str, object], num_requests: int) -> float:
    before_ns = _cpu_ns(server.process.pid)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for _ in range(num_requests):
            client.post("/v1/completions", json=body).raise_for_status()
    return (_cpu_ns(server.process.pid) - before_ns) / num_requests / 1e3


def _cpu_ns(process: int) -> int:
    """Of all its threads, the log's included. Source: Documentation/scheduler/sched-stats.rst."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in threads)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
