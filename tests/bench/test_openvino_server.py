"""The server for OpenVINO, as a program of its own: on a scripted pipeline, and on OpenVINO."""

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.bench.cli import main as bench
from tests.support.paths import ROOT
from tests.support.serving import wait_until

_PROGRAM = ROOT / "tests" / "bench" / "peers" / "openvino_server.py"
_SCRIPTED = ROOT / "tests" / "support" / "scripted_openvino"
_PEERS = ROOT / "build" / "peers"
_GREEDY = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Served:
    port: int
    log: Path

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def get(self, path: str) -> dict[str, Any]:
        connection = self.connect()
        connection.request("GET", path)
        body: dict[str, Any] = json.load(connection.getresponse())
        connection.close()
        return body

    def is_ready(self) -> bool:
        try:
            return self.get("/health") == {"status": "ok"}
        except ConnectionError:
            return False

    def complete(self, **fields: Any) -> list[dict[str, Any]]:
        """The events but [DONE]."""
        connection = self.connect()
        events = complete(connection, **fields)
        connection.close()
        return events


def post(connection: http.client.HTTPConnection, body: object) -> http.client.HTTPResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    return connection.getresponse()


def complete(connection: http.client.HTTPConnection, **fields: Any) -> list[dict[str, Any]]:
    response = post(connection, _GREEDY | fields)
    events = response.read().decode().split("\n\n")
    assert response.status == 200 and events[-2:] == ["data: [DONE]", ""], events
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def texts(events: list[dict[str, Any]]) -> list[str]:
    return [event["choices"][0]["text"] for event in events if event["choices"]]


def served(command: list[str], log: Path, **environment: str) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
        )
    try:
        server = Served(port, log)
        wait_until(lambda: process.poll() is not None or server.is_ready())
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("openvino") / "bytes"
    folder.mkdir()
    (folder / "openvino_model.xml").touch()
    config = {"max_position_embeddings": 4096, "vocab_size": 256}
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, str(_PROGRAM), str(folder), "--threads", "3"]
    yield from served(command, folder / "log", PYTHONPATH=str(_SCRIPTED))


def test_each_token_is_an_event_and_the_usage_comes_last(server: Served) -> None:
    *tokens, usage = server.complete(model="bytes", prompt=[97, 98, 99], max_tokens=4)
    assert texts(tokens) == ["a", "b", "c", "a"]
    assert [each["choices"][0]["finish_reason"] for each in tokens] == [None, None, None, "length"]
    counts = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert usage["choices"] == [] and usage["usage"] == counts


def test_a_text_is_a_prompt_too_and_usage_is_sent_when_asked_for(server: Served) -> None:
    events = server.complete(prompt="xyz", max_tokens=3, stream_options=None)
    assert texts(events) == ["x", "y", "z"] and "usage" not in events[-1]


def test_a_character_of_several_tokens_is_sent_whole(server: Served) -> None:
    events = server.complete(prompt=[*"é€".encode()], max_tokens=5)
    assert texts(events) == ["", "é", "", "", "€"]


def test_bytes_that_are_no_character_do_not_wait_for_ever(server: Served) -> None:
    events = server.complete(prompt=[0xF0], max_tokens=6)
    assert texts(events)[3] and len(texts(events)) == 6


def test_an_output_ends_at_the_end_of_a_text_unless_that_is_ignored(server: Served) -> None:
    prompt = [97, 0, 98]
    ended = server.complete(prompt=prompt, max_tokens=5)
    assert ended[1]["choices"][0]["finish_reason"] == "stop" and len(texts(ended)) == 2
    assert len(texts(server.complete(prompt=prompt, max_tokens=5, ignore_eos=True))) == 5


def test_requests_run_in_the_same_steps(server: Served) -> None:
    with ThreadPoolExecutor(3) as threads:
        outputs = threads.map(
            lambda letter: texts(server.complete(prompt=[letter], max_tokens=60)), range(97, 100)
        )
        assert ["".join(output) for output in outputs] == ["a" * 60, "b" * 60, "c" * 60]
    assert "a step of 3\n" in server.log.read_text()


