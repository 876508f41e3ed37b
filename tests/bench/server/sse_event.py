"""`python -m tests.bench.server.sse_event`: what one SSE event costs the server, by part, in
microseconds of CPU.

Step reports, as the engine process would send them, are passed to the whole server in this one
process: every stream gets one token per step, and every token is an event. Events are dropped at
once, or by a transport under uvicorn, or written to sockets that another process reads; the
differences are the cost of each layer. CPU seconds of the process, the best of several rounds:
other work on the machine only adds to it.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.engine.config import EngineConfig
from penstock.engine.executors.scripted import scripted_info
from penstock.engine.ipc.client import EngineClient
from penstock.engine.ipc.supervisor import EngineProcess, EngineState
from penstock.engine.step.messages import FromEngine, OnWire, StepReport, Submit
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.stats import NO_WORK, SchedulerStats
from penstock.scheduler.types import Request
from penstock.server.api.openai.completion_writer import CompletionWriter
from penstock.server.api.openai.writer import Head
from penstock.server.app import build_app
from penstock.server.config import ServeConfig, ServerConfig
from penstock.server.output.choice import Choice
from penstock.server.output.delta import OutputDelta
from penstock.server.output.detokenizer import TextDecoder, Vocabulary
from penstock.server.protocol.openai import CompletionRequest
from penstock.server.service import Service, State

TARGET_US = 10.0
_MODEL = "penstock-demo"
_BODY = json.dumps(
    {"model": _MODEL, "prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
).encode()
_HTTP_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class FedProcess(EngineProcess):
    """No process: its messages come from this program."""

    submitted: list[Request]

    async def start(self) -> ModelInfo:
        self._dead = asyncio.get_running_loop().create_future()
        self._info, self._state = (
            scripted_info(vocab_size=1 << 16, max_model_len=4096),
            EngineState.READY,
        )
        return self._info

    def feed(self, message: bytes) -> None:
        self._receive(message)

    def send(self, message: OnWire) -> None:
        if isinstance(message, Submit):
            self.submitted.append(message.request)


class FedEngine(EngineClient):
    """An engine client on a `FedProcess`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.fed = FedProcess(config, "", self._on_message, self._on_end)
        self.fed.submitted = []
        self.process = self.fed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--num-rounds", type=int, default=5)
    args = parser.parse_args(argv)
    parts = uvloop.run(measure(args.num_streams, args.num_steps, args.num_rounds))
    for name, cost_us in parts.items():
        print(f"{name:<44}{cost_us:8.2f} us")
    print(msgspec.json.encode({**vars(args), "us": parts, "target_us": TARGET_US}).decode())
    return 0


async def measure(num_streams: int, num_steps: int, num_rounds: int) -> dict[str, float]:
    """The parts of an event's cost, in microseconds of CPU."""
    directory = str(files("penstock.engine.hub") / "demo_model")
    config = ServeConfig(
        server=ServerConfig(served_model_names=(_MODEL,)), engine=EngineConfig(model=directory)
    )
    engines: list[FedEngine] = []

    def make_engine(config: EngineConfig) -> FedEngine:
        engines.append(FedEngine(config))
        return engines[-1]

    service = Service(config, make_engine)
    running = asyncio.create_task(service.run())
    while service.state is State.STARTING:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    engine = engines[0].fed
    app = build_app(service)
    vocabulary = service.model.encoder.vocabulary
    word_ids = [i for i, piece in vocabulary.pieces.items() if isinstance(piece, str)]

    async def cost_us(opening: Callable[[], Any]) -> float:
        """Of one event in the streams that `opening` opens."""
        engine.submitted.clear()
        async with opening():
            while len(engine.submitted) < num_streams:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            reports = list(encoded_reports(engine.submitted, num_steps, word_ids))
            gc.collect()
            started_s = time.process_time()
            for report in reports:
                engine.feed(report)
                await asyncio.sleep(0)  # lets the streams run
                await asyncio.sleep(0)  # and the event loop write
            return (time.process_time() - started_s) / (num_steps * num_streams) * 1e6

    stages: dict[str, Callable[[], Any]] = {
        "app": lambda: streams_into_nothing(app, num_streams),
        "uvicorn": lambda: streams_into_null_transports(app, num_streams),
        "socket": lambda: streams_into_sockets(app, num_streams),
    }
    best: dict[str, float] = dict.fromkeys(stages, float("inf"))
    alone: dict[str, float] = {}
    for _ in range(num_rounds):  # interleaved, so that all stages see the machine's moods
        for name, opening in stages.items():
            best[name] = min(best[name], await cost_us(opening))
        for name, cost in alone_us(engine.submitted, num_steps, word_ids, vocabulary).items():
            alone[name] = min(alone.get(name, cost), cost)
        alone["a bare send()"] = min(alone.get("a bare send()", 1e9), bare_send_us(num_steps))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    decode, text, event, send = alone.values()
    return {
        "decode the step report": decode,
        "ids to text": text,
        "text to event": event,
        "the rest of the app: dispatch, metrics, ASGI": best["app"] - decode - text - event,
        "uvicorn": best["uvicorn"] - best["app"],
        "all beyond the socket": best["uvicorn"],
        "uvloop and the socket": best["socket"] - best["uvicorn"],
        "all": best["socket"],
        "for comparison: a bare send()": send,
    }


