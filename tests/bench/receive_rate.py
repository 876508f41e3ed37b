"""`python -m tests.bench.receive_rate`: how many streamed tokens per second this client can take
in.

A stub in a process of its own sends ready-made events, one to each stream in turn as an engine's
steps do, as fast as the sockets take them. The client is the one that `penstock bench` uses. Where
sender and receiver share cores, the rate per CPU second of the client is the figure to go by.
"""

import argparse
import socket
import subprocess
import sys

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.replay import raise_open_file_limit, replay, run
from penstock.loadtest.report.report import Replay
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import make_requests

TARGET_PER_S = 100_000

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
# As long as the events of vLLM and of Penstock are.
TOKEN = (
    b'data: {"id":"cmpl-3f0c9a5e7d214b6f8e1a2b3c4d5e6f70","object":"text_completion",'
    b'"created":1789000000,"model":"penstock-demo","choices":[{"index":0,"text":" water",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
END = (
    b'data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":8,"completion_tokens":%d,'
    b'"total_tokens":8}}\n\ndata: [DONE]\n\n'
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    raise_open_file_limit()
    if args.stub:
        send_streams(args.num_streams, args.num_tokens)
        return 0

    flags = ["--num-streams", str(args.num_streams), "--num-tokens", str(args.num_tokens)]
    command = [sys.executable, "-m", "tests.bench.receive_rate", "--stub", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout is not None
        port = int(stub.stdout.readline())
        observed = run(receive(f"http://127.0.0.1:{port}", args.num_streams, args.num_tokens))
    num_events = sum(len(result.arrivals_s) for result in observed.completed)
    expected = args.num_streams * args.num_tokens
    assert num_events == expected, f"{num_events} of {expected} events; {observed.failed[:1]}"

    per_s = num_events / observed.duration_s
    per_cpu_s = per_s / observed.client_cpu_share
    print(f"{num_events} events on {args.num_streams} streams in {observed.duration_s:.2f} s")
    print(f"received per second:             {per_s:>10,.0f}")
    print(f"per CPU second of the client:    {per_cpu_s:>10,.0f}   (target {TARGET_PER_S:,})")
    summary = {
        "num_streams": args.num_streams,
        "num_events": num_events,
        "duration_s": observed.duration_s,
        "events_per_s": per_s,
        "client_cpu_share": observed.client_cpu_share,
        "events_per_cpu_s": per_cpu_s,
        "target_per_s": TARGET_PER_S,
    }
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


async def receive(base_url: str, num_streams: int, num_tokens: int) -> Replay:
    workload = WorkloadConfig(num_prompts=num_streams, input_len=8, output_len=num_tokens)
    async with HttpTarget(TargetConfig(base_url=base_url, model="stub")) as target:
        return await replay(target, make_requests(workload))


def send_streams(num_streams: int, num_tokens: int) -> None:
    """Prints its port, accepts all streams, then sends to each in turn until all have ended."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    print(listener.getsockname()[1], flush=True)
    streams = [listener.accept()[0] for _ in range(num_streams)]
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.recv(65536)  # one small request, which came in one segment
        stream.sendall(HEAD)
    event = _chunk(TOKEN)
    for _ in range(num_tokens):
        for stream in streams:
            stream.sendall(event)
    for stream in streams:
        stream.sendall(_chunk(END % num_tokens) + b"0\r\n\r\n")
        stream.close()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
