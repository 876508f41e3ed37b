"""The start with a model that must be downloaded, or that cannot be served."""

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import DEMO_MODEL
from tests.support.serving import RunningServer, refusal, wait_until
from tests.support.stub_hub import StubHub, stub_hub
from tests.support.terminal import Terminal

NAME = "someone/something"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    """Where servers download from, into `tmp_path`."""
    with stub_hub() as running:
        running.add(NAME, DEMO_MODEL)
        for name, value in running.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield running


def test_the_port_answers_503_during_the_download_and_then_serves(hub: StubHub) -> None:
    gate = hub.gates[WEIGHTS] = threading.Event()
    server = RunningServer(NAME)
    try:
        wait_until(lambda: WEIGHTS in hub.fetched)
        response = server.get("/v1/models")
        assert response.status_code == 503
        assert response.headers["x-penstock-state"] == "starting"
        gate.set()
        server.wait_until_ready()
        assert server.complete(model=NAME).status_code == 200
    finally:
        server.stop()


@pytest.mark.slow
def test_health_and_the_log_say_how_far_the_download_is_once(hub: StubHub) -> None:
    hub.gates[WEIGHTS] = threading.Event()
    total = f"{len(hub.repositories[NAME][WEIGHTS]) / 1e6:.1f} MB"
    server = RunningServer(NAME)
    try:
        wait_until(lambda: re.search(rf"INFO download 0\.0 of {total}, \d s\n", server.log()))
        message = server.get("/health").json()["error"]["message"]
        assert re.search(rf"still loading \(download 0\.0 of {total}, \d+ s\)", message)
        lines = [line for line in server.log().splitlines() if "download" in line]
        assert re.search(rf"INFO download: {total} in 1 file to ", lines[0])
        assert all(re.search(r"INFO download 0\.0 of", line) for line in lines[1:])
    finally:
        server.stop()


def test_a_terminal_has_a_bar_for_the_download(hub: StubHub) -> None:
    hub.gates[WEIGHTS] = threading.Event()
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", NAME]
    with Terminal(command, os.environ) as shown:
        shown.wait_for(r"·{20} download 0\.0 of [\d.]+ MB  \d s")
        shown.press(b"\x03")
        assert shown.exit_code() == 0


def test_a_tokenizer_that_cannot_be_read_is_refused_before_the_weights(hub: StubHub) -> None:
    hub.repositories[NAME]["tokenizer.json"] = b'{"model": 7}'
    assert "no tokenizer that can be read" in refusal(NAME)
    assert WEIGHTS not in hub.fetched


def test_defaults_of_a_wrong_type_are_refused_before_the_weights(hub: StubHub) -> None:
    hub.repositories[NAME]["generation_config.json"] = b'{"temperature": "0.7"}'
    assert "'temperature' must be a number from 0 to 2, not '0.7'" in refusal(NAME)
    assert WEIGHTS not in hub.fetched


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_draft_model_is_downloaded_if_its_tokenizer_is_the_served_models(
    hub: StubHub, is_alike: bool
) -> None:
    hub.add("someone/smaller", DEMO_MODEL)
    wanted = "--speculative-config", '{"model": "someone/smaller"}'
    if not is_alike:
        tokenizer = json.loads(hub.repositories["someone/smaller"]["tokenizer.json"])
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["e"], vocabulary["a"] = vocabulary["a"], vocabulary["e"]
        hub.repositories["someone/smaller"]["tokenizer.json"] = json.dumps(tokenizer).encode()
        assert "someone--smaller" in refusal(str(DEMO_MODEL), *wanted)
        assert WEIGHTS not in hub.fetched
        return
    server = RunningServer(str(DEMO_MODEL), "--served-model-name", "demo", *wanted)
    try:
        server.wait_until_ready()
        assert server.complete(model="demo").status_code == 200
        assert hub.fetched.count(WEIGHTS) == 1
    finally:
        server.stop()


@pytest.mark.slow
def test_dummy_weights_are_not_downloaded(hub: StubHub) -> None:
    server = RunningServer(NAME, "--load-format", "dummy", "--num-threads", "1")
    try:
        server.wait_until_ready()
    finally:
        server.stop()
    assert WEIGHTS not in hub.fetched


@pytest.mark.slow
def test_an_unsupported_model_ends_the_server_with_one_sentence(
    hub: StubHub, tmp_path: Path
) -> None:
    config = json.loads(hub.repositories[NAME]["config.json"])
    config["architectures"] = ["FalconForCausalLM"]
    hub.repositories[NAME]["config.json"] = json.dumps(config).encode()
    assert "FalconForCausalLM" in refusal(NAME)
    assert "has no model of that name" in refusal("someone/other")
    (tmp_path / "empty").mkdir()
    assert "is empty" in refusal(str(tmp_path / "empty"))


def test_a_fifo_in_a_models_directory_ends_the_server_with_one_sentence(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", WEIGHTS):
        (tmp_path / name).symlink_to(DEMO_MODEL / name)
    os.mkfifo(tmp_path / "generation_config.json")
    assert "generation_config.json is a FIFO" in refusal(str(tmp_path))


def test_a_truncated_file_ends_the_server_with_one_sentence(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(DEMO_MODEL / name)
    content = (DEMO_MODEL / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(content[: len(content) // 2])
    assert "is not a readable safetensors file" in refusal(str(tmp_path))
