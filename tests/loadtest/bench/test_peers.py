"""What other servers stream, as bytes: each is measured right, or fails with its reason."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.loadtest.bench.cli import main
from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.replay import replay, run
from penstock.loadtest.report.report import RequestResult
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.token_counter import TokenCounter, tokenizer_counter
from penstock.loadtest.workload.workload import make_requests
from tests.support.paths import ROOT
from tests.support.stub_server import (
    Exchange,
    Stub,
    answer_five,
    delta,
    sse,
    stub,
    token,
    usage,
)

TOKENIZER = ROOT / "engine" / "hub" / "demo_model"
DONE = b"data: [DONE]\n\n"
END = sse(token("", "length"))
USAGE_IN_A_CHOICE = token("", "length") | {
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}
}


def result_of(
    server: Stub, count: TokenCounter | None = None, *, is_chat: bool = False
) -> RequestResult:
    """One request's result."""
    endpoint = "/v1/chat/completions" if is_chat else "/v1/completions"
    config = TargetConfig(base_url=server.url, model="stub", endpoint=endpoint)

    async def go() -> RequestResult:
        async with HttpTarget(config, count) as target:
            requests = make_requests(WorkloadConfig(num_prompts=1, input_len=4, output_len=5))
            (result,) = (await replay(target, requests)).results
            return result

    return run(go())


def streaming(data: bytes) -> Callable[[Exchange], object]:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.chunk(data)
        await exchange.write(b"0\r\n\r\n")

    return behave


@dataclass(frozen=True)
class Peer:
    """What a server streams, and what the client must make of it."""

    data: bytes
    num_tokens: int
    num_events: int
    text: str = "ab"
    is_chat: bool = False
    is_counted: bool = True


def chat(*events: object) -> bytes:
    return b"".join(map(sse, events))


