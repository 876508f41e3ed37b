"""Calls that a grammar enforces, with the demo model and with random weights."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.chatting import ADD, WEATHER
from tests.support.serving import MODEL, RunningServer

TOOLS = [WEATHER, ADD]
PING = {"type": "function", "function": {"name": "ping"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USER = {"role": "user", "content": "How warm is it in Paris?"}


@pytest.fixture(scope="module", params=["demo", "random"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    server: RunningServer = request.getfixturevalue(f"{request.param}_server")
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(client: Any, **fields: Any) -> Any:
    options = {"model": MODEL, "messages": [USER], "max_tokens": 1500, "tools": TOOLS} | fields
    return client.chat.completions.create(**options)


def check(call: Any) -> None:
    """The arguments are valid JSON and follow the schema of the function."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        assert arguments.keys() == {"a", "b"}
        assert all(isinstance(v, int) and 0 <= v < 100 for v in arguments.values())
    else:
        assert call.function.name == "get_weather"
        assert arguments.keys() == {"city", "unit"}
        assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 12
        assert arguments["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize("parallel", [True, False])
def test_required_always_gives_calls_that_validate(client: Any, parallel: bool) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=parallel, n=8, seed=5)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        calls = choice.message.tool_calls
        assert calls and (parallel or len(calls) == 1)
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            check(call)


def test_only_the_named_function_is_called(client: Any) -> None:
    for choice in ask(client, tool_choice=NAMED, n=8, seed=6).choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        check(call)


@pytest.mark.parametrize("tool_choice", ["required", NAMED], ids=["required", "named"])
def test_a_stream_of_enforced_calls_joins_to_the_plain_answer(
    client: Any, tool_choice: Any
) -> None:
    fields = {"tool_choice": tool_choice, "seed": 7, "max_tokens": 1500}
    (plain,) = ask(client, **fields).choices
    with client.chat.completions.stream(
        model=MODEL,
        messages=[USER],
        tools=TOOLS,
        stream_options={"include_usage": True},
        **fields,
    ) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices
    assert streamed.finish_reason == "tool_calls"
    assert not streamed.message.content
    assert plain.message.tool_calls and streamed.message.tool_calls
    expected = [
        c.function.model_dump(exclude={"parsed_arguments"}) for c in plain.message.tool_calls
    ]
    assert expected == [
        c.function.model_dump(exclude={"parsed_arguments"}) for c in streamed.message.tool_calls
    ]
    assert final.usage and final.usage.completion_tokens > 0


def test_enforced_calls_come_with_logprobs_of_all_their_tokens(client: Any) -> None:
    answer = ask(client, tool_choice=NAMED, logprobs=True, top_logprobs=2, seed=8)
    (choice,) = answer.choices
    assert choice.logprobs and choice.logprobs.content
    text = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert choice.message.tool_calls
    assert text.decode() == choice.message.tool_calls[0].function.arguments


def test_a_function_without_parameters_gets_an_empty_object(client: Any) -> None:
    answer = ask(client, tools=[PING], tool_choice="required", seed=9, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "ping" and json.loads(call.function.arguments) == {}


def test_arguments_cut_by_max_tokens_end_with_length(client: Any) -> None:
    (choice,) = ask(client, tool_choice=NAMED, max_tokens=3).choices
    assert choice.finish_reason == "length"


def test_with_auto_the_answer_is_text_or_calls(client: Any) -> None:
    (choice,) = ask(client, max_tokens=40).choices
    assert choice.message.content is not None or choice.message.tool_calls


def test_a_schema_that_cannot_be_enforced_is_refused(client: Any) -> None:
    bad = {"type": "object", "properties": {"x": {"type": "no such type"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    with pytest.raises(openai.BadRequestError):
        ask(client, tools=[tool], tool_choice="required")


def test_the_round_trip_of_a_call_and_its_result_is_answered(client: Any) -> None:
    first = ask(client, tool_choice=NAMED, seed=3).choices[0].message
    assert first.tool_calls
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "21 degrees"}
    messages = [USER, first.model_dump(exclude_none=True), result]
    assert ask(client, messages=messages, tool_choice="none", max_tokens=8).choices
