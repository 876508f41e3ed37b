"""Anthropic's Python client, against `/v1/messages`.

What it requires that others do not: errors of its own shape (`{"type": "error", "error": ...}`),
which together with the status determine its exceptions; named events in pairs (`message_start`,
`content_block_start`, deltas, `content_block_stop`, `message_delta`, `message_stop`), from which
its stream helper builds the message; the key in `x-api-key`; and that `beta=true`, in the query of
its tool runner, changes nothing. `parse` removes the bounds from a schema before sending it.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

MODEL = "penstock-demo"
MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
GREEDY = {"temperature": 0}  # the newest version has no argument for it
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    is_robot: bool


@pytest.fixture(scope="module")
def client(demo: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=demo, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def async_client(demo: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=demo, api_key="none", max_retries=0)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_has_text_a_stop_reason_and_usage(client: Anthropic) -> None:
    message = client.messages.create(
        model=MODEL, max_tokens=200, messages=MESSAGES, extra_body=GREEDY
    )
    assert "Penstock" in text_of(message) and message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


def test_max_tokens_and_a_stop_sequence_are_stop_reasons(client: Anthropic) -> None:
    short = client.messages.create(model=MODEL, max_tokens=2, messages=MESSAGES)
    assert short.stop_reason == "max_tokens"
    cut = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=MESSAGES,
        extra_body=GREEDY,
        stop_sequences=["Penstock"],
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "Penstock")


def test_a_system_prompt_and_text_blocks_are_accepted(client: Anthropic) -> None:
    block: Any = {"type": "text", "text": "Who are you?", "cache_control": {"type": "ephemeral"}}
    message = client.messages.create(
        model=MODEL,
        max_tokens=32,
        system=[{"type": "text", "text": "Be short."}],
        messages=[{"role": "user", "content": [block]}],
        metadata={"user_id": "u"},
    )
    assert text_of(message)


def test_a_prefilled_message_is_continued(client: Anthropic) -> None:
    message = client.messages.create(
        model=MODEL,
        max_tokens=32,
        extra_body=GREEDY,
        messages=[*MESSAGES, {"role": "assistant", "content": "I am"}],
    )
    assert not text_of(message).startswith("I am")


def test_a_raw_stream_has_paired_events(client: Anthropic) -> None:
    events = list(
        client.messages.create(model=MODEL, max_tokens=200, messages=MESSAGES, stream=True)
    )
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_stream_helper_builds_the_text_and_the_message(client: Anthropic) -> None:
    plain = client.messages.create(
        model=MODEL, max_tokens=200, messages=MESSAGES, extra_body=GREEDY
    )
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=MESSAGES, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(plain)
    assert final.usage.output_tokens == plain.usage.output_tokens


def test_a_tool_is_used_and_its_result_accepted(client: Anthropic) -> None:
    first = client.messages.create(
        model=MODEL, max_tokens=200, messages=MESSAGES, tools=[WEATHER], tool_choice=ONE_CALL
    )
    (use,) = (block for block in first.content if block.type == "tool_use")
    assert first.stop_reason == "tool_use" and set(use.input) == {"city"}
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    second = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": first.content},  # the client's own objects
            {"role": "user", "content": [result]},
        ],
        tools=[WEATHER],
    )
    assert second.role == "assistant"


def test_the_stream_helper_builds_a_tool_use(client: Anthropic) -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice={
            "type": "tool",
            "name": "get_weather",
            "disable_parallel_tool_use": True,
        },
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert "input_json" in kinds
    (use,) = (block for block in message.content if block.type == "tool_use")
    assert isinstance(use.input, dict) and isinstance(use.input["city"], str)


def test_the_tool_runner_calls_the_function_and_continues(client: Anthropic) -> None:
    cities: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        messages=MESSAGES,
        tools=[get_weather],
        tool_choice=ONE_CALL,
        extra_body=GREEDY,
        max_iterations=2,
    )
    messages = []
    for message in runner:
        messages.append(message)
        # The demo model calls no tool by itself: the first turn forces a call, the next does not.
        runner.set_messages_params(lambda params: {**params, "tool_choice": {"type": "auto"}})
    assert len(messages) == 2 and len(cities) == 1
    assert text_of(messages[-1])


def test_parse_builds_a_pydantic_object(client: Anthropic) -> None:
    message = client.messages.parse(
        model=MODEL, max_tokens=100, messages=MESSAGES, output_format=Person, extra_body=GREEDY
    )
    assert isinstance(message.parsed_output, Person)


def test_counted_tokens_equal_the_usage_of_a_message(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    message = client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES)
    assert counted.input_tokens == message.usage.input_tokens > 0


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}]
)
def test_thinking_is_accepted_by_a_model_without_reasoning(
    client: Anthropic, thinking: Any
) -> None:
    message = client.messages.create(
        model=MODEL, max_tokens=1500, messages=MESSAGES, thinking=thinking, extra_body=GREEDY
    )
    assert "Penstock" in text_of(message)


async def test_the_async_client_streams_concurrently(async_client: AsyncAnthropic) -> None:
    async def text(i: int) -> str:
        async with async_client.messages.stream(
            model=MODEL, max_tokens=16, messages=[{"role": "user", "content": f"{i} + 1?"}]
        ) as stream:
            return "".join([delta async for delta in stream.text_stream])

    assert all(await asyncio.gather(*map(text, range(8))))


def test_an_unknown_model_is_a_not_found_error(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="claude-opus-4", max_tokens=4, messages=MESSAGES)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"


def test_an_invalid_field_is_a_bad_request_error_that_names_it(client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(
            model=MODEL, max_tokens=4, messages=MESSAGES, extra_body={"temperature": -1}
        )


def test_the_key_is_required(guarded: str) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=guarded, api_key="wrong", max_retries=0).messages.create(
            model=MODEL, max_tokens=4, messages=MESSAGES
        )
    right = Anthropic(base_url=guarded, api_key="secret", max_retries=0)
    assert right.messages.create(model=MODEL, max_tokens=4, messages=MESSAGES).id
    bearer = Anthropic(base_url=guarded, auth_token="secret", max_retries=0)
    assert bearer.messages.create(model=MODEL, max_tokens=4, messages=MESSAGES).id


def test_the_models_are_listed(client: Anthropic) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
