"""LiteLLM, with its providers `openai/` and `hosted_vllm/`.

What it does that others do not: its `text_completion` sends a prompt as a list of one; it requests
usage in a stream only if told to, and otherwise counts tokens itself; it maps errors to its own
classes by the status and by words in the message ("context length", "maximum").
"""

import asyncio
import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel, Field

MODEL = "penstock-demo"
MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
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
providers = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def options(demo: str) -> dict[str, Any]:
    return {"api_base": f"{demo}/v1", "api_key": "none", "temperature": 0, "num_retries": 0}


@providers
def test_a_completion_has_text_and_usage(options: dict[str, Any], provider: str) -> None:
    answer: Any = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, **options)
    assert "Penstock" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0


@providers
def test_a_stream_adds_up_to_the_unstreamed_text_and_has_usage(
    options: dict[str, Any], provider: str
) -> None:
    model = f"{provider}/{MODEL}"
    plain: Any = litellm.completion(model=model, messages=MESSAGES, **options)
    stream: Any = litellm.completion(
        model=model,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    built: Any = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == text
    assert built.usage.prompt_tokens == plain.usage.prompt_tokens


async def test_acompletion_answers_and_streams(options: dict[str, Any]) -> None:
    model = f"hosted_vllm/{MODEL}"
    answers: Any = await asyncio.gather(
        *(litellm.acompletion(model=model, messages=MESSAGES, **options) for _ in range(4))
    )
    stream: Any = await litellm.acompletion(model=model, messages=MESSAGES, stream=True, **options)
    text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert {answer.choices[0].message.content for answer in answers} == {text}


@providers
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_accepted(
    options: dict[str, Any], provider: str, stream: bool
) -> None:
    model = f"{provider}/{MODEL}"
    request: dict[str, Any] = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
    answer: Any = litellm.completion(model=model, stream=stream, **request, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=MESSAGES)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in message.tool_calls:
        assert set(json.loads(call.function.arguments)) == {"city"}
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    messages = [*MESSAGES, message.model_dump(), *results]
    second: Any = litellm.completion(
        model=model, messages=messages, tools=[WEATHER], max_tokens=64, **options
    )
    assert second.choices[0].message.role == "assistant"


@providers
def test_a_pydantic_class_is_a_response_format(options: dict[str, Any], provider: str) -> None:
    answer: Any = litellm.completion(
        model=f"{provider}/{MODEL}", messages=MESSAGES, response_format=Person, **options
    )
    Person.model_validate_json(answer.choices[0].message.content)


def test_fields_of_vllm_pass_through(options: dict[str, Any]) -> None:
    answer: Any = litellm.completion(
        model=f"hosted_vllm/{MODEL}",
        messages=MESSAGES,
        max_tokens=8,
        extra_body={"ignore_eos": True, "top_k": 1, "structured_outputs": {"choice": ["a", "b"]}},
        **options,
    )
    assert answer.choices[0].message.content in ("a", "b")


@pytest.mark.parametrize("provider", ["text-completion-openai", "hosted_vllm"])
def test_text_completion_answers_and_streams(options: dict[str, Any], provider: str) -> None:
    request: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, **options}
    model = f"{provider}/{MODEL}"
    answer: Any = litellm.text_completion(model=model, **request)
    chunks: Any = litellm.text_completion(model=model, stream=True, **request)
    assert answer.choices[0].text
    assert "".join(c.choices[0].text or "" for c in chunks) == answer.choices[0].text


def test_the_responses_api_answers(options: dict[str, Any]) -> None:
    answer: Any = litellm.responses(model=f"openai/{MODEL}", input="Who are you?", **options)
    assert answer.output[0].content[0].text


@providers
def test_embeddings_are_lists_of_floats(options: dict[str, Any], provider: str) -> None:
    known = {key: options[key] for key in ("api_base", "api_key", "num_retries")}
    answer: Any = litellm.embedding(
        model=f"{provider}/{MODEL}", input=["one", "two"], encoding_format="float", **known
    )
    assert len(answer.data) == 2 and all(isinstance(x, float) for x in answer.data[0]["embedding"])


@providers
def test_errors_have_litellms_classes(options: dict[str, Any], provider: str, guarded: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model=f"{provider}/gpt-none", messages=MESSAGES, **options)
    long: Any = [{"role": "user", "content": "word " * 4000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model=f"{provider}/{MODEL}", messages=long, **options)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, n=-1, **options)
    wrong = options | {"api_base": f"{guarded}/v1"}
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, **wrong)
