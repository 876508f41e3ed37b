"""huggingface_hub's InferenceClient and AsyncInferenceClient.

What it does that others do not: it rewrites a `json_schema` to `json_object` with the schema as
`value`; its class for a tool choice has no `type`; without a model it sends the name `dummy`, so
that a server has to be started with it; it builds objects of every answer and chunk, in which
`choices` must be a list; its errors are made of the status and the member `error` of the body.
`text_generation` and `feature_extraction` post to the URL itself in a form that only Hugging Face's
own servers know.
"""

import asyncio
import json
from typing import Any

import pytest
from huggingface_hub import (
    AsyncInferenceClient,
    ChatCompletionInputFunctionName,
    ChatCompletionInputTool,
    ChatCompletionInputToolChoiceClass,
    InferenceClient,
)
from huggingface_hub.errors import BadRequestError, HfHubHTTPError

MODEL = "penstock-demo"
MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
NAMED = ChatCompletionInputToolChoiceClass(ChatCompletionInputFunctionName("get_weather"))
OPTIONS: Any = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(demo: str) -> Any:
    return InferenceClient(base_url=f"{demo}/v1", api_key="none")


def test_an_answer_has_text_a_finish_reason_and_usage(client: Any) -> None:
    answer = client.chat_completion(MESSAGES, **OPTIONS)
    assert "Penstock" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0
    like_openai = client.chat.completions.create(messages=MESSAGES, **OPTIONS)
    assert like_openai.choices[0].message == answer.choices[0].message


def test_a_stream_adds_up_to_the_unstreamed_text_and_has_usage(client: Any) -> None:
    plain = client.chat_completion(MESSAGES, **OPTIONS)
    stream = client.chat_completion(
        MESSAGES, stream=True, stream_options={"include_usage": True}, **OPTIONS
    )
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == plain.choices[0].message.content and len(chunks) > 2
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert not last.choices
    assert last.usage.completion_tokens == plain.usage.completion_tokens


async def test_the_async_client_answers_and_streams(demo: str) -> None:
    async with AsyncInferenceClient(base_url=f"{demo}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(client.chat_completion(MESSAGES, **OPTIONS) for _ in range(4))
        )
        stream = await client.chat_completion(MESSAGES, stream=True, **OPTIONS)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert {answer.choices[0].message.content for answer in answers} == {text}


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        {"type": "json_object", "value": PERSON},
        {"type": "json", "value": PERSON},
    ],
    ids=["json_schema", "json_object", "json"],
)
def test_every_form_of_a_schema_is_followed(client: Any, response_format: Any) -> None:
    answer = client.chat_completion(MESSAGES, response_format=response_format, **OPTIONS)
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120


def test_the_provider_openai_sends_a_schema_unchanged(demo: str) -> None:
    client: Any = InferenceClient(base_url=f"{demo}/v1", api_key="none", provider="openai")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = client.chat_completion(MESSAGES, response_format=wanted, **OPTIONS)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}


def test_a_json_object_and_a_regex_are_followed(client: Any) -> None:
    anything: Any = {"type": "json_object"}
    answer = client.chat_completion(MESSAGES, response_format=anything, **OPTIONS)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    letters: Any = {"type": "regex", "value": "[ab]{3}"}
    answer = client.chat_completion(MESSAGES, response_format=letters, **OPTIONS)
    assert answer.choices[0].message.content.strip("ab") == ""


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_accepted(client: Any, choice: Any, stream: bool) -> None:
    tools = [ChatCompletionInputTool.parse_obj_as_instance(WEATHER)]
    answer = client.chat_completion(
        MESSAGES, tools=tools, tool_choice=choice, stream=stream, **OPTIONS
    )
    if stream:
        pieces = [c.choices[0].delta.tool_calls for c in answer if c.choices[0].delta.tool_calls]
        call_id, name = pieces[0][0].id, pieces[0][0].function.name
        arguments = "".join(piece[0].function.arguments for piece in pieces)
    else:
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        call_id, name, arguments = call.id, call.function.name, call.function.arguments
    assert name == "get_weather" and set(json.loads(arguments)) == {"city"}
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
    ]
    second = client.chat_completion(messages, tools=tools, max_tokens=64, **OPTIONS)
    assert second.choices[0].message.role == "assistant"


def test_logprobs_and_fields_of_other_servers_pass_through(client: Any) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
    answer = client.chat_completion(
        MESSAGES, logprobs=True, top_logprobs=2, seed=1, extra_body=extra, **OPTIONS
    )
    assert answer.choices[0].message.content in ("yes", "no")
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@pytest.mark.parametrize("path", ["", "/v1", "/v1/chat/completions"])
def test_without_a_model_the_server_answers_if_it_has_the_name_dummy(
    demo: str, scripted: str, path: str
) -> None:
    answer: Any = InferenceClient(demo + path).chat_completion(MESSAGES, temperature=0)
    assert "Penstock" in answer.choices[0].message.content
    with pytest.raises(HfHubHTTPError, match=f"'dummy' does not exist.*'{MODEL}'") as caught:
        InferenceClient(scripted + path).chat_completion(MESSAGES, temperature=0)
    assert caught.value.response.status_code == 404


def test_an_error_has_the_servers_own_message(client: Any, guarded: str) -> None:
    long: Any = [{"role": "user", "content": "word " * 4000}]
    with pytest.raises(BadRequestError, match="context"):
        client.chat_completion(long, **OPTIONS)
    with pytest.raises(HfHubHTTPError, match="key") as caught:
        InferenceClient(guarded, api_key="wrong").chat_completion(MESSAGES, **OPTIONS)
    assert caught.value.response.status_code == 401
    known = InferenceClient(guarded, api_key="secret").chat_completion(
        MESSAGES, max_tokens=4, **OPTIONS
    )
    assert known.usage.completion_tokens == 4
