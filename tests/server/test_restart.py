"""A server whose engine is killed: what its clients, its operator and its monitoring see."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.test_life import engine_pid
from tests.support.serving import MODEL, RunningServer, running_server, wait_until

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 10_000, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--sse-ping-interval", "0.2") as running:
        yield running


def kill_engine(server: RunningServer) -> None:
    """Returns when the server has noticed, however briefly it restarts."""
    killed = 'engine_restarts_total{cause="killed"}'
    before = server.metric(killed)
    os.kill(engine_pid(server), signal.SIGKILL)
    wait_until(lambda: server.metric(killed) > before)


def test_a_stream_pauses_with_keep_alives_and_goes_on_to_the_same_text(
    server: RunningServer,
) -> None:
    options = {"include_usage": True}
    body = BODY | {"stream": True, "stream_options": options, "n": 2}
    whole = server.post(COMPLETIONS, BODY | {"n": 2}).json()
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
        lines = response.iter_lines()
        seen = [next(lines)]
        kill_engine(server)
        seen += lines
    chunks = [httpx.Response(200, text=line[6:]).json() for line in seen if line[:7] == "data: {"]
    for index in range(2):
        texts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(texts) == whole["choices"][index]["text"]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert ": ping" in seen


def test_the_time_to_the_first_token_is_counted_once(server: RunningServer) -> None:
    names = ("time_to_first_token_seconds_count", "queue_time_seconds_count")
    before = [server.metric(name) for name in names]
    resumed = server.metric("resumed_requests_total")
    with httpx.stream(
        "POST", server.url + COMPLETIONS, json=BODY | {"stream": True}, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        kill_engine(server)
        assert list(lines)[-2] == "data: [DONE]"
    assert [server.metric(name) for name in names] == [count + 1 for count in before]
    assert server.metric("resumed_requests_total") == resumed + 1
    assert server.metric('engine_restarts_total{cause="killed"}') >= 1


def test_meanwhile_new_requests_get_503_with_the_time_and_health_is_good(
    server: RunningServer,
) -> None:
    kill_engine(server)
    refused = server.complete()
    # It may be ready again before this is asked.
    if refused.status_code == 503:
        assert refused.headers["x-penstock-state"] == "restarting"
        assert int(refused.headers["retry-after"]) >= 1
        assert "starting again" in refused.json()["error"]["message"]
    assert server.get("/health").status_code == 200
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert server.complete().status_code == 200
    assert "another starts now" in server.log() and "runs again after" in server.log()


def test_or_they_wait() -> None:
    with running_server("--during-engine-restart", "wait") as server:
        kill_engine(server)
        assert server.complete().status_code == 200


def test_counters_go_on_from_where_they_were(server: RunningServer) -> None:
    server.complete(prompt="The same prompt, which is longer than a block of sixteen tokens is.")
    before = server.metric("prefix_query_tokens_total")
    assert before
    kill_engine(server)
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert server.metric("prefix_query_tokens_total") == before
    server.complete()
    assert server.metric("prefix_query_tokens_total") > before


def test_the_record_of_steps_goes_on_without_the_first_of_the_next_engine(
    server: RunningServer,
) -> None:
    def decode_numbers() -> list[int]:
        return [
            number for number, kind, *_ in server.get("/steps").json()["steps"] if kind == "decode"
        ]

    server.complete(max_tokens=200)
    before = decode_numbers()
    assert before
    kill_engine(server)
    assert decode_numbers() == before
    wait_until(lambda: server.get("/ready").status_code == 200)
    server.complete(max_tokens=200)
    numbers = decode_numbers()
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > before[-1]


def test_a_deadline_goes_on_while_the_engine_restarts() -> None:
    with running_server("--request-timeout", "1.5", "--engine-stall-timeout", "60") as server:
        os.kill(engine_pid(server), signal.SIGSTOP)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(server.complete(**BODY)))
        asking.start()
        asking.join(60)
        assert [answer.status_code for answer in answers] == [504]


def test_a_crash_loop_ends_the_server_with_one_sentence_and_a_code_that_is_not_zero() -> None:
    with running_server("--max-engine-restarts", "1") as server:
        kill_engine(server)
        wait_until(lambda: server.get("/ready").status_code == 200)
        os.kill(engine_pid(server), signal.SIGKILL)
        code, errors = server.exit_code()
        assert code == 1 and "Traceback" not in errors
        assert "--max-engine-restarts" in errors.splitlines()[-1]
