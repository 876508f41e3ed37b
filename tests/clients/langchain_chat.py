"""LangChain's ChatOpenAI and OpenAIEmbeddings, and its agent.

What it does that others do not: `with_structured_output` sends a JSON schema, a forced tool or
`json_object`, depending on its method; with `stream_usage` it expects usage in a chunk of its own
without choices; OpenAIEmbeddings sends token ids of OpenAI's tokenizer instead of texts unless
`check_embedding_ctx_length=False`; with the Responses API it sends `include`, and sends items back
unchanged, with their ids and statuses.
"""

from typing import Any, Literal

import openai
import pytest
import tiktoken
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain.tools import tool
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field
from tiktoken.registry import ENCODINGS

MODEL = "penstock-demo"
METHODS = ("json_schema", "function_calling", "json_mode")


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    kind: Literal["human", "robot"]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def options(demo: str) -> dict[str, Any]:
    return {"model": MODEL, "base_url": f"{demo}/v1", "api_key": "none", "max_retries": 0}


@pytest.fixture(scope="module")
def chat(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**options, temperature=0, max_tokens=200)


def test_invoke_gives_text_usage_and_a_finish_reason(chat: ChatOpenAI) -> None:
    answer = chat.invoke([SystemMessage("Be short."), HumanMessage("Who are you?")])
    assert isinstance(answer, AIMessage) and answer.text
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0


def test_a_stream_adds_up_to_the_unstreamed_text_and_has_usage(chat: ChatOpenAI) -> None:
    plain = chat.invoke("Who are you?")
    chunks = list(chat.stream("Who are you?", stream_usage=True))
    whole = sum(chunks[1:], chunks[0])
    assert whole.text == plain.text and len(chunks) > 2
    assert whole.usage_metadata == plain.usage_metadata


async def test_the_async_methods_give_the_same(chat: ChatOpenAI) -> None:
    plain = await chat.ainvoke("Who are you?")
    pieces = [chunk.text async for chunk in chat.astream("Who are you?")]
    assert "".join(pieces) == plain.text


def test_a_batch_answers_every_message(chat: ChatOpenAI) -> None:
    answers = chat.batch([f"What is {i} + 1?" for i in range(6)])
    assert all(answer.text for answer in answers)


def test_logprobs_are_in_the_metadata(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("Who are you?")
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_a_bound_tool_is_called_and_its_result_accepted(chat: ChatOpenAI, way: str) -> None:
    bound = chat.bind_tools([get_weather], tool_choice="any")
    question = HumanMessage("How is the weather in Paris?")
    if way == "invoke":
        call = bound.invoke([question])
    else:
        chunks = list(bound.stream([question]))
        call = sum(chunks[1:], chunks[0])
    (tool_call,) = call.tool_calls
    assert tool_call["name"] == "get_weather" and set(tool_call["args"]) == {"city"}
    result = ToolMessage("sunny", tool_call_id=tool_call["id"])
    assert chat.bind_tools([get_weather]).invoke([question, call, result]).type == "ai"


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", METHODS)
def test_structured_output_gives_an_object(
    chat: ChatOpenAI, method: Any, strict: bool | None
) -> None:
    if method == "json_mode":  # any JSON is valid here; LangChain validates it itself
        bound: Any = chat.with_structured_output(None, method=method)
        assert isinstance(bound.invoke("Write JSON for a person named Ada, aged 36."), dict)
        return
    bound = chat.with_structured_output(Person, method=method, strict=strict)
    assert isinstance(bound.invoke("Somebody."), Person)


def test_structured_output_streams_and_comes_with_the_raw_message(chat: ChatOpenAI) -> None:
    bound: Any = chat.with_structured_output(Person, include_raw=True)
    answer = bound.invoke("Somebody.")
    assert isinstance(answer["parsed"], Person) and answer["raw"].text
    *_, last = chat.with_structured_output(Person).stream("Somebody.")
    assert isinstance(last, Person)


@wrap_model_call
def with_one_call(request: Any, handler: Any) -> Any:
    """The demo model calls no tool by itself: the first turn forces one, the next forbids it."""
    has_result = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if has_result else "any"))


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_an_agent_calls_its_tool_and_continues(
    options: dict[str, Any], use_responses_api: bool
) -> None:
    chat = ChatOpenAI(**options, temperature=0, max_tokens=200, use_responses_api=use_responses_api)
    agent: Any = create_agent(chat, tools=[get_weather], middleware=[with_one_call])
    state = agent.invoke({"messages": [HumanMessage("How is the weather in Paris?")]})
    kinds = [message.type for message in state["messages"]]
    assert kinds == ["human", "ai", "tool", "ai"]
    assert "sunny in" in state["messages"][2].text
    assert state["messages"][-1].text


