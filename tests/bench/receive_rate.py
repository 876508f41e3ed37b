"""`python -m tests.bench.receive_rate`: how many streamed tokens per second a client can receive.

A stub server in another process sends prepared events, one to each stream in turn as an
engine's steps do, as fast as the sockets accept them. The client is the one that `penstock bench`
uses; --client takes a library in its place, with the same parser of events. Where server and client
share cores, the rate per CPU second of the client is the figure to go by. With --interval-ms the
stub sends one event to each stream per interval, and the figure is how long after sending an event
gets its arrival time: what the client adds to every latency that it reports.
"""

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.replay import raise_open_file_limit, replay, run
from penstock.loadtest.bench.sse import StreamedResponse
from penstock.loadtest.report.report import percentile
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
    b'"created":1789000000,"model":"penstock-demo","choices":[{"index":0,"text":"%15.6f ",'
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
    parser.add_argument("--client", choices=CLIENTS, default="penstock")
    parser.add_argument("--interval-ms", type=float, default=0.0, help="between two tokens")
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    raise_open_file_limit()
    if args.stub:
        send_streams(args.num_streams, args.num_tokens, args.interval_ms / 1000)
        return 0

    command = [sys.executable, "-m", "tests.bench.receive_rate", "--stub", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout is not None
        url = f"http://127.0.0.1:{int(stub.stdout.readline())}"
        received = run(CLIENTS[args.client](url, args.num_streams, args.num_tokens))
    expected = args.num_streams * args.num_tokens
    assert received.num_events == expected, f"{received.num_events} of {expected} events"

    per_s = received.num_events / received.duration_s
    per_cpu_s = received.num_events / received.cpu_s
    print(
        f"{received.num_events} events on {args.num_streams} streams in {received.duration_s:.2f} s"
    )
    print(f"received per second:             {per_s:>10,.0f}")
    print(f"per CPU second of the client:    {per_cpu_s:>10,.0f}   (target {TARGET_PER_S:,})")
    summary = {
        "client": args.client,
        "num_streams": args.num_streams,
        "num_events": received.num_events,
        "duration_s": received.duration_s,
        "events_per_s": per_s,
        "client_cpu_share": received.cpu_s / received.duration_s,
        "events_per_cpu_s": per_cpu_s,
        "target_per_s": TARGET_PER_S,
    }
    if args.interval_ms:
        delays_us = sorted(delay_s * 1e6 for delay_s in received.delays_s)
        for percent in (50, 90, 99):
            delay_us = summary[f"p{percent}_delay_us"] = percentile(delays_us, percent)
            print(f"from sent to arrival time, p{percent}: {delay_us:>9,.0f} us")
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """delays_s: of each event, from sent to arrival time; meaningful with an interval."""

    num_events: int
    delays_s: list[float]
    duration_s: float
    cpu_s: float


async def receive(base_url: str, num_streams: int, num_tokens: int) -> Received:
    workload = WorkloadConfig(num_prompts=num_streams, input_len=8, output_len=num_tokens)
    async with HttpTarget(TargetConfig(base_url=base_url, model="stub")) as target:
        observed = await replay(target, make_requests(workload))
    assert not observed.failed, observed.failed[0].error
    delays_s = [
        arrival_s - float(sent_s)
        for result in observed.completed
        for sent_s, arrival_s in zip(result.text.split(), result.arrivals_s, strict=True)
    ]
    return Received(
        num_events=len(delays_s),
        delays_s=delays_s,
        duration_s=observed.duration_s,
        cpu_s=observed.client_cpu_share * observed.duration_s,
    )


async def receive_with_httpx(base_url: str, num_streams: int, num_tokens: int) -> Received:
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:

        async def stream(answer: StreamedResponse) -> None:
            async with client.stream("GET", base_url) as response:
                answer.on_head(response.status_code, time.perf_counter())
                async for data in response.aiter_raw():
                    answer.on_body(data, time.perf_counter())

        return await _receive_all(stream, num_streams)


async def receive_with_aiohttp(base_url: str, num_streams: int, num_tokens: int) -> Received:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as client:

        async def stream(answer: StreamedResponse) -> None:
            async with client.get(base_url) as response:
                answer.on_head(response.status, time.perf_counter())
                async for data in response.content.iter_any():
                    answer.on_body(data, time.perf_counter())

        return await _receive_all(stream, num_streams)


async def _receive_all(
    stream: Callable[[StreamedResponse], Awaitable[None]], num_streams: int
) -> Received:
    answers = [StreamedResponse() for _ in range(num_streams)]
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(stream, answers))
    duration_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
    delays_s = [
        arrival_s - float(sent_s)
        for answer in answers
        for sent_s, arrival_s in zip(answer.texts, answer.arrivals_s, strict=True)
    ]
    return Received(num_events=len(delays_s), delays_s=delays_s, duration_s=duration_s, cpu_s=cpu_s)


CLIENTS = {
    "penstock": receive,
    "httpx": receive_with_httpx,
    "aiohttp": receive_with_aiohttp,
}


def send_streams(num_streams: int, num_tokens: int, interval_s: float) -> None:
    """Prints its port, accepts all streams, then sends to each in turn until all have ended.

    The text of an event is time.perf_counter() when it was sent; without an interval, when the
    first was sent.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    print(listener.getsockname()[1], flush=True)
    streams = [listener.accept()[0] for _ in range(num_streams)]
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.recv(65536)  # one small request, which came in one segment
        stream.sendall(HEAD)
    due_s = time.perf_counter()
    event = _chunk(TOKEN % due_s)
    for _ in range(num_tokens):
        for stream in streams:
            stream.sendall(_chunk(TOKEN % time.perf_counter()) if interval_s else event)
        due_s += interval_s
        time.sleep(max(0.0, due_s - time.perf_counter()) if interval_s else 0.0)
    for stream in streams:
        stream.sendall(_chunk(END % num_tokens) + b"0\r\n\r\n")
        stream.close()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
