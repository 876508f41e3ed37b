"""A model whose numbers are NaN: every request ends with an error that says so."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.paths import DEMO_MODEL
from tests.support.serving import MODEL, RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("model")
    for file in DEMO_MODEL.glob("*.json"):
        shutil.copy(file, path)
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    # Not in its first row, which is checked at the start.
    tensors["model.layers.0.mlp.down_proj.weight"][3] = torch.nan
    save_file(tensors, path / "model.safetensors")
    running = RunningServer(str(path), "--served-model-name", MODEL, "--num-threads", "1")
    running.wait_until_ready()
    yield running
    running.process.terminate()
    running.exit_code()


def check(error: Any) -> None:
    assert error["code"] == "invalid_logits" and error["type"] == "server_error"
    assert "NaN" in error["message"] and "--dtype" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"logprobs": 3},
        {"n": 2},
        {"guided_regex": "[a-f]{4}"},
        {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 0},
    ],
)
def test_a_completion_is_a_500_with_what_to_try(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    before = server.metric("invalid_logits_total")
    answer = server.complete(**fields)
    assert answer.status_code == 500
    check(answer.json()["error"])
    server.wait_until_idle()
    assert server.metric("invalid_logits_total") > before


def test_a_stream_ends_with_the_error(server: RunningServer) -> None:
    answer = server.chat(stream=True)
    if answer.status_code == 200:
        (event,) = (line for line in answer.text.splitlines() if '"error"' in line)
        check(json.loads(event.removeprefix("data: "))["error"])
    else:
        assert answer.status_code == 500
        check(answer.json()["error"])


def test_an_embedding_is_a_500(server: RunningServer) -> None:
    answer = server.post("/v1/embeddings", {"model": MODEL, "input": ["a", "b"]})
    assert answer.status_code == 500
    check(answer.json()["error"])
