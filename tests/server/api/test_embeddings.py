"""`/v1/embeddings` and `/v1/score`. The oracle is transformers, on the demo model."""

import base64
import json
import math
import shutil
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModel

from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer, running_server, wait_until

FOLDER = ROOT / "engine" / "hub" / "demo_model"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
PATH = "/v1/embeddings"
TEXTS = ["Once upon a time", "The cat sat on the moon", "def main():"]
NEAR = 2e-3
# Of a cosine of two embeddings that are computed again in another batch: without a C++ compiler
# float32 sums are then rounded differently, by some 1e-6. The cosines of TEXTS are 0.05 apart.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def server(exact_server: RunningServer) -> RunningServer:
    return exact_server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    # Without its strict validation, which refuses base64 before the client has read it.
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModel.from_pretrained(FOLDER, dtype=torch.float32)


def states(model: Any, text: str) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = model(torch.tensor([TOKENIZER.encode(text).ids])).last_hidden_state
    return hidden[0]


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def vectors(server: RunningServer, **fields: Any) -> list[list[float]]:
    data = ask(server, **fields)["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


def refusal(server: RunningServer, path: str = PATH, **fields: Any) -> dict[str, Any]:
    response = server.post(path, {"model": MODEL, **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_an_embedding_is_the_normalized_state_of_the_last_token(
    server: RunningServer, model: Any
) -> None:
    for text, vector in zip(TEXTS, vectors(server, input=TEXTS), strict=True):
        state = states(model, text)[-1]
        assert vector == pytest.approx((state / state.norm()).tolist(), abs=NEAR)


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.NOT_GIVEN])
def test_the_openai_client_reads_both_encodings(
    client: openai.OpenAI, server: RunningServer, encoding_format: Any
) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=encoding_format)
    assert answer.usage.prompt_tokens == sum(len(TOKENIZER.encode(text).ids) for text in TEXTS)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens
    read = [entry.embedding for entry in answer.data]
    if encoding_format == "base64":  # asked for by name, it is left as it came
        read = [list(struct.unpack("<256f", base64.b64decode(str(e)))) for e in read]
    assert read == vectors(server, input=TEXTS)
    assert all(math.hypot(*vector) == pytest.approx(1.0, abs=1e-6) for vector in read)


def test_ids_give_what_their_text_gives_alone_or_among_others(server: RunningServer) -> None:
    ids = [TOKENIZER.encode(text).ids for text in TEXTS]
    alone = [vectors(server, input=text)[0] for text in TEXTS]
    assert vectors(server, input=ids) == alone
    assert vectors(server, input=ids[1]) == [alone[1]]
    assert vectors(server, input=TEXTS * 40) == alone * 40


def test_truncation_keeps_the_end_of_each_input(server: RunningServer) -> None:
    ids = TOKENIZER.encode(TEXTS[1]).ids
    body = ask(server, input=[ids, ids], truncate_prompt_tokens=2)
    assert body["usage"]["prompt_tokens"] == 4
    assert body["data"][0]["embedding"] == vectors(server, input=ids[-2:])[0]
    limit = server.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    body = ask(server, input=[50] * (limit + 9), truncate_prompt_tokens=-1)
    assert body["usage"]["prompt_tokens"] == limit
    assert ask(server, input=[50] * limit)["usage"]["prompt_tokens"] == limit


def test_an_input_that_is_too_long_is_named_by_its_index(server: RunningServer) -> None:
    limit = server.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    error = refusal(server, input=[[1], [50] * (limit + 1)])
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert str(limit) in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": 7}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", "b\0"]}, "input[1]"),
        ({"input": [[5], [10**6]]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 64}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ],
)
def test_a_bad_field_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    error = refusal(server, **fields)
    assert error["param"] == param
    assert param in error["message"] or "texts" in error["message"]


def test_ids_of_another_tokenizer_are_refused_with_what_to_send(server: RunningServer) -> None:
    """As LangChain's OpenAIEmbeddings sends them, unless it is told not to."""
    message = refusal(server, input=[[5], [100_256]])["message"]
    assert "100256" in message and "check_embedding_ctx_length=False" in message


