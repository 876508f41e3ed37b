"""A GGUF file is served like the directory that it was made of."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf import GGMLQuantizationType as Type

from tests.support.gguf_files import load_transformers, quantized, write_gguf
from tests.support.paths import DEMO_MODEL, STORIES
from tests.support.serving import RunningServer, free_port, wait_until
from tests.support.stories import needs_stories
from tests.support.stub_hub import stub_hub

MODEL = "penstock-demo-gguf"
_MODEL = {"model": "penstock-demo"}
_LLAMA_SERVER = shutil.which(os.environ.get("LLAMA_SERVER", "llama-server"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("model") / f"{MODEL}.gguf"
    write_gguf(path, load_transformers(DEMO_MODEL), tokenizer=DEMO_MODEL)
    running = RunningServer(str(path), "--dtype", "float32")
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


def test_its_name_is_that_of_the_file(server: RunningServer) -> None:
    [model] = server.get("/v1/models").json()["data"]
    assert model["id"] == MODEL
    assert model["root"].endswith(f"/{MODEL}.gguf")


@pytest.mark.parametrize("text", ["Who are you?", "Tell me about rivers.", "What is 2 + 3?"])
def test_chats_are_those_of_the_safetensors(
    server: RunningServer, exact_server: RunningServer, text: str
) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 48,
    }
    found = server.chat(model=MODEL, **fields).json()
    expected = exact_server.chat(**fields).json()
    assert found["choices"] == expected["choices"]
    assert found["usage"] == expected["usage"]


def test_structured_output_has_its_grammar(server: RunningServer) -> None:
    fields: dict[str, Any] = {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}
    answer = server.chat(model=MODEL, max_tokens=20, **fields).json()
    text = answer["choices"][0]["message"]["content"]
    assert len(text) == 6 and text[:3].isdigit() and text[3] == "-", answer


def test_texts_are_tokenized_and_embedded(
    server: RunningServer, exact_server: RunningServer
) -> None:
    for path, key in (("/tokenize", "prompt"), ("/v1/embeddings", "input")):
        found = server.post(path, {"model": MODEL, key: "Rivers carry water."}).json()
        expected = exact_server.post(path, {key: "Rivers carry water."} | _MODEL).json()
        if key == "prompt":
            assert found["tokens"] == expected["tokens"]
        else:
            numbers = expected["data"][0]["embedding"]
            assert found["data"][0]["embedding"] == pytest.approx(numbers, abs=1e-5)


@pytest.mark.slow
def test_a_file_of_the_hub_is_downloaded_and_served_with_its_tokenizer(
    server: RunningServer, tmp_path: Path
) -> None:
    root = server.get("/v1/models").json()["data"][0]["root"]
    name = "someone/demo-GGUF"
    with stub_hub() as hub:
        hub.repositories[name] = {"demo-F32.gguf": Path(root).read_bytes(), "config.json": b"{}"}
        gate = hub.gates["demo-F32.gguf"] = threading.Event()
        downloading = RunningServer(f"{name}:F32", env=hub.environment(tmp_path))
        try:
            assert downloading.wait_until_answering().status_code == 503
            gate.set()
            downloading.wait_until_ready()
            answer = downloading.chat(model=f"{name}:F32", temperature=0).json()
            assert answer["choices"][0]["message"]["content"]
            assert set(hub.fetched) == {"demo-F32.gguf"}
        finally:
            downloading.stop()


@pytest.mark.skipif(not _LLAMA_SERVER, reason="no llama-server here (LLAMA_SERVER names one)")
@needs_stories
@pytest.mark.parametrize("kind", [Type.F32, Type.F16])
def test_greedy_answers_are_those_of_llama_server(tmp_path: Path, kind: Type) -> None:
    path = write_gguf(
        tmp_path / "stories.gguf", load_transformers(STORIES), quantized(kind), tokenizer=STORIES
    )
    prompts = ["Once upon a time", "One day, Tom and Lily went to the", "The little dog"]
    port = free_port()
    command = [str(_LLAMA_SERVER), "-m", str(path), "--port", str(port), "-t", "1", "-c", "512"]
    ours = RunningServer(str(path), "--dtype", "float32")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as theirs:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _is_healthy(url), timeout_s=60)
            ours.wait_until_ready()
            for prompt in prompts:
                fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 60, "temperature": 0}
                found = ours.complete(model="stories", **fields).json()["choices"][0]["text"]
                expected = httpx.post(f"{url}/v1/completions", json=fields, timeout=60).json()
                assert found == expected["choices"][0]["text"]
        finally:
            theirs.terminate()
            ours.stop()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
