"""Fields and routes of vLLM: those that are served, and those that are refused by name."""

import json
from typing import Any

import pytest

from tests.support.serving import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
WHO = [{"role": "user", "content": "Who are you?"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": WHO},
    COMPLETIONS: {"prompt": "Once"},
    RESPONSES: {"input": "Once"},
}


@pytest.fixture(scope="module")
def server(demo_server: RunningServer) -> RunningServer:
    return demo_server


def answer(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def refusal(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_minus_one_logprobs_are_the_most_that_are_served(server: RunningServer) -> None:
    fields: dict[str, Any] = {"messages": WHO, "max_tokens": 2, "temperature": 0, "logprobs": True}
    most, twenty = (answer(server, CHAT, top_logprobs=n, **fields) for n in (-1, 20))
    logprobs = most["choices"][0]["logprobs"]
    assert logprobs == twenty["choices"][0]["logprobs"]
    assert [len(token["top_logprobs"]) for token in logprobs["content"]] == [20, 20]
    story: dict[str, Any] = {"prompt": "Once", "max_tokens": 1, "temperature": 0, "echo": True}
    most, twenty = (answer(server, COMPLETIONS, logprobs=n, **story) for n in (-1, 20))
    assert most["choices"][0]["logprobs"] == twenty["choices"][0]["logprobs"]


def test_minus_one_top_logprobs_need_logprobs(server: RunningServer) -> None:
    assert refusal(server, CHAT, messages=WHO, top_logprobs=-1)["param"] == "top_logprobs"
    assert refusal(server, CHAT, messages=WHO, logprobs=True, top_logprobs=-2)


def test_every_wrong_key_of_logit_bias_is_named(server: RunningServer) -> None:
    bias = {"5": 1, "abc": 1, "6.5": 1, "": 2}
    error = refusal(server, COMPLETIONS, prompt="Once", logit_bias=bias)
    assert error["message"] == (
        "logit_bias has the keys 'abc', '6.5', ''; its keys must be token ids"
    )
    many = {str(10**6 + i): 1 for i in range(20)} | {"5": 1}
    error = refusal(server, COMPLETIONS, prompt="Once", logit_bias=many)
    assert "1000000, 1000001, " in error["message"] and "and 4 more; this" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value", "instead"),
    [
        (COMPLETIONS, "logprob_token_ids", [1], "top_logprobs"),
        (CHAT, "logprob_token_ids", [1], "top_logprobs"),
        (COMPLETIONS, "use_beam_search", True, "best_of"),
        (CHAT, "kv_transfer_params", {"do_remote_prefill": True}, "itself"),
        (RESPONSES, "background", True, "keep the connection open or stream"),
    ],
)
def test_a_refused_field_comes_with_what_to_use_instead(
    server: RunningServer, path: str, field: str, value: Any, instead: str
) -> None:
    error = refusal(server, path, **LEAST[path], **{field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert instead in error["message"]


def test_the_last_chunk_of_a_chat_ends_it_without_content_as_at_openai(
    server: RunningServer,
) -> None:
    events = server.post(CHAT, {"messages": WHO, "max_tokens": 4, "stream": True}).text
    *_, end, done = events.rstrip().split("\n\n")
    assert done == "data: [DONE]"
    last = json.loads(end.removeprefix("data: "))["choices"][0]
    assert last["delta"] == {} and last["finish_reason"] == "length"