PEERS = {
    "usage in a last chunk without choices": Peer(
        chat(token("a"), token("b", "length"), usage(2)) + DONE, 2, 2
    ),
    "usage beside the finish reason, and no DONE": Peer(
        chat(token("a"), token("b"), USAGE_IN_A_CHOICE), 2, 2
    ),
    "usage on every chunk": Peer(
        chat(token("a") | usage(1) | {"choices": token("a")["choices"]})
        + chat(token("b", "stop") | {"usage": usage(2)["usage"]})
        + DONE,
        2,
        2,
    ),
    "usage null until the end": Peer(
        chat(token("a") | {"usage": None}, token("b", "stop") | {"usage": None}, usage(2)) + DONE,
        2,
        2,
    ),
    "no usage": Peer(chat(token("a"), token("b")) + DONE, 2, 2, is_counted=False),
    "no usage, and an empty end": Peer(
        chat(token("a"), token("b")) + END + DONE, 2, 2, is_counted=False
    ),
    "usage without numbers": Peer(
        chat(token("a"), token("b"), {"choices": [], "usage": {"completion_tokens": None}}) + DONE,
        2,
        2,
        is_counted=False,
    ),
    "several tokens a chunk": Peer(chat(token("a"), token("b"), usage(7)) + DONE, 7, 2),
    "no space after data:": Peer(
        (chat(token("a"), token("b"), usage(2)) + DONE).replace(b"data: ", b"data:"), 2, 2
    ),
    "CRLF": Peer((chat(token("a"), token("b"), usage(2)) + DONE).replace(b"\n", b"\r\n"), 2, 2),
    "comments, names, ids and retries": Peer(
        b": ping\n\nretry: 10\n\nevent: message\nid: 1\n"
        + chat(token("a"))
        + b":\n\n: PROCESSING\n"
        + chat(token("b"), usage(2))
        + DONE,
        2,
        2,
    ),
    "no blank line after the last event": Peer(
        (chat(token("a"), token("b"), usage(2)) + DONE).rstrip(b"\n"), 2, 2
    ),
    "an opening chunk with the role alone": Peer(
        chat(delta(role="assistant"), delta(content="a"), delta(content="b"), delta("stop"))
        + chat(usage(2))
        + DONE,
        2,
        2,
        is_chat=True,
    ),
    "reasoning under one name": Peer(
        chat(delta(role="assistant", reasoning_content="a"), delta(content="b"), usage(2)) + DONE,
        2,
        2,
        is_chat=True,
    ),
    "reasoning under the other name": Peer(
        chat(delta(role="assistant", reasoning="a"), delta(content="b"), usage(2)) + DONE,
        2,
        2,
        is_chat=True,
    ),
    "a role in every chunk": Peer(
        chat(
            delta(role="assistant", content="a"),
            delta(role="assistant", content=""),
            delta(role="assistant", content="b"),
            usage(3),
        )
        + DONE,
        3,
        3,
        is_chat=True,
    ),
    "a tool's call": Peer(
        chat(
            {"choices": [{"delta": {"role": "assistant", "tool_calls": [{"id": "1"}]}}]},
            {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]},
            usage(2),
        )
        + DONE,
        2,
        2,
        text="",
        is_chat=True,
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_other_servers_streams_are_counted_correctly(name: str) -> None:
    peer = PEERS[name]
    with stub(streaming(peer.data)) as server:  # type: ignore[arg-type]
        result = result_of(server, is_chat=peer.is_chat)
    assert result.error is None
    assert (result.num_output_tokens, len(result.arrivals_s)) == (peer.num_tokens, peer.num_events)
    assert (result.text, result.is_counted) == (peer.text, peer.is_counted)


FAILURES = {
    "the engine died": chat(token("a"), {"error": {"message": "the engine died"}}) + DONE,
    "out of memory": chat(token("a"), {"error": "out of memory", "error_type": "generation"}),
    "the old way": chat({"object": "error", "message": "the old way", "code": 400}) + DONE,
    "by its name": b'event: error\ndata: {"message": "by its name"}\n\n',
    "in plain words": b"event: error\ndata: in plain words\n\n",
    "not an event stream; it begins with": json.dumps(token("ab", "stop")).encode(),
    "without [DONE] or a finish": chat(token("a"), token("b")),
    "the response has no tokens": chat(usage(0)) + DONE,
}


@pytest.mark.parametrize("reason", FAILURES)
def test_another_servers_error_is_the_reason(reason: str) -> None:
    with stub(streaming(FAILURES[reason])) as server:  # type: ignore[arg-type]
        result = result_of(server)
    assert result.error is not None and reason in result.error


def test_a_tokenizer_counts_when_the_server_does_not() -> None:
    text = "Once upon a time there was a server."
    count = tokenizer_counter(TOKENIZER)
    with stub(streaming(chat(token(text[:9]), token(text[9:], "stop")) + DONE)) as server:  # type: ignore[arg-type]
        result = result_of(server, count)
    assert result.is_counted and result.num_output_tokens == count([text])[0] > 5


FEW = ["--num-prompts", "10", "--random-input-len", "4", "--random-output-len", "5"]


async def reset(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.event(token("a"))
    exchange.writer.transport.abort()


async def turn_away(exchange: Exchange) -> None:
    body = b'{"error": {"message": "the queue is full"}}'
    await exchange.head("429 Too Many Requests", "Retry-After: 1", f"Content-Length: {len(body)}")
    await exchange.write(body)


@pytest.mark.parametrize(
    ("behave", "reason", "num_rejected"),
    [(reset, "in the middle of its response", 0), (turn_away, "HTTP 429: the queue is full", 3)],
)
def test_failures_are_counted_reported_and_make_the_status_1(
    behave: Callable[[Exchange], object],
    reason: str,
    num_rejected: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def some(exchange: Exchange) -> None:
        # The first one is the warm-up.
        await (behave if exchange.number in (2, 5, 9) else answer_five)(exchange)  # type: ignore[misc]

    with stub(some) as server:
        assert main(["--base-url", server.url, *FEW, "--json"]) == 1
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["completed"], summary["failed"], summary["rejected"]) == (7, 3, num_rejected)
    ((failure, number),) = summary["failure_reasons"].items()
    assert reason in failure and number == 3
    assert f"3 x {failure}" in captured.err


def test_responses_without_usage_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(streaming(chat(token("a"), token("b")) + DONE)) as server:  # type: ignore[arg-type]
        assert main(["--base-url", server.url, *FEW]) == 0
    assert "no token count for 10 responses" in capsys.readouterr().err


def test_the_results_before_a_server_dies_are_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def die(exchange: Exchange) -> None:
        if exchange.number > 4:
            exchange.writer.close()
            await asyncio.sleep(0)
            return
        await answer_five(exchange)

    with stub(die) as server:
        assert main(["--base-url", server.url, *FEW, "--max-concurrency", "1", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["completed"] == 4
    assert "6 x the server closed the connection" in captured.err


def test_a_server_without_a_list_of_models_is_measured_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--base-url", "", *FEW]
    with stub(answer_five) as server:
        server.models_status = "500 Internal Server Error"
        flags[1] = server.url
        assert main(flags) == 1
        assert "HTTP 500" in capsys.readouterr().err
        assert main([*flags, "--model", "mine"]) == 0
    assert server.exchanges[-1].body["model"] == "mine"
