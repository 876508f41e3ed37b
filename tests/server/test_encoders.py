"""An encoder of text, served: its embeddings are those of transformers' states, and it generates
nothing."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.encoder_models import save_encoder, states_of
from tests.support.serving import RunningServer, refusal
from tests.support.starts import write_tokenizer

TEXTS = ["hello world", "a longer text, of more tokens", "x"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Any]]:
    path = tmp_path_factory.mktemp("encoder")
    model = save_encoder("bert", path, vocab_size=300)
    write_tokenizer(path)
    server = RunningServer(str(path), "--dtype", "float32", "--served-model-name", "bert")
    try:
        server.wait_until_ready()
        yield server, model
    finally:
        server.stop()


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([_ALPHABET[byte] for byte in text.encode()])


def _alphabet() -> dict[int, int]:
    """The ids that `write_tokenizer` gives to printable bytes."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    shown = {ord(letter): letter for letter in letters if ord(letter) < 127}
    shown[ord(" ")] = "Ġ"
    return {byte: letters.index(letter) for byte, letter in shown.items()}


_ALPHABET = _alphabet()


def test_embeddings_are_the_first_tokens_states_whatever_texts_share_a_step(
    served: tuple[RunningServer, Any],
) -> None:
    server, model = served
    texts = TEXTS * 20
    body = server.post("/v1/embeddings", {"model": "bert", "input": texts}).json()
    for text, entry in zip(texts, body["data"], strict=True):
        state = states_of(model, ids_of(text))[0]
        expected = (state / state.norm()).tolist()
        assert math.dist(entry["embedding"], expected) < 1e-4
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
    ],
)
def test_what_generates_text_is_refused_by_name(
    served: tuple[RunningServer, Any], path: str, fields: dict[str, Any]
) -> None:
    response = served[0].post(path, {"model": "bert", **fields})
    assert response.status_code == 400
    assert "is an encoder" in response.json()["error"]["message"]


def test_a_text_that_is_too_long_is_refused(served: tuple[RunningServer, Any]) -> None:
    response = served[0].post("/v1/embeddings", {"model": "bert", "input": "a" * 65})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_texts_are_scored_and_ranked(served: tuple[RunningServer, Any]) -> None:
    documents = ["hello world", "something else"]
    body = {"model": "bert", "query": "hello world", "documents": documents}
    ranked = served[0].post("/rerank", body).json()["results"]
    assert ranked[0]["index"] == 0
    assert ranked[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)


def test_weights_of_8_bits_give_nearly_the_same_embedding(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path, vocab_size=300)
    write_tokenizer(tmp_path)
    server = RunningServer(str(tmp_path), "--quantization", "int8", "--served-model-name", "bert")
    try:
        server.wait_until_ready()
        body = server.post("/v1/embeddings", {"model": "bert", "input": TEXTS[0]}).json()
    finally:
        server.stop()
    state = states_of(model, ids_of(TEXTS[0]))[0]
    found = torch.tensor(body["data"][0]["embedding"])
    assert torch.cosine_similarity(found, state, dim=0) > 0.99


@pytest.mark.parametrize("flags", [("--enable-lora",), ("--kv-offload-dir", "blocks")])
def test_flags_without_an_effect_are_refused_by_name(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    save_encoder("bert", tmp_path, vocab_size=300)
    write_tokenizer(tmp_path)
    more = (str(tmp_path / each) if each == "blocks" else each for each in flags)
    assert f"{flags[0]} has no effect on bert" in refusal(str(tmp_path), *more)