def test_an_answer_bears_the_request_id_and_the_model(server: RunningServer) -> None:
    body = ask(server, input="a", request_id="mine-7", user="me")
    assert (body["id"], body["object"], body["model"]) == ("embd-mine-7", "list", MODEL)


def test_a_repeated_text_finds_its_prefix_unless_another_salt_keeps_it_apart(
    server: RunningServer,
) -> None:
    ids = [60 + i % 77 for i in range(200)]
    hits = []
    for salt in ("mine", "mine", "yours"):
        before = server.metric("prefix_hit_tokens_total")
        ask(server, input=ids, cache_salt=salt)
        hits.append(server.metric("prefix_hit_tokens_total") - before)
    assert hits[0] == hits[2] == 0 and hits[1] > 100


def test_coheres_embed_answers_with_the_same_vectors_by_type(server: RunningServer) -> None:
    fields = {"texts": TEXTS, "input_type": "search_document"}
    response = server.post("/v2/embed", fields | {"embedding_types": ["base64", "float"]})
    body = response.json()
    floats = body["embeddings"]["float"]
    assert floats == [pytest.approx(each, abs=1e-5) for each in vectors(server, input=TEXTS)]
    read = [list(array("f", base64.b64decode(text))) for text in body["embeddings"]["base64"]]
    assert read == [pytest.approx(each) for each in floats]
    assert body["texts"] == TEXTS and body["response_type"] == "embeddings_by_type"
    num_tokens = ask(server, input=TEXTS)["usage"]["prompt_tokens"]
    assert body["meta"]["billed_units"] == {"input_tokens": num_tokens}
    assert list(server.post("/v2/embed", fields).json()["embeddings"]) == ["float"]
    older = server.post("/v1/embed", fields).json()
    assert older["response_type"] == "embeddings_floats"
    assert older["embeddings"] == [pytest.approx(each, abs=1e-5) for each in floats]


def test_a_model_that_is_no_classifier_names_the_routes_that_work(server: RunningServer) -> None:
    error = refusal(server, "/classify", input="a")
    assert error["code"] == "model_is_no_classifier" and "/v1/embeddings" in error["message"]


