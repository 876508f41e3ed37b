"""What clients of vLLM, SGLang and llama.cpp send and read without asking, on every API."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import MODEL, RunningServer, running_server

Json = dict[str, Any]
USER = {"role": "user", "content": "Who are you?"}
BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 4},
    "/v1/responses": {"input": "Once", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "Once"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "Once"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def answered(server: RunningServer, path: str, **fields: Any) -> Json:
    response = server.post(path, BODIES[path] | fields)
    assert response.status_code == 200, response.text
    body: Json = response.json()
    return body


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_names_no_model_is_answered_by_the_one_that_is_served(
    server: RunningServer, path: str
) -> None:
    for fields in ({}, {"model": None}, {"model": ""}):
        body = answered(server, path, **fields)
        assert body.get("model", MODEL) == MODEL
    assert server.post(path, BODIES[path] | {"model": "other"}).status_code == 404
