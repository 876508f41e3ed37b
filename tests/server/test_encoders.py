"""An encoder of text, served: its embeddings are those of transformers' states, and it generates
nothing."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.encoder_models import save_encoder, states_of, write_encoder_tokenizer
from tests.support.serving import RunningServer, refusal
from tests.support.starts import write_tokenizer

TEXTS = ["hello world", "a longer text, of more tokens", "x"]
PROMPTS = {"query": "find: ", "document": "", "Clustering": "group: "}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_encoder_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Any]]:
    path = tmp_path_factory.mktemp("encoder")
    model = save_encoder("bert", path, vocab_size=300)
    write_encoder_tokenizer(path)
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    server = RunningServer(str(path), "--dtype", "float32", "--served-model-name", "bert")
    try:
        server.wait_until_ready()
        yield server, model
    finally:
        server.stop()


def vector_of(model: Any, ids: list[int]) -> torch.Tensor:
    return torch.nn.functional.normalize(states_of(model, torch.tensor(ids))[0], dim=0)


def ask(server: RunningServer, path: str = "/v1/embeddings", **fields: Any) -> Any:
    response = server.post(path, {"model": "bert", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_embeddings_are_the_first_tokens_states_whatever_texts_share_a_step(
    served: tuple[RunningServer, Any], tokenizer: Tokenizer
) -> None:
    server, model = served
    texts = TEXTS * 20
    body = ask(server, input=texts)
    for text, entry in zip(texts, body["data"], strict=True):
        expected = vector_of(model, tokenizer.encode(text).ids)
        assert math.dist(entry["embedding"], expected.tolist()) < 1e-4
    assert body["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in texts)


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        ({}, ""),
        ({"prompt_name": "query"}, "find: "),
        ({"prompt_name": "document"}, ""),
        ({"input_type": "search_query"}, "find: "),
        ({"input_type": "passage"}, ""),
        ({"task": "retrieval.query"}, "find: "),
        ({"task": "separation"}, "group: "),
        ({"task": "text-matching"}, ""),
    ],
)
def test_the_prompt_of_a_use_stands_before_each_text(
    served: tuple[RunningServer, Any], tokenizer: Tokenizer, fields: dict[str, str], before: str
) -> None:
    server, model = served
    for text, entry in zip(TEXTS, ask(server, input=TEXTS, **fields)["data"], strict=True):
        expected = vector_of(model, tokenizer.encode(before + text).ids)
        assert math.dist(entry["embedding"], expected.tolist()) < 1e-4


def test_queries_and_documents_have_their_prompts_at_every_route(
    served: tuple[RunningServer, Any], tokenizer: Tokenizer
) -> None:
    server, model = served
    query, document = (
        vector_of(model, tokenizer.encode(text).ids) for text in (f"find: {TEXTS[0]}", TEXTS[1])
    )
    body = ask(server, "/v2/embed", texts=TEXTS[:1], input_type="search_query")
    assert math.dist(body["embeddings"]["float"][0], query.tolist()) < 1e-4
    expected = pytest.approx(float(query @ document), abs=1e-4)
    ranked = ask(server, "/rerank", query=TEXTS[0], documents=[TEXTS[1]])["results"]
    assert ranked[0]["relevance_score"] == expected
    scores = ask(server, "/score", queries=TEXTS[0], documents=TEXTS[1])["data"]
    assert scores[0]["score"] == expected
    plain = vector_of(model, tokenizer.encode(TEXTS[0]).ids)
    scores = ask(server, "/score", text_1=TEXTS[0], text_2=TEXTS[1])["data"]
    assert scores[0]["score"] == pytest.approx(float(plain @ document), abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt_name": "search_query"}, "prompt_name", "has the prompts query, document, "),
        ({"input_type": "poem"}, "input_type", "'poem'"),
        ({"prompt_name": "query", "task": "query"}, "task", "combined with prompt_name"),
        ({"prompt_name": "query", "input": [[5, 6]]}, "prompt_name", "token ids"),
    ],
)
def test_an_unknown_prompt_is_refused_with_those_that_there_are(
    served: tuple[RunningServer, Any], fields: dict[str, Any], param: str, says: str
) -> None:
    response = served[0].post("/v1/embeddings", {"model": "bert", "input": "a", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_a_text_that_is_cut_keeps_its_special_tokens(
    served: tuple[RunningServer, Any], tokenizer: Tokenizer, side: str | None
) -> None:
    server, model = served
    text = "".join(chr(97 + i % 26) for i in range(90))
    part = text[-8:] if side == "left" else text[:8]
    body = ask(server, input=text, truncate_prompt_tokens=10, truncation_side=side)
    expected = vector_of(model, tokenizer.encode(part).ids)
    assert math.dist(body["data"][0]["embedding"], expected.tolist()) < 1e-4
    assert body["usage"]["prompt_tokens"] == 10


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
    assert "makes embeddings" in response.json()["error"]["message"]


def test_a_text_that_is_too_long_is_refused(served: tuple[RunningServer, Any]) -> None:
    response = served[0].post("/v1/embeddings", {"model": "bert", "input": "a" * 65})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_texts_are_scored_and_ranked(served: tuple[RunningServer, Any]) -> None:
    documents = ["something else", "find: hello world"]  # as the query's prompt makes it
    ranked = ask(served[0], "/rerank", query="hello world", documents=documents)["results"]
    assert ranked[0]["index"] == 1
    assert ranked[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)


def test_weights_of_8_bits_give_nearly_the_same_embedding(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path, vocab_size=300)
    tokenizer = write_encoder_tokenizer(tmp_path)
    server = RunningServer(str(tmp_path), "--quantization", "int8", "--served-model-name", "bert")
    try:
        server.wait_until_ready()
        body = server.post("/v1/embeddings", {"model": "bert", "input": TEXTS[0]}).json()
    finally:
        server.stop()
    state = vector_of(model, tokenizer.encode(TEXTS[0]).ids)
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
