"""The request log: a line for each request, with its numbers and none of its text."""

import hashlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.serving import MODEL, RunningServer, running_server, wait_until

KEY, WRONG_KEY = "a-key-of-ours", "another-key"
AUTH = {"Authorization": f"Bearer {KEY}"}
SECRET = "Xanadu"  # in the prompt


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """It logs JSON, at debug, and holds two answers."""
    flags = ("--log-requests", "--log-format", "json", "--log-level", "debug", "--api-key", KEY)
    with running_server(*flags, "--max-num-seqs", "1", "--max-num-queued-reqs", "1") as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    """It logs text, at info."""
    with running_server("--log-requests") as server:
        yield server


def entries(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log().splitlines()]


def line_of(server: RunningServer, **values: object) -> dict[str, Any]:
    """The one line of the request log with these values."""

    def found() -> list[dict[str, Any]]:
        ours = (e for e in entries(server) if e["logger"] == "penstock.requests")
        return [entry for entry in ours if values.items() <= entry.items()]

    wait_until(found)
    [entry] = found()
    return entry


def complete(server: RunningServer, name: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": f"In {SECRET} did", "max_tokens": 8, "seed": 1} | fields
    return server.post("/v1/completions", body, headers={**AUTH, "X-Request-Id": name})


def test_a_line_has_the_numbers_of_its_request(server: RunningServer) -> None:
    answer = complete(server, "numbers", ignore_eos=True)
    assert answer.headers["x-request-id"] == "numbers"
    usage = answer.json()["usage"]
    entry = line_of(server, request_id="numbers")
    assert entry["level"] == "info" and entry["message"] == "POST /v1/completions 200"
    assert (entry["method"], entry["route"], entry["status"]) == ("POST", "/v1/completions", 200)
    assert entry["key"] == hashlib.sha256(KEY.encode()).hexdigest()[:8]
    assert entry["prompt_tokens"] == usage["prompt_tokens"]
    assert entry["output_tokens"] == usage["completion_tokens"] == 8
    assert entry["cached_tokens"] == 0 and entry["finish_reason"] == "length"
    assert 0 < entry["ttft_s"] <= entry["duration_s"] and entry["tpot_s"] >= 0
    assert entry["client_gone"] is False and entry["error"] is None


def test_a_stream_has_its_line_when_it_ends(server: RunningServer) -> None:
    complete(server, "stream", stream=True, n=2, ignore_eos=True)
    entry = line_of(server, request_id="stream")
    assert entry["output_tokens"] == 16 and entry["finish_reason"] == "length"


def test_the_engines_lines_have_the_same_id(server: RunningServer) -> None:
    complete(server, "to-the-engine")

    def is_told() -> bool:
        ours = [e for e in entries(server) if e.get("request_id") == "to-the-engine"]
        return "engine: accepted" in {entry["message"] for entry in ours}

    wait_until(is_told)  # lines are written some milliseconds later


def test_a_client_that_disconnects_is_a_client_gone(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 50_000, "stream": True}
    body |= {"ignore_eos": True}
    headers = {**AUTH, "X-Request-Id": "gone"}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers) as response:
        next(response.iter_raw())
    entry = line_of(server, request_id="gone")
    assert entry["client_gone"] is True and entry["status"] == 200
    assert entry["finish_reason"] is None and entry["output_tokens"] < 50_000
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body | {"stream": False}, headers=headers, timeout=0.3)
    assert line_of(server, request_id="gone", status=499)["client_gone"] is True


def test_refusals_have_a_line_with_their_code(server: RunningServer) -> None:
    complete(server, "refused-400", temperature=-1)
    entry = line_of(server, request_id="refused-400", status=400)
    assert entry["error"] == "decimal_below_min_value"
    wrong = {"Authorization": f"Bearer {WRONG_KEY}"}
    server.post("/v1/completions", {}, headers={**wrong, "X-Request-Id": "refused-401"})
    entry = line_of(server, request_id="refused-401", status=401, error="invalid_api_key")
    assert entry["path"] == "/v1/completions"
    assert entry["key"] == hashlib.sha256(WRONG_KEY.encode()).hexdigest()[:8]
    long = {"model": MODEL, "prompt": "Once", "max_tokens": 50_000, "stream": True, "n": 2}
    long["ignore_eos"] = True
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=long, headers=AUTH) as response:
        parts = response.iter_raw()
        next(parts)
        assert complete(server, "refused-429").status_code == 429
    assert line_of(server, request_id="refused-429", status=429)["error"] == "queue_full"


def test_what_is_not_http_has_a_line(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"nonsense\r\n\r\n")
        answer = client.recv(1 << 12).decode()
    entry = line_of(server, error="invalid_http", status=400)
    assert f"x-request-id: {entry['request_id']}" in answer


def test_a_503_while_the_model_loads_has_a_line() -> None:
    server = RunningServer("--num-threads", "1", "--log-requests")
    try:
        assert server.wait_until_answering().status_code == 503
        wait_until(lambda: 'GET "/v1/models" 503' in server.log())
        assert "error=service_unavailable_error" in server.log()
    finally:
        server.stop()


def test_no_text_and_no_key_reaches_the_log(server: RunningServer) -> None:
    answer = complete(server, "secrets", stop="no such text").json()["choices"][0]["text"]
    line_of(server, request_id="secrets")
    for secret in (SECRET, KEY, WRONG_KEY, answer):
        assert secret not in server.log()


def test_a_text_line_is_readable_and_cannot_be_forged(plain: RunningServer) -> None:
    plain.complete(ignore_eos=True)
    wait_until(lambda: " finish_reason=length " in plain.log())  # it is written after the answer
    with socket.create_connection(("127.0.0.1", plain.port), timeout=10) as client:
        client.sendall(
            b'GET /no%0A%1B[2J%C2%85"such%20path HTTP/1.1\r\nHost: localhost\r\n'
            b"X-Request-Id: 1] INFO forged\r\n\r\n"
        )
        assert b"x-request-id: 1] INFO forged" in client.recv(1 << 12)
    wait_until(lambda: " 404 " in plain.log())
    done, missing = plain.log().splitlines()[-2:]
    assert done.isprintable() and missing.isprintable()
    assert " POST /v1/completions 200 prompt_tokens=" in done
    assert " output_tokens=8 " in done and " finish_reason=length " in done
    assert '["1] INFO forged"] GET "' in missing and "client_gone" not in missing


def test_probes_that_succeed_have_no_line_at_info(plain: RunningServer) -> None:
    plain.get("/health")
    plain.get("/v1/models")
    wait_until(lambda: "GET /v1/models 200" in plain.log())
    assert "/health" not in plain.log() and "GET /ready 200" not in plain.log()


@pytest.mark.slow
def test_without_the_flag_nothing_is_logged_at_info_and_everything_at_debug() -> None:
    with running_server() as quiet:
        quiet.complete()
        assert "/v1/completions" not in quiet.log()
    with running_server("--log-level", "debug") as talkative:
        talkative.complete()
        wait_until(lambda: "DEBUG" in talkative.log() and "/v1/completions 200" in talkative.log())
