"""What clients of vLLM, SGLang and llama.cpp send and read without asking, on every API."""

import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.server.prompt.prompts import render_chat
from penstock.server.protocol.chat import ChatCompletionRequest
from tests.support.chatting import QWEN, make_model
from tests.support.serving import MODEL, RunningServer

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
def server(demo_server: RunningServer) -> RunningServer:
    return demo_server


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


def test_members_that_vllm_always_sends_are_there_and_null(server: RunningServer) -> None:
    chat = answered(server, "/v1/chat/completions")
    choice = chat["choices"][0]
    message = {"reasoning", "reasoning_content"} & choice["message"].keys()
    assert [choice["message"][name] for name in message] == [None, None]
    assert all(chat[name] is None for name in ("prompt_logprobs", "prompt_token_ids"))
    assert choice["token_ids"] is choice["stop_reason"] is None
    choice = answered(server, "/v1/completions")["choices"][0]
    names = ("prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason")
    assert [choice[name] for name in names] == [None] * 4


def test_vllms_clients_read_the_answer_through_the_openai_client(server: RunningServer) -> None:
    options: Any = {"api_key": "x", "max_retries": 0, "_strict_response_validation": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", **options) as client:
        chat: Any = client.chat.completions.create(model="", messages=[USER], max_tokens=4)  # type: ignore[list-item]
        assert chat.choices[0].message.reasoning is None
        text: Any = client.completions.create(model="", prompt="Once", max_tokens=4)
        assert text.choices[0].prompt_logprobs is None
        card: Any = client.models.retrieve(MODEL)
        assert card.root and card.parent is None and card.permission[0]["allow_sampling"]


def ending(server: RunningServer, path: str, *, is_stream: bool, **fields: Any) -> Json:
    """The choice of a body, or of a stream's last chunk."""
    fields |= {"seed": 1}
    if not is_stream:
        choice: Json = answered(server, path, **fields)["choices"][0]
        return choice
    events = server.post(path, BODIES[path] | fields | {"stream": True}).text.split("\n\n")
    choices: list[Json] = json.loads(events[-3].removeprefix("data: "))["choices"]
    return choices[0]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stop_reason_is_what_ended_the_answer(
    server: RunningServer, path: str, is_stream: bool
) -> None:
    def how(**fields: Any) -> tuple[Any, ...]:
        choice = ending(server, path, is_stream=is_stream, **fields)
        return tuple(choice[name] for name in ("finish_reason", "stop_reason", "matched_stop"))

    assert how() == ("length", None, None)
    ids = answered(server, path, seed=1, return_token_ids=True)["choices"][0]["token_ids"]
    assert how(stop_token_ids=[ids[2]]) == ("stop", ids[2], ids[2])
    text = server.post("/detokenize", {"tokens": ids[2:3]}).json()["prompt"]
    assert how(stop=["never", text]) == ("stop", text, text)
    eos = server.post("/tokenize", {"prompt": "<|im_end|>"}).json()["tokens"][-1]
    own_end = {"max_tokens": 9, "logit_bias": {str(eos): 100}, "temperature": 0}
    assert how(**own_end) == ("stop", None, eos)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_returned_token_id_has_its_logprob(server: RunningServer, path: str) -> None:
    """The id that ends the answer and those of a stop string too."""
    ids = answered(server, path, seed=1, return_token_ids=True)["choices"][0]["token_ids"]
    stop = server.post("/detokenize", {"tokens": ids[1:3]}).json()["prompt"]
    logprobs = {"logprobs": True if "chat" in path else 0, "seed": 1, "return_token_ids": True}
    for end in ({"stop_token_ids": [ids[2]]}, {"stop": stop}):
        fields = BODIES[path] | logprobs | end
        choice = server.post(path, fields).json()["choices"][0]
        assert choice["token_ids"] == ids[:3]
        assert num_logprobs(choice) == 3
        events = server.post(path, fields | {"stream": True}).text.split("\n\n")[:-2]
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert sum(map(num_logprobs, chunks)) == 3


def num_logprobs(choice: Json) -> int:
    found = choice["logprobs"] or {}
    return len(found.get("tokens") or found.get("content") or ())


def test_a_synonym_may_stand_beside_an_equal_structured_outputs(server: RunningServer) -> None:
    """As guidance sends both; its grammars are in llguidance's notation."""
    grammar = '%llguidance {}\n\nstart: "xyz"'
    for name, key, value in (("guided_grammar", "grammar", grammar), ("regex", "regex", "xyz")):
        fields = {name: value, "structured_outputs": {key: value, "whitespace_pattern": None}}
        assert answered(server, "/v1/completions", **fields)["choices"][0]["text"] == "xyz"


def test_a_variable_that_the_template_does_not_know_is_reported_once() -> None:
    with contextlib.ExitStack() as stack:
        server = RunningServer("--scripted")
        stack.callback(server.stop)
        server.wait_until_ready()
        for _ in range(2):
            assert server.chat(chat_template_kwargs={"enable_thinking": True}).status_code == 200
            assert server.chat(vllm_xargs={"a": 1}).status_code == 200
        server.process.terminate()
        _, log = server.exit_code()
    assert log.count("'chat_template_kwargs.enable_thinking' in a request had no effect") == 1
    assert log.count("'vllm_xargs' in a request had no effect") == 1


def test_any_role_is_left_to_the_chat_template(server: RunningServer) -> None:
    for role in ("critic", "function"):
        messages = [USER, {"role": role, "name": "f", "content": "Yes."}]
        assert answered(server, "/v1/chat/completions", messages=messages)["choices"]


def test_documents_reach_a_template_that_knows_them(tmp_path: Path) -> None:
    template = "{% for d in documents %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"
    encoder = make_model(tmp_path, template).encoder
    fields = {"messages": [USER], "documents": [{"text": "a fact"}]}
    chat = ChatCompletionRequest.parse(json.dumps(fields).encode())
    assert render_chat(chat, encoder.chat_template())[0] == f"[a fact]{USER['content']}"


def test_prompt_logprobs_of_minus_one_are_the_most_that_are_served(server: RunningServer) -> None:
    chat = answered(server, "/v1/chat/completions", prompt_logprobs=-1)
    text = answered(server, "/v1/completions", prompt_logprobs=-1, prompt="Once upon a time")
    for positions in (chat["prompt_logprobs"], text["choices"][0]["prompt_logprobs"]):
        assert len(positions[1]) in (20, 21)


def test_a_bias_for_what_is_no_token_id_is_refused_by_its_key(server: RunningServer) -> None:
    for path in ("/v1/completions", "/v1/responses"):
        response = server.post(path, BODIES[path] | {"logit_bias": {"5": 1, "abc": 1}})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "logit_bias"
        assert "'abc'" in error["message"]


def test_a_response_of_the_same_request_id_takes_the_place_of_the_first(
    server: RunningServer,
) -> None:
    for text in ("a", "b"):
        answered(server, "/v1/responses", input=text, request_id="twice")
    items = server.get("/v1/responses/resp_twice/input_items").json()["data"]
    assert items[0]["content"][0]["text"] == "b"


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}}}