def test_coheres_embed_cuts_a_long_text_at_the_end_that_truncate_names(
    server: RunningServer,
) -> None:
    text, other = "Once upon a time there was", " a cat" * 5_000
    size = server.post("/tokenize", {"prompt": text}).json()["count"]
    (whole,) = vectors(server, input=text)
    fields = {"texts": [text + other], "max_tokens": size}
    for more, is_same in (({}, True), ({"truncate": "END"}, True), ({"truncate": "START"}, False)):
        (vector,) = server.post("/v2/embed", fields | more).json()["embeddings"]["float"]
        assert (vector == pytest.approx(whole, abs=1e-5)) is is_same
    refused = server.post("/v2/embed", fields | {"truncate": "NONE"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "texts[0]"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_orders_the_documents_by_their_scores(server: RunningServer, path: str) -> None:
    documents = ["a dragon", {"text": "Once upon a time"}, "a cat"]
    texts = ["a dragon", "Once upon a time", "a cat"]
    fields = {"query": "Once upon a time", "documents": documents}
    scores = server.post("/score", {"queries": fields["query"], "documents": texts}).json()["data"]
    body = server.post(path, fields).json()
    results = body["results"]
    assert results[0]["index"] == 1 and results[0]["relevance_score"] == pytest.approx(1.0)
    assert [r["relevance_score"] for r in results] == sorted(
        (score["score"] for score in scores), reverse=True
    )
    assert all(r["document"] == {"text": texts[r["index"]]} for r in results)
    assert body["usage"]["total_tokens"] > 0 and body["model"] == MODEL
    few = server.post(path, fields | {"top_n": 2, "return_documents": False}).json()["results"]
    assert few == [{k: r[k] for k in ("index", "relevance_score")} for r in results[:2]]


def test_a_document_is_cut_to_its_first_tokens_and_the_query_is_not(server: RunningServer) -> None:
    query, other = "Once upon a time there was", " a cat" * 5_000
    ids = server.post("/tokenize", {"prompt": query}).json()["tokens"]
    documents = [query + other, "Once", other]
    fields = {"query": query, "documents": documents, "max_tokens_per_doc": len(ids)}
    body = server.post("/rerank", fields).json()
    assert body["results"][0]["index"] == 0
    assert body["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert body["results"][0]["document"] == {"text": documents[0]}
    few = server.post("/tokenize", {"prompt": "Once"}).json()["count"]
    assert body["usage"]["total_tokens"] == 3 * len(ids) + few
    whole = server.post("/rerank", fields | {"max_tokens_per_doc": 0})
    assert whole.status_code == 400 and whole.json()["error"]["param"] == "documents[0]"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, None),
        (
            "/rerank",
            {
                "query": "a",
                "documents": ["a"],
                "max_tokens_per_doc": 7,
                "truncate_prompt_tokens": 9,
            },
            None,
        ),
        ("/v2/embed", {"texts": "a"}, "texts"),
        ("/v2/embed", {"inputs": [{"content": []}], "texts": ["a"]}, "inputs"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 32}, "output_dimension"),
        ("/v2/embed", {"texts": ["a"], "truncation_side": "left"}, "truncation_side"),
        ("/score", {"queries": ["a", "b"], "documents": ["a"]}, "queries"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {"queries": [], "documents": []}, "queries"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
        ("/score", {}, "text_1"),
    ],
)
def test_a_wrong_rerank_or_score_is_refused_by_its_field(
    server: RunningServer, path: str, fields: dict[str, Any], param: str | None
) -> None:
    response = server.post(path, fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == (param or "max_tokens_per_doc")


@pytest.mark.parametrize(
    ("path", "fields", "hint"),
    [
        (PATH, {"messages": [{"role": "user", "content": "a"}]}, "send texts as input"),
        ("/rerank", {"query": "a", "texts": ["a"]}, "send documents"),
        ("/v2/embed", {"inputs": [{"content": []}]}, "send texts"),
    ],
)
def test_fields_of_other_servers_are_refused_by_name_where_ours_are_missing(
    server: RunningServer, path: str, fields: dict[str, Any], hint: str
) -> None:
    error = refusal(server, path, **fields)
    assert error["param"] in fields and error["message"].endswith(hint)


def test_queries_and_documents_are_texts_by_other_names(server: RunningServer) -> None:
    names = (
        {"queries": ["a", "b"], "documents": ["c", "d"]},
        {"text_1": ["a", "b"], "text_2": ["c", "d"]},
    )
    first, second = (server.post("/score", fields).json()["data"] for fields in names)
    assert first == second and len(first) == 2


def test_a_priority_is_accepted_under_first_come_first_served(server: RunningServer) -> None:
    ask(server, input="a", priority=1)


def test_another_model_is_not_found(server: RunningServer) -> None:
    response = server.post(PATH, {"model": "text-embedding-3-small", "input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_a_score_is_the_cosine_of_two_embeddings(server: RunningServer, path: str) -> None:
    one, *others = vectors(server, input=TEXTS)
    body = server.post(path, {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS}).json()
    expected = [sum(a * b for a, b in zip(one, v, strict=True)) for v in (one, *others)]
    assert [entry["score"] for entry in body["data"]] == pytest.approx(expected, abs=ROUNDING)
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
    assert {entry["object"] for entry in body["data"]} == {"score"}
    lengths = [len(TOKENIZER.encode(text).ids) for text in TEXTS]
    assert body["usage"]["prompt_tokens"] == lengths[0] + sum(lengths)


def test_as_many_texts_on_both_sides_are_scored_pair_by_pair(server: RunningServer) -> None:
    pairs = {"model": MODEL, "text_1": TEXTS, "text_2": TEXTS[::-1]}
    scores = [entry["score"] for entry in server.post("/score", pairs).json()["data"]]
    assert scores[0] == pytest.approx(scores[2], abs=ROUNDING)
    assert scores[1] == pytest.approx(1.0, abs=ROUNDING)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    assert refusal(server, "/score", **fields)["param"] == param


def test_metrics_count_embeddings(server: RunningServer) -> None:
    names = ("prompt_tokens_total", 'requests_total{outcome="stop"}', "generated_tokens_total")
    before = [server.metric(name) for name in names]
    num_tokens = ask(server, input=TEXTS)["usage"]["prompt_tokens"]
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [num_tokens, 1, 0]


@pytest.mark.slow
def test_a_sentence_transformers_directory_sets_pooling_and_dimensions(
    tmp_path: Path, model: Any
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(FOLDER, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"is_matryoshka": True}))
    # As embedding models are saved: without the output layer, their names are shorter.
    weights = load_file(directory / "model.safetensors")
    short = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(short, directory / "model.safetensors")
    (directory / "1_Pooling").mkdir()
    mean = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(mean))
    # The chunks of a step are shorter than the text, so that the mean is gathered over steps.
    chunks = ("--max-num-batched-tokens", "4", "--max-num-seqs", "4")
    running = RunningServer(str(directory), "--dtype", "float32", "--num-threads", "1", *chunks)
    try:
        running.wait_until_ready()
        name = running.get("/v1/models").json()["data"][0]["id"]
        for dimensions in (None, 256, 10):
            body = {"model": name, "input": TEXTS[1], "dimensions": dimensions}
            vector = running.post(PATH, body).json()["data"][0]["embedding"]
            mean_state = states(model, TEXTS[1]).mean(0)[:dimensions]
            expected = (mean_state / mean_state.norm()).tolist()
            assert vector == pytest.approx(expected, abs=NEAR)
        error = running.post(PATH, body | {"dimensions": 257}).json()["error"]
        assert error["param"] == "dimensions" and "256" in error["message"]
    finally:
        running.stop()


# What follows needs no model.

LONG = {"model": MODEL, "input": [[50 + i % 100] * 200 for i in range(2048)]}


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A server with room for eight answers in all."""
    with running_server("--max-num-seqs", "4", "--max-num-queued-reqs", "4") as running:
        yield running


def test_more_inputs_than_the_queue_holds_are_served_in_order(small: RunningServer) -> None:
    inputs = [[50 + i % 100, 3 + i // 100] for i in range(1000)]
    assert len({tuple(v) for v in vectors(small, input=inputs)}) == 1000
    assert vectors(small, input=inputs[:50]) == [vectors(small, input=i)[0] for i in inputs[:50]]


def test_a_full_queue_refuses_embeddings_with_retry_after(small: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 50_000, "n": 8}
    body |= {"stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{small.url}/v1/completions", json=body, timeout=30) as hog:
        assert hog.status_code == 200
        refused = small.post(PATH, {"model": MODEL, "input": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
    small.wait_until_idle()
    assert small.post(PATH, {"model": MODEL, "input": "a"}).status_code == 200


SLOW = ("--scripted-step-ms", "100")


def test_a_disconnect_aborts_all_inputs() -> None:
    with running_server(*SLOW) as running:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(running.url + PATH, json=LONG, timeout=0.5)
        wait_until(lambda: running.metric('requests_total{outcome="abandoned"}') >= 1)
        running.wait_until_idle()
        assert running.metric("prompt_tokens_total") < 2048 * 400  # most of them never ran


def test_a_deadline_ends_all_inputs() -> None:
    with running_server("--request-timeout", "0.3", *SLOW) as running:
        response = running.post(PATH, LONG)
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        running.wait_until_idle()
        assert running.metric('requests_total{outcome="failed"}') == 1


def test_a_drain_lets_embeddings_finish_and_a_key_is_required() -> None:
    with running_server("--api-key", "k") as running:
        headers = {"Authorization": "Bearer k"}
        refused = running.post(PATH, {"model": MODEL, "input": "a"})
        assert refused.status_code == 401
        answers: list[httpx.Response] = []
        body = LONG | {"input": LONG["input"][:200]}
        asking = threading.Thread(
            target=lambda: answers.append(running.post(PATH, body, headers=headers))
        )
        asking.start()
        time.sleep(0.3)
        running.process.terminate()
        asking.join(timeout=30)
        assert answers[0].status_code == 200
        assert len(answers[0].json()["data"]) == 200
        assert running.exit_code()[0] == 0