def test_an_agent_streams_its_tokens(chat: ChatOpenAI) -> None:
    agent: Any = create_agent(chat, tools=[get_weather], middleware=[with_one_call])
    question = {"messages": [HumanMessage("How is the weather in Paris?")]}
    pieces = [chunk for chunk, _ in agent.stream(question, stream_mode="messages")]
    assert sum(piece.type == "AIMessageChunk" for piece in pieces) > 4


def test_an_agent_gives_a_structured_response(chat: ChatOpenAI) -> None:
    agent: Any = create_agent(chat, tools=[], response_format=Person)
    state = agent.invoke({"messages": [HumanMessage("Somebody.")]})
    assert isinstance(state["structured_response"], Person)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_an_agent_with_tools_gives_a_structured_response(
    options: dict[str, Any], use_responses_api: bool
) -> None:
    chat = ChatOpenAI(**options, temperature=0, max_tokens=200, use_responses_api=use_responses_api)
    agent: Any = create_agent(
        chat,
        tools=[get_weather],
        response_format=ProviderStrategy(Person),
    )
    state = agent.invoke({"messages": [HumanMessage("How is the weather in Paris?")]})
    assert isinstance(state["structured_response"], Person)


def test_the_responses_api_answers_streams_and_continues(options: dict[str, Any]) -> None:
    chat = ChatOpenAI(**options, temperature=0, use_responses_api=True)
    first = chat.invoke("My name is Ada.")
    assert first.text and first.usage_metadata
    known = first.response_metadata["id"]
    second = chat.invoke("What is my name?", previous_response_id=known)
    assert "Ada" in second.text
    chunks = list(chat.stream("Who are you?"))
    whole = sum(chunks[1:], chunks[0])
    assert whole.text == chat.invoke("Who are you?").text and whole.usage_metadata
    again = chat.invoke([HumanMessage("My name is Ada."), first, HumanMessage("What is my name?")])
    assert again.text
    assert isinstance(chat.with_structured_output(Person).invoke("Somebody."), Person)


def test_text_completions_are_invoked_and_streamed(options: dict[str, Any]) -> None:
    model = OpenAI(**options, temperature=0, max_tokens=8)
    assert "".join(model.stream("Once upon a time")) == model.invoke("Once upon a time")


def test_embeddings_of_documents_and_queries_agree(options: dict[str, Any]) -> None:
    embeddings = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    one, two = embeddings.embed_documents(["one", "two"])
    assert one != two and embeddings.embed_query("one") == pytest.approx(one, abs=1e-5)


def encoding(first_id: int) -> tiktoken.Encoding:
    """One token for each byte, in place of OpenAI's, which tiktoken would download."""
    ranks = {bytes([byte]): first_id + byte for byte in range(256)}
    return tiktoken.Encoding("local", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})


def test_without_the_switch_embeddings_are_of_other_ids_or_refused_with_its_name(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    ids = OpenAIEmbeddings(**options)
    monkeypatch.setitem(ENCODINGS, "cl100k_base", encoding(first_id=300))
    assert ids.embed_query("one") != pytest.approx(texts.embed_query("one"), abs=1e-2)
    monkeypatch.setitem(ENCODINGS, "cl100k_base", encoding(first_id=100_000))
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        ids.embed_query("one")


def test_a_rejected_request_raises_openais_error(options: dict[str, Any]) -> None:
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**(options | {"model": "gpt-4o"})).invoke("Hi")
