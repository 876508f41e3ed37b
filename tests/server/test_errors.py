"""Every error of every route is OpenAI's object, with the right status and a message."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.serving import MAX_MODEL_LEN, MODEL, RunningServer, running_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--max-body-bytes", "200000") as running:
        yield running


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


BAD_FIELDS = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": True}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 7}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"stop_token_ids": [999999]}, "stop_token_ids"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"priority": 2**40}, "priority"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ({"num_speculative_tokens": "4"}, "num_speculative_tokens"),
    ({"priority": -(10**400)}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"priority": "1_000"}, "priority"),
    ({"priority": "\u0663"}, "priority"),
    ({"seed": "x"}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [999999]}, "prompt"),
    ({"prompt": [-5]}, "prompt[0]"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": "a\0b"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_with_the_fields_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    error = error_of(server.complete(**fields), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.partition("[")[0] in error["message"]


# As in OpenAI's API.
CODES = [
    ({"model": 5}, "invalid_type"),
    ({"temperature": 3}, "decimal_above_max_value"),
    ({"top_p": -1}, "decimal_below_min_value"),
    ({"n": 0}, "integer_below_min_value"),
    ({"n": 129}, "integer_above_max_value"),
    ({"seed": 2**63}, "integer_above_max_value"),
    ({"seed": -(2**63) - 1}, "integer_below_min_value"),
    ({"stop": ["a"] * 17}, "array_above_max_length"),
    ({"stop": ""}, "empty_string"),
    ({"stop": "a" * 1025}, "string_above_max_length"),
    ({"allowed_token_ids": []}, "empty_array"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "object_above_max_properties"),
    ({"request_id": " "}, "invalid_value"),
]


@pytest.mark.parametrize(("fields", "code"), CODES, ids=lambda value: str(value)[:40])
def test_the_code_of_an_error_is_openais(
    server: RunningServer, fields: dict[str, Any], code: str
) -> None:
    error = error_of(server.complete(**fields), 400)
    assert (error["param"], error["code"]) == (next(iter(fields)), code)


def test_a_missing_field_has_a_code_of_its_own(server: RunningServer) -> None:
    error = error_of(server.post(CHAT, {"model": MODEL}), 400)
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


BAD_MESSAGES = [
    ([], "messages"),
    ("hello", "messages"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([{"role": 5, "content": "x"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": "\0"}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES, ids=lambda value: str(value)[:40])
def test_a_wrong_message_is_refused_with_its_place(
    server: RunningServer, messages: Any, param: str
) -> None:
    assert error_of(server.chat(messages=messages), 400)["param"] == param


UNSUPPORTED = [
    (COMPLETIONS, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (COMPLETIONS, {"functions": [{"name": "f"}]}),
    (CHAT, {"modalities": ["audio"]}),
    (CHAT, {"web_search_options": {}}),
    (COMPLETIONS, {"suffix": "end"}),
    (COMPLETIONS, {"use_beam_search": True}),
]


@pytest.mark.parametrize(("path", "fields"), UNSUPPORTED, ids=str)
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    send = server.chat if path == CHAT else server.complete
    error = error_of(send(**fields), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(fields)))


def test_an_image_is_refused_by_the_name_of_its_type(server: RunningServer) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    error = error_of(server.chat(messages=[{"role": "user", "content": [part]}]), 400)
    assert error["code"] == "unsupported_parameter" and "image_url" in error["message"]


def test_neutral_values_and_unknown_fields_are_accepted(server: RunningServer) -> None:
    neutral = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": None,
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "something_new": {"x": [1]},
        "stop": None,
        "logprobs": False,
        "n": 1,
    }
    assert server.chat(**neutral).status_code == 200
    extra: dict[str, Any] = {"echo": False, "suffix": None, "best_of": 1, "top_k": -1, "stop": []}
    assert server.complete(**extra).status_code == 200


def test_text_parts_and_every_role_are_accepted(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    roles = ("system", "developer", "user", "assistant", "tool")
    messages = [{"role": role, "content": parts} for role in roles]
    assert server.chat(messages=messages).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_unknown_model_is_not_found(server: RunningServer, path: str) -> None:
    send = server.chat if path == CHAT else server.complete
    error = error_of(send(model="gpt-5"), 404)
    assert error["code"] == "model_not_found" and MODEL in error["message"]
    error_of(server.get("/v1/models/gpt-5"), 404)


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(server: RunningServer) -> None:
    for fields in ({"prompt": [5] * MAX_MODEL_LEN}, {"prompt": [5] * 100, "max_tokens": 59_901}):
        error = error_of(server.complete(**fields), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in error["message"]
        assert str(len(fields["prompt"])) in error["message"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"[]",
        b"null",
        b'{"model": "m", ',
        b"\xff\xfe\x00",
        b'{"model": "m\x00"}',
        b'{"model": "penstock-demo", "prompt": "\\ud800"}',
        b'{"model": "penstock-demo", "prompt": "x", "temperature": NaN}',
        b'{"model": "penstock-demo", "prompt": "x", "temperature": 1e999}',
        b'{"model": "penstock-demo", "prompt": "x", "priority": NaN}',
        b'{"model": "penstock-demo", "prompt": "x", "priority": 1e309}',
        b'{"model": "penstock-demo", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "penstock-demo", "prompt": "x", "y": ' + b"[" * 50_000 + b"}",
        b'{"model": "penstock-demo", "prompt": [' + b'"a",1,' * 5000 + b"2]}",
    ],
    ids=lambda body: repr(body[:40]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_invalid_body_is_a_bad_request(server: RunningServer, path: str, body: bytes) -> None:
    error_of(server.request("POST", path, content=body), 400)


def test_a_body_that_is_too_large_is_refused_with_and_without_a_length(
    server: RunningServer,
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * 300_000}).encode()
    error_of(server.request("POST", COMPLETIONS, content=body), 413)
    chunks = (body[i : i + 50_000] for i in range(0, len(body), 50_000))
    error_of(server.request("POST", COMPLETIONS, content=chunks), 413)


def test_an_unknown_path_and_a_wrong_method_have_the_same_format(server: RunningServer) -> None:
    assert error_of(server.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert error_of(server.get("/nothing"), 404)["code"] == "unknown_url"
    response = server.get(COMPLETIONS)
    assert error_of(response, 405)["code"] == "method_not_supported"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/v1/chat/completions/chatcmpl-1", "chats are not stored here"),
        ("DELETE", "/v1/chat/completions/chatcmpl-1", "chats are not stored here"),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages", "chats are not stored here"),
        ("POST", "/v1/messages/batches", "takes no batches of messages"),
        ("GET", "/v1/messages/batches/b1/results", "takes no batches of messages"),
        ("POST", "/v1/responses/compact", "does not compact conversations"),
        ("GET", "/v1/nothing", "GET /docs lists what this server serves"),
        ("GET", "/nothing", "the API is under /v1"),
    ],
)
def test_a_path_that_is_not_served_is_a_404_that_says_what_is(
    server: RunningServer, method: str, path: str, words: str
) -> None:
    response = httpx.request(method, server.url + path, json={} if method == "POST" else None)
    error = response.json()["error"]
    assert response.status_code == 404 and words in error["message"], response.text
    assert "allow" not in response.headers


def test_a_key_is_required_on_every_route_except_health() -> None:
    with running_server("--api-key", "secret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            error = error_of(server.get("/v1/models", headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        accepted = server.get("/v1/models", headers={"Authorization": "Bearer secret"})
        assert accepted.status_code == 200
        assert server.get("/health").status_code == server.get("/ready").status_code == 200


def test_more_answers_than_the_server_ever_accepts_are_not_worth_a_retry(
    server: RunningServer,
) -> None:
    for fields in ({"prompt": ["a"] * 1_300}, {"prompt": ["a"] * 26, "n": 50}):
        response = server.complete(**fields)
        message = error_of(response, 400)["message"]
        assert "1300 answers" in message and "at most 1280" in message
        assert response.headers["x-should-retry"] == "false"


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    with running_server("--max-num-seqs", "1", "--max-num-queued-reqs", "1") as server:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 50_000, "stream": True}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body | {"n": 2}) as hog:
            assert hog.status_code == 200
            response = server.complete()
            error = error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert int(response.headers["retry-after"]) >= 1
            assert error_of(server.complete(prompt=["a", "b"]), 429)
        server.wait_until_idle()
