"""OpenAI's Python client, which validates every response against its own types here.

What it requires that others do not: with `_strict_response_validation`, every field that its types
declare required; in `.stream()`, ids and names of tool calls once only, since it concatenates them;
in `.parse()`, text that follows the schema, since it builds the object from it; in
`responses.stream()`, that every item is opened before its deltas and closed before the end.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

MODEL = "penstock-demo"
MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    kind: Literal["human", "robot"]


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=12)


WEATHER: Any = pydantic_function_tool(GetWeather, name="get_weather")
WEATHER_OF_RESPONSES: Any = {"type": "function", "strict": True} | {
    key: WEATHER["function"][key] for key in ("name", "description", "parameters")
}


@pytest.fixture(scope="module")
def client(demo: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{demo}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def lenient(demo: str) -> Iterator[OpenAI]:
    """Without strict validation, as users have it: the client's own types allow neither
    `finish_reason: null` in streamed completions nor the base64 embeddings that it requests."""
    with OpenAI(base_url=f"{demo}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def async_client(demo: str) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{demo}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


def test_the_models_are_listed_and_one_is_retrieved(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).owned_by == "penstock"


def test_a_chat_completion_has_text_a_finish_reason_and_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert "Penstock" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream_adds_up_to_the_unstreamed_text_and_ends_with_usage(client: OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage and plain.usage
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_the_stream_helper_gives_deltas_and_the_whole_text(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert len(deltas) > 1 and "".join(deltas) == final.choices[0].message.content
    assert events[-1].type in ("content.done", "chunk")


def test_parse_builds_a_pydantic_object(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_the_stream_helper_builds_a_pydantic_object(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Person
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_parse_builds_the_arguments_of_a_tool(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="required"
    )
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert calls and isinstance(calls[0].function.parsed_arguments, GetWeather)


def test_parse_accepts_tools_and_a_format_together(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], response_format=Person, temperature=0
    )
    message = answer.choices[0].message
    assert message.tool_calls or isinstance(message.parsed, Person)
    assert not (message.tool_calls and message.content)


def test_the_stream_helper_joins_the_arguments_of_a_tool(client: OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice=choice
    ) as stream:
        kinds = {event.type for event in stream}
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert calls and isinstance(calls[0].function.parsed_arguments, GetWeather)


def test_a_tool_loop_ends_with_text(client: OpenAI) -> None:
    messages = list(MESSAGES)
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="required"
    )
    message = first.choices[0].message
    assert message.tool_calls
    messages.append(message)  # the client's own object, not a dict
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], max_tokens=64
    )
    assert second.choices[0].message.role == "assistant"


def test_json_mode_gives_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write JSON for a person named Ada, aged 36."}],
        response_format={"type": "json_object"},
        temperature=0,
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{") and answer.choices[0].finish_reason == "stop"


def test_several_choices_with_logprobs_pass_the_validation(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, max_tokens=5, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs and choice.logprobs.content
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)


def test_a_raw_response_has_headers_and_parses(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine" and raw.request_id == "mine"
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert raw.parse().choices[0].message.role == "assistant"


def test_a_streamed_response_is_read_line_by_line(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_a_text_completion_streams_and_accepts_vllms_fields(lenient: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8}
    options["extra_body"] = {"top_k": 1, "min_tokens": 8}
    plain = lenient.completions.create(**options)
    stream = lenient.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == plain.choices[0].text and plain.usage and plain.usage.completion_tokens == 8


def test_a_response_has_text_and_continues_another(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="My name is Ada.", temperature=0)
    assert first.output_text and first.status == "completed"
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert "Ada" in second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_the_responses_stream_helper_gives_every_event(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Who are you?", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text


def test_responses_parse_builds_a_pydantic_object(client: OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input="Somebody.", text_format=Person)
    assert isinstance(answer.output_parsed, Person)


def test_the_responses_stream_helper_builds_a_pydantic_object(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Somebody.", text_format=Person) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Person)


def test_a_response_with_a_tool_call_accepts_its_result(client: OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input="Weather?", tools=[WEATHER_OF_RESPONSES], tool_choice="required"
    )
    (call,) = (item for item in first.output if item.type == "function_call")
    GetWeather.model_validate_json(call.arguments)
    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        max_output_tokens=64,
    )
    assert second.output


async def test_the_async_client_streams_concurrently(async_client: AsyncOpenAI) -> None:
    async def text(i: int) -> str:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=i, max_tokens=16, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert all(await asyncio.gather(*map(text, range(16))))


async def test_the_async_stream_helpers_give_the_whole_output(async_client: AsyncOpenAI) -> None:
    async with async_client.chat.completions.stream(model=MODEL, messages=MESSAGES) as chat:
        assert (await chat.get_final_completion()).choices[0].message.content
    async with async_client.responses.stream(model=MODEL, input="Who are you?") as response:
        assert (await response.get_final_response()).output_text


async def test_the_server_works_after_a_cancelled_task(async_client: AsyncOpenAI) -> None:
    task = asyncio.create_task(
        async_client.completions.create(model=MODEL, prompt="Once", max_tokens=1000)
    )
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await async_client.models.list()).data


def test_embeddings_come_as_base64_and_as_floats(lenient: OpenAI) -> None:
    by_default = lenient.embeddings.create(model=MODEL, input=["one", "two"])  # in base64
    floats = lenient.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert [item.index for item in by_default.data] == [0, 1]
    assert by_default.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-6)


def test_an_unknown_model_is_a_not_found_error(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_an_invalid_field_is_a_bad_request_error_that_names_it(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long_has_its_error_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_a_wrong_key_is_an_authentication_error(guarded: str) -> None:
    wrong = OpenAI(base_url=f"{guarded}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        wrong.models.list()
    assert caught.value.code == "invalid_api_key"
    assert OpenAI(base_url=f"{guarded}/v1", api_key="secret").models.list().data


def test_a_short_timeout_is_a_timeout_error(scripted: str) -> None:
    client = OpenAI(base_url=f"{scripted}/v1", api_key="x", max_retries=0, timeout=0.05)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model=MODEL, prompt="Once", max_tokens=1900, extra_body={"ignore_eos": True}
        )


def test_the_client_works_after_closing_a_stream_early(lenient: OpenAI) -> None:
    stream = lenient.completions.create(model=MODEL, prompt="Once", max_tokens=1000, stream=True)
    next(iter(stream))
    stream.close()
    assert lenient.models.list().data
