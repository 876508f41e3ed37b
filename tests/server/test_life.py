"""Start, disconnects, drain and shutdown of a real server process."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer, running_server, wait_until

COMPLETIONS = "/v1/completions"
# Seconds of work, unless it is aborted.
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 50_000, "seed": 1}


@pytest.fixture
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


def test_the_port_answers_503_while_the_model_loads() -> None:
    server = RunningServer("--num-threads", "1")  # a real model, which takes at least a second
    try:
        response = server.wait_until_answering()
        assert response.status_code == 503
        assert response.headers["x-penstock-state"] == "starting"
        assert int(response.headers["retry-after"]) > 0
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert server.get("/version").json()["computed_by"] is None
        server.wait_until_ready()
        assert server.get("/health").status_code == 200
        assert server.get("/version").json()["computed_by"].endswith(", 1 thread")
        assert server.get("/v1/models").headers["x-penstock-state"] == "ready"
    finally:
        server.stop()


@pytest.mark.parametrize("n", [1, 3])
def test_a_disconnect_from_a_stream_frees_everything(server: RunningServer, n: int) -> None:
    abandoned = server.metric('requests_total{outcome="abandoned"}')
    body = LONG | {"stream": True, "n": n}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body) as response:
        parts = response.iter_raw()
        next(parts)
        # The other answers begin with a copy of the first one, a step later.
        wait_until(lambda: server.metric("running_sequences") == n)
    # A busy server may take note of it later, when it still seems to be idle.
    wait_until(lambda: server.metric('requests_total{outcome="abandoned"}') == abandoned + 1)
    server.wait_until_idle()


def test_a_disconnect_from_a_plain_request_frees_everything(server: RunningServer) -> None:
    abandoned = server.metric('requests_total{outcome="abandoned"}')
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + COMPLETIONS, json=LONG, timeout=0.3)
    # A busy server may take note of it later, when it still seems to be idle.
    wait_until(lambda: server.metric('requests_total{outcome="abandoned"}') == abandoned + 1)
    server.wait_until_idle()


def test_a_disconnect_from_a_batch_of_prompts_frees_everything(server: RunningServer) -> None:
    before = server.metric("generated_tokens_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + COMPLETIONS, json=LONG | {"prompt": ["a", "b", "c"]}, timeout=0.3)
    server.wait_until_idle()
    assert server.metric("generated_tokens_total") - before < 3 * LONG["max_tokens"] / 2


def test_a_stop_string_also_ends_the_work_of_the_engine(server: RunningServer) -> None:
    text = server.complete(max_tokens=40).json()["choices"][0]["text"]
    before = server.metric("generated_tokens_total")
    answer = server.complete(max_tokens=50_000, stop=text[20:28]).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    server.wait_until_idle()
    assert server.metric("generated_tokens_total") - before < 10_000


@contextlib.contextmanager
def draining() -> Iterator[RunningServer]:
    """A server in its drain, with a stream that then ends as if nothing had happened."""
    with running_server() as server:
        body = LONG | {"max_tokens": 10_000, "stream": True}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
            parts = response.iter_text()
            next(parts)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/ready").status_code == 503)
            yield server
            rest = "".join(parts)
        assert '"finish_reason":"length"' in rest and rest.endswith("data: [DONE]\n\n")
        code, errors = server.exit_code()
        assert code == 0, errors


def test_a_drain_finishes_running_requests_and_refuses_new_ones() -> None:
    with draining() as server:
        refused = server.complete()
        assert refused.status_code == 503
        assert refused.headers["x-penstock-state"] == "draining"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert server.get("/health").status_code == 200


def test_a_drain_under_load_finishes_what_runs_and_what_waits() -> None:
    body = LONG | {"stream": True, "max_tokens": 100}
    with (
        running_server("--scripted-step-ms", "10", "--max-num-seqs", "4") as server,
        ThreadPoolExecutor(24) as threads,
    ):
        answers = [threads.submit(server.post, COMPLETIONS, body) for _ in range(16)]
        wait_until(lambda: server.metric("waiting_sequences") >= 8)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready").status_code == 503)
        late = {answer.status_code for answer in threads.map(lambda _: server.complete(), range(8))}
        texts = [each.result().text for each in answers]
        assert all('"finish_reason":"length"' in text for text in texts)
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert late == {503}
        code, errors = server.exit_code()
        assert code == 0, errors


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event() -> None:
    with running_server("--shutdown-timeout", "0.2") as server:
        body = LONG | {"stream": True, "n": 4}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
            parts = response.iter_text()
            next(parts)
            server.process.send_signal(signal.SIGTERM)
            rest = "".join(parts)
        assert '{"error":{"message":"the server is shutting down"' in rest
        assert "[DONE]" not in rest
        code, errors = server.exit_code()
        assert code == 0, errors


def test_a_second_signal_ends_the_server_at_once() -> None:
    with (
        running_server() as server,
        httpx.stream("POST", server.url + COMPLETIONS, json=LONG | {"stream": True}) as response,
    ):
        parts = response.iter_raw()
        next(parts)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.get("/ready").status_code == 503)
        server.process.send_signal(signal.SIGINT)
        code, _ = server.exit_code()
        assert code == 128 + signal.SIGINT


def test_an_idle_server_drains_at_once() -> None:
    with running_server("--shutdown-timeout", "600") as server:
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.exit_code()
        assert code == 0
        assert "SIGTERM: no request is open, so the server ends now" in errors.splitlines()[-1]


def test_a_server_that_downloads_its_model_ends_on_sigterm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # which never answers
        hub.settimeout(60)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")
        server = RunningServer("someone/something")
        try:
            with hub.accept()[0]:
                server.process.send_signal(signal.SIGTERM)
                code, errors = server.exit_code()
        finally:
            server.stop()
    assert code == 0
    assert "SIGTERM" in errors.splitlines()[-1]


def test_a_dead_engine_that_is_not_replaced_fails_every_request_and_the_exit_code_is_not_zero() -> (
    None
):
    with running_server("--max-engine-restarts", "0") as server:
        answers: list[httpx.Response] = []
        plain = threading.Thread(target=lambda: answers.append(server.complete(**LONG)))
        plain.start()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            stream = client.completions.create(
                model=MODEL, prompt="Once", max_tokens=50_000, stream=True
            )
            next(iter(stream))
            wait_until(lambda: server.metric("running_sequences") == 2)
            os.kill(engine_pid(server), signal.SIGKILL)
            with pytest.raises(openai.APIError, match="engine"):
                for _ in stream:
                    pass
        plain.join()
        assert answers[0].status_code == 500
        assert answers[0].json()["error"]["type"] == "server_error"
        code, errors = server.exit_code()
        assert code == 1 and "engine" in errors and "Traceback" not in errors


def test_an_engine_that_dies_for_good_in_a_drain_makes_the_exit_code_not_zero() -> None:
    with running_server("--max-engine-restarts", "0") as server:
        body = LONG | {"stream": True}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
            parts = response.iter_text()
            next(parts)
            engine = engine_pid(server)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/ready").status_code == 503)
            os.kill(engine, signal.SIGKILL)
            assert '"code":"engine_failed"' in "".join(parts)
        code, errors = server.exit_code()
        assert code == 1 and "the engine ended" in errors


@pytest.mark.slow
def test_a_drain_in_which_the_engine_dies_still_finishes_its_streams() -> None:
    with draining() as server:
        os.kill(engine_pid(server), signal.SIGKILL)


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_nothing_is_left_after_sigkill(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running_server("--max-engine-restarts", "0") as server:
        engine = engine_pid(server)
        os.kill(engine if victim == "engine" else server.process.pid, signal.SIGKILL)
        server.process.wait(60)
        wait_until(lambda: not Path(f"/proc/{engine}").exists())
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_server_is_not_ready_while_the_engine_process_is_stopped() -> None:
    with running_server() as server:
        engine = engine_pid(server)
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: server.get("/ready").status_code == 503)
        assert "has not run" in server.get("/ready").json()["error"]["message"]
        assert server.get("/health").status_code == 200  # a restart is not due yet
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: server.get("/ready").status_code == 200)
        assert server.complete().status_code == 200


def engine_pid(server: RunningServer) -> int:
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_is_reported_in_one_line_that_names_the_flag(server: RunningServer) -> None:
    ended = penstock("serve", "--port", str(server.port), "--scripted")
    assert ended.returncode == 2
    assert "--port" in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--port", "70000"], "--port"),
        (["--host", ""], "--host"),
        (["--config"], "argument --config: expected one argument"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-batched-tokens", "5"], "--max-num-batched-tokens"),
        (["--chat-template", "nowhere.jinja"], "--chat-template"),
        (["--api-key", ""], "--api-key"),
        (["./no/such/model", "--port", "0", "--scripted"], "no/such/model"),
        (["~no-such-user/model", "--port", "0", "--scripted"], "there is no directory '~no-such"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_reported_in_one_line(arguments: list[str], word: str) -> None:
    ended = penstock("serve", *arguments)
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if " INFO " not in line]
    assert len(errors) == 1 and word in errors[0]


def test_every_flag_states_its_default() -> None:
    text = penstock("serve", "--help").stdout.split("listening:")[1]
    # Since 3.13, argparse names the value of a flag with two names once.
    flags = re.findall(r"^  (?:-\w+(?: [^,]+)?, )?--[a-z-]+", text, re.MULTILINE)
    assert len(flags) > 40
    assert text.count("(default:") == len(flags)


def test_the_version_is_printed() -> None:
    assert penstock("--version").stdout.startswith("penstock ")


def test_ten_disconnects_in_a_row_leave_nothing_running(server: RunningServer) -> None:
    before = server.metric("generated_tokens_total")
    for _ in range(10):
        body = LONG | {"stream": True}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body) as response:
            next(response.iter_raw())  # and disconnects
    server.wait_until_idle()
    assert server.metric("generated_tokens_total") - before < 10 * LONG["max_tokens"] / 2