def test_what_a_client_has_left_is_cancelled(server: Served) -> None:
    num_before = server.log.read_text().count("is cancelled")
    connection = server.connect()
    response = post(connection, _GREEDY | {"prompt": [97], "max_tokens": 4000})
    response.readline()
    response.close()
    connection.close()
    wait_until(lambda: server.log.read_text().count("is cancelled") == num_before + 1)
    assert texts(server.complete(prompt=[97], max_tokens=1)) == ["a"]


def test_a_request_that_the_cache_has_no_room_for_ends_with_an_error(server: Served) -> None:
    connection = server.connect()
    body = post(connection, _GREEDY | {"prompt": [97] * 65, "max_tokens": 1}).read().decode()
    assert "the KV cache is too small" in body and "[DONE]" not in body
    assert texts(complete(connection, prompt=[97], max_tokens=1)) == ["a"]
    connection.close()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"top_p": 0.5}, "top_p is not supported here; leave it out"),
        ({"model": "other"}, "there is no model other; it is bytes"),
        ({"stream": False}, "stream must be true"),
        ({"temperature": 1}, "temperature must be 0"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ({"max_tokens": True}, "max_tokens must be a whole number from 1"),
        ({"prompt": []}, "prompt must be a text or a list of token ids"),
        ({"prompt": [256]}, "each token id must be from 0 to 255"),
        ({"max_tokens": 4096}, "are more than the 4096 of this model; ask for less"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    server: Served, fields: dict[str, Any], sentence: str
) -> None:
    connection = server.connect()
    response = post(connection, _GREEDY | {"prompt": [97], "max_tokens": 1} | fields)
    assert response.status in (400, 404)
    assert sentence in json.load(response)["error"]["message"]
    assert texts(complete(connection, prompt=[97], max_tokens=1)) == ["a"]  # the same connection
    connection.close()


def test_other_paths_and_bodies_are_refused(server: Served) -> None:
    assert "there is no GET /metrics; there are POST" in server.get("/metrics")["error"]["message"]
    for body, sentence in ((b"{", "the body is not JSON"), ([], "must be a JSON object")):
        connection = server.connect()
        assert sentence in json.load(post(connection, body))["error"]["message"]
        connection.close()


def test_the_pipeline_gets_the_flags_and_the_model_is_listed(server: Served) -> None:
    first = server.log.read_text().splitlines()[0]
    for setting in (
        "'INFERENCE_NUM_THREADS': 3",
        "'INFERENCE_PRECISION_HINT': 'bf16'",
        "'KV_CACHE_PRECISION': 'bf16'",
        "'enable_prefix_caching': True",
        "'max_num_seqs': 16",
    ):
        assert setting in first
    (model,) = server.get("/v1/models")["data"]
    assert model["id"] == "bytes" and model["max_model_len"] == 4096


def test_penstock_bench_measures_it(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "6", "--max-concurrency", "3", "--random-input-len", "8"]
    url = f"http://127.0.0.1:{server.port}"
    # The scripted vocabulary is of bytes, and random token ids are not.
    flags += ["--random-output-len", "5", "--prompt-format", "text", "--json"]
    assert bench(["--base-url", url, *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == 6 and result["total_output_tokens"] == 30


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, _PROGRAM, tmp_path],
        env={**os.environ, "PYTHONPATH": str(_SCRIPTED)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"{tmp_path} has no openvino_model.xml; write it by `optimum-cli export openvino`\n"
    )


@pytest.mark.slow
def test_openvino_itself_streams_as_the_scripted_pipeline_does(tmp_path: Path) -> None:
    python, model = _PEERS / "openvino" / "bin" / "python", _PEERS / "models" / "135m-openvino"
    if not (python.exists() and model.exists()):
        pytest.skip("OpenVINO is not installed; `make bench-peers` installs it and makes its model")
    command = [str(python), str(_PROGRAM), str(model), "--threads", "1"]
    for server in served(command, tmp_path / "log"):
        *tokens, usage = server.complete(prompt=[300, 400, 500], max_tokens=6, ignore_eos=True)
        assert len(texts(tokens)) == 6 and all(texts(tokens))
        assert tokens[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 6
        assert server.complete(prompt=[300, 400, 500], max_tokens=6, ignore_eos=True)[:-1] == tokens