def encoded_reports(
    requests: list[Request], num_steps: int, word_ids: list[int]
) -> Iterator[bytes]:
    encode = msgspec.msgpack.Encoder().encode
    for step in range(1, num_steps + 1):
        token_id = word_ids[step % len(word_ids)]
        yield encode(
            StepReport(
                step=step,
                outputs=StepOutputs(
                    [r.id for r in requests],
                    [0] * len(requests),
                    [token_id] * len(requests),
                    [0] * len(requests),
                ),
                stats=SchedulerStats(len(requests)),
                work=NO_WORK,
                started_s=time.monotonic(),
                step_s=0.004,
                model_bytes=0,
                model_flops=0,
            )
        )


def alone_us(
    requests: list[Request], num_steps: int, word_ids: list[int], vocabulary: Vocabulary
) -> dict[str, float]:
    """What can be timed by itself."""
    decoder = msgspec.msgpack.Decoder(FromEngine)
    messages = list(encoded_reports(requests, num_steps, word_ids))
    reports = [decoder.decode(message) for message in messages]
    outputs = [report.outputs for report in reports if isinstance(report, StepReport)]
    choices = [Choice(0, TextDecoder(vocabulary, is_whole=False), None, False) for _ in requests]
    fields = CompletionRequest.of({"prompt": ""}, num_bytes=0)
    writers = [CompletionWriter(Head(r.id, _MODEL, "fp"), vocabulary, fields) for r in requests]
    deltas: list[OutputDelta] = []

    def decode() -> None:
        for message in messages:
            decoder.decode(message)

    def text() -> None:
        for step in outputs:
            deltas[:] = [
                delta
                for choice, output in zip(choices, step, strict=True)
                if (delta := choice.take(output))
            ]

    def event() -> None:
        for _ in outputs:
            for writer, delta in zip(writers, deltas, strict=True):
                writer.delta(delta)

    num_events = len(requests) * num_steps
    return {work.__name__: _cpu_us(work) / num_events for work in (decode, text, event)}


def bare_send_us(num_sends: int) -> float:
    """An event's bytes into a loopback connection whose other end another process reads."""
    data = b"x" * 250
    with drained_sockets(1) as (listener, _):
        connection = listener.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send() -> None:
            for _ in range(num_sends):
                connection.send(data)

        cost_us = _cpu_us(send) / num_sends
        connection.close()
    return cost_us


def _cpu_us(work: Callable[[], None]) -> float:
    started_s = time.process_time()
    work()
    return (time.process_time() - started_s) * 1e6


# Where the streams end.


@contextlib.asynccontextmanager
async def streams_into_nothing(app: Any, num_streams: int) -> AsyncIterator[None]:
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
    }

    def stream() -> Awaitable[None]:
        body = iter([{"type": "http.request", "body": _BODY, "more_body": False}])

        async def receive() -> Any:
            if (message := next(body, None)) is None:
                await asyncio.get_running_loop().create_future()  # the client never disconnects
            return message

        async def send(message: Any) -> None:
            pass

        answer: Awaitable[None] = app(dict(scope), receive, send)
        return answer

    tasks = [asyncio.ensure_future(stream()) for _ in range(num_streams)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _NullTransport(asyncio.Transport):
    def write(self, data: Any) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@contextlib.asynccontextmanager
async def streams_into_null_transports(app: Any, num_streams: int) -> AsyncIterator[None]:
    config = uvicorn.Config(app, lifespan="off", access_log=False, log_config=None)
    config.load()
    protocols = [HttpToolsProtocol(config, ServerState(), {}) for _ in range(num_streams)]
    for protocol in protocols:
        protocol.connection_made(_NullTransport())
        protocol.data_received(_HTTP_REQUEST)
    try:
        yield
    finally:
        for protocol in protocols:
            protocol.connection_lost(None)
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def streams_into_sockets(app: Any, num_streams: int) -> AsyncIterator[None]:
    config = uvicorn.Config(app, lifespan="off", access_log=False, log_config=None)
    config.load()
    state = ServerState()
    with drained_sockets(num_streams) as (listener, client):
        server = await asyncio.get_running_loop().create_server(
            lambda: HttpToolsProtocol(config, state, {}), sock=listener
        )
        try:
            yield
        finally:
            client.kill()
            while state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            server.close()


@contextlib.contextmanager
def drained_sockets(num_streams: int) -> Iterator[tuple[socket.socket, "subprocess.Popen[bytes]"]]:
    """A listener, and the process that connects, sends a request on each, and reads."""
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "tests.bench.server.drain", str(port), str(num_streams)]
        root = Path(__file__).parents[3]
        with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root) as client:
            assert client.stdin
            client.stdin.write(_HTTP_REQUEST)
            client.stdin.close()
            try:
                yield listener, client
            finally:
                client.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
