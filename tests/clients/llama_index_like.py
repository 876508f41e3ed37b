"""LlamaIndex's OpenAILike.

What it does that others do not: for a model without `is_chat_model`, it writes the conversation as
one text for `/v1/completions`; it sends `tool_choice: "required"` with `strict: false`.
"""

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

MODEL = "penstock-demo"
MESSAGES = [ChatMessage(role="user", content="Who are you?")]


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def model_of(url: str, **flags: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        context_window=2048,
        max_tokens=200,
        temperature=0,
        max_retries=0,
        **flags,
    )


@pytest.mark.parametrize("chats", [True, False])
def test_chat_and_complete_answer_and_stream(demo: str, chats: bool) -> None:
    model = model_of(demo, is_chat_model=chats)
    assert model.chat(MESSAGES).message.content
    assert "".join(part.delta or "" for part in model.stream_chat(MESSAGES))
    whole = model.complete("Once upon a time").text
    assert "".join(part.delta or "" for part in model.stream_complete("Once upon a time")) == whole


async def test_the_async_methods_answer(demo: str) -> None:
    model = model_of(demo, is_chat_model=True)
    plain = (await model.achat(MESSAGES)).message.content
    stream = await model.astream_chat(MESSAGES)
    assert "".join([part.delta or "" async for part in stream]) == plain


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_with_its_arguments(demo: str, streams: bool) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    model = model_of(demo, is_chat_model=True, is_function_calling_model=True)
    tool = FunctionTool.from_defaults(get_weather)
    if streams:
        *_, answer = model.stream_chat_with_tools(
            [tool], chat_history=MESSAGES, tool_required=True, allow_parallel_tool_calls=False
        )
    else:
        answer = model.chat_with_tools([tool], chat_history=MESSAGES, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "get_weather" and set(calls[0].tool_kwargs) == {"city"}


@pytest.mark.parametrize("way", ["tools", "schema"])
def test_a_structured_model_makes_an_object(demo: str, way: str) -> None:
    flags = {"tools": "is_function_calling_model", "schema": "should_use_structured_outputs"}
    model = model_of(demo, is_chat_model=True, **{flags[way]: True})
    assert isinstance(model.as_structured_llm(Person).chat(MESSAGES).raw, Person)
