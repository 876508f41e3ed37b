"""Fields and headers that nobody knows: listed in a header, or refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import RunningServer, running_server

HEADER = "x-ignored-fields"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
}


@pytest.fixture(scope="module")
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with running_server("--scripted-step-ms", "1", "--strict-fields") as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_header_lists_the_fields_that_have_no_effect(
    server: RunningServer, path: str, stream: bool
) -> None:
    fields = {**BODIES[path], "stream": stream}
    assert HEADER not in server.post(path, {**fields, "metadata": {}, "seed": 3}).headers
    answer = server.post(path, {**fields, "tempratur": 0, "vllm_xargs": {"a": 1}, "best": None})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "tempratur, vllm_xargs"


def test_a_chat_that_was_to_be_stored_says_that_it_is_not(server: RunningServer) -> None:
    chat = "/v1/chat/completions"
    assert server.post(chat, {**CHAT, "store": True}).headers[HEADER] == "store"
    assert HEADER not in server.post(chat, {**CHAT, "store": False}).headers


def test_the_header_is_short_and_plain_whatever_fields_are_called(server: RunningServer) -> None:
    odd: dict[str, Any] = {f"a{i}": 1 for i in range(5000)}
    answer = server.post(
        "/v1/completions", {"b\r\nx-y: \u1234": 1, **BODIES["/v1/completions"], **odd}
    )
    assert answer.headers[HEADER].startswith("b??x-y???, a0, a1, ")
    assert answer.headers[HEADER].endswith(", and 4985 more")


@pytest.mark.parametrize(
    ("path", "misspelt", "meant"),
    [
        ("/v1/completions", "tempratur", "temperature"),
        ("/v1/chat/completions", "guided_jsn", "guided_json"),
        ("/v1/responses", "max_ouput_tokens", "max_output_tokens"),
        ("/v1/messages", "repetition_penalt", "repetition_penalty"),
    ],
)
def test_strict_fields_refuses_them_and_names_the_field_that_is_near(
    strict: RunningServer, path: str, misspelt: str, meant: str
) -> None:
    answer = strict.post(path, {**BODIES[path], misspelt: 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"'{misspelt}' is no field" in error["message"]
    assert f"did you mean '{meant}'?" in error["message"]
    assert "did you mean" not in strict.post(path, {**BODIES[path], "zzz": 1}).text
    assert strict.post(path, {**BODIES[path], "metadata": {"a": "b"}}).status_code == 200


def test_strict_fields_holds_for_embeddings_too(strict: RunningServer) -> None:
    answer = strict.post("/v1/embeddings", {"input": "Hi", "dimension": 3})
    assert answer.status_code == 400 and "did you mean 'dimensions'?" in answer.text


@pytest.mark.parametrize("name", ["x-slo-itl-ms", "x-slo-ttft", "x-slo-" + "a" * 200])
def test_a_header_for_targets_that_is_not_known_is_refused(
    server: RunningServer, name: str
) -> None:
    answer = server.post("/v1/completions", BODIES["/v1/completions"], headers={name: "5"})
    assert answer.status_code == 400
    assert "use x-slo-ttft-ms or x-slo-tpot-ms" in answer.json()["error"]["message"]