def test_a_client_of_functions_is_answered_with_a_function_call(server: RunningServer) -> None:
    fields = {"functions": [FUNCTION], "function_call": {"name": "f"}, "max_tokens": 60}
    choice = answered(server, "/v1/chat/completions", **fields)["choices"][0]
    call = choice["message"]["function_call"]
    assert call["name"] == "f" and isinstance(json.loads(call["arguments"]), dict)
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    body = BODIES["/v1/chat/completions"] | fields | {"stream": True, "temperature": 0}
    events = server.post("/v1/chat/completions", body).text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    calls = [c["delta"]["function_call"] for c in chunks if "function_call" in c["delta"]]
    assert [call["name"] for call in calls if "name" in call] == ["f"]
    assert isinstance(json.loads("".join(call["arguments"] for call in calls)), dict)
    assert chunks[-1]["finish_reason"] == "function_call"


def test_a_function_call_and_its_result_are_a_tool_call_to_the_template(tmp_path: Path) -> None:
    template = make_model(tmp_path, QWEN).encoder.chat_template()
    call = {"name": "f", "arguments": '{"a": 1}'}
    tool_call = {"id": "call_f", "type": "function", "function": call}
    older = [
        *(USER, {"role": "assistant", "content": None, "function_call": call}),
        {"role": "function", "name": "f", "content": "2"},
    ]
    newer = [
        *(USER, {"role": "assistant", "content": None, "tool_calls": [tool_call]}),
        {"role": "tool", "tool_call_id": "call_f", "name": "f", "content": "2"},
    ]
    texts = []
    for messages in (older, newer):
        body = json.dumps({"messages": messages}).encode()
        texts.append(render_chat(ChatCompletionRequest.parse(body), template)[0])
    assert texts[0] == texts[1] and "<tool_call>" in texts[0]
