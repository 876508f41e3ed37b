"""Cohere's client, of both versions of its API: embeddings and reranking.

What it does that others do not: the older client reads `embeddings` as a list unless it has asked
for types, and tells the two apart by `response_type`; types are attributes (`float_`); a response
counts tokens in `meta.billed_units`; errors are classes by status, and their body is kept.
"""

import math

import cohere
import pytest

MODEL = "penstock-demo"
TEXTS = ["Once upon a time", "The cat sat on the moon"]


@pytest.fixture(scope="module")
def client(demo: str) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="x", base_url=demo)


@pytest.fixture(scope="module")
def older(demo: str) -> cohere.Client:
    return cohere.Client(api_key="x", base_url=demo)


def test_embeddings_by_type(client: cohere.ClientV2) -> None:
    types = ["float", "base64"]
    answer = client.embed(
        model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=types
    )
    floats = answer.embeddings.float_
    assert floats is not None and len(floats) == 2
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-5) for vector in floats)
    assert answer.embeddings.base64 and answer.texts == TEXTS
    assert answer.meta and answer.meta.billed_units and answer.meta.billed_units.input_tokens


def test_the_older_client_reads_a_list_or_types(
    older: cohere.Client, client: cohere.ClientV2
) -> None:
    answer = older.embed(texts=TEXTS, model=MODEL, input_type="search_query")
    assert answer.response_type == "embeddings_floats"
    by_type = older.embed(texts=TEXTS, model=MODEL, embedding_types=["float"])
    assert by_type.response_type == "embeddings_by_type"
    assert answer.embeddings[0] == pytest.approx(by_type.embeddings.float_[0], abs=1e-6)


def test_documents_are_ranked_with_both_clients(
    client: cohere.ClientV2, older: cohere.Client
) -> None:
    answer = client.rerank(model=MODEL, query=TEXTS[0], documents=TEXTS[::-1], top_n=1)
    assert [result.index for result in answer.results] == [1]
    assert answer.results[0].relevance_score == pytest.approx(1, abs=1e-5)
    ranked = older.rerank(model=MODEL, query=TEXTS[0], documents=[{"text": text} for text in TEXTS])
    assert [result.index for result in ranked.results] == [0, 1]
    assert ranked.results[1].document and ranked.results[1].document.text == TEXTS[1]


def test_an_error_is_a_class_with_a_body(client: cohere.ClientV2) -> None:
    with pytest.raises(cohere.BadRequestError) as raised:
        client.embed(model=MODEL, texts=["a"], input_type="poem")
    assert raised.value.body["error"]["param"] == "input_type"
