"""llm, Simon Willison's command and its Python API.

What it does that others do not: a server is a model in `extra-openai-models.yaml`; it sends no key
but a placeholder unless the file names one; it reads a stream's usage from whichever chunk has it,
keeps a dictionary of each answer in SQLite, and sends a conversation again from there; a schema is
a `json_schema` without `strict`; tool calls are run in a chain, and their results go back in one
turn. Its embeddings have only OpenAI's names for models, so that a server has to be started with
one of them, and find the server by `OPENAI_BASE_URL`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm.default_plugins.openai_models import AsyncChat, Chat
from pydantic import BaseModel, Field

MODEL = "penstock-demo"
QUESTION = "Who are you?"
MODELS = """
- {{model_id: chat, model_name: {model}, api_base: "{demo}/v1", supports_schema: true}}
- model_id: responses
  model_name: {model}
  api_base: "{demo}/v1"
  responses: true
  supports_schema: true
- {{model_id: text, model_name: {model}, api_base: "{demo}/v1", completion: true}}
- {{model_id: wrong, model_name: gpt-none, api_base: "{demo}/v1"}}
- {{model_id: guarded, model_name: {model}, api_base: "{guarded}/v1", api_key_name: guarded}}
"""
Run = Callable[..., str]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture
def run(tmp_path: Path, demo: str, guarded: str) -> Run:
    """Runs the command with its files in a new folder, and gives what it wrote."""
    text = MODELS.format(model=MODEL, demo=demo, guarded=guarded)
    (tmp_path / "extra-openai-models.yaml").write_text(text)
    variables = {
        "LLM_USER_PATH": str(tmp_path),
        "OPENAI_BASE_URL": f"{demo}/v1",
        "OPENAI_API_KEY": "none",
    }

    def command(*arguments: str, stdin: str = "", code: int = 0) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("llm")), *arguments],
            env={**os.environ, **variables},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        return (done.stderr if code else done.stdout).strip()

    return command


@pytest.mark.parametrize("model", ["chat", "responses"])
def test_a_prompt_is_answered_alike_streamed_or_not_or_async(run: Run, model: str) -> None:
    asked = ("-m", model, "-o", "temperature", "0", QUESTION)
    plain = run(*asked, "--no-stream")
    assert "Penstock" in plain
    assert run(*asked) == plain and run(*asked, "--async") == plain
    answer, *_ = json.loads(run("logs", "--json", "-n", "1"))
    assert answer["response"] == plain and answer["output_tokens"] > 0


def test_an_endpoint_needs_no_file(run: Run, demo: str) -> None:
    endpoint = ("openai", "endpoint", f"{demo}/v1")
    assert MODEL in run(*endpoint, "--models").split()
    for form in ((), ("--responses",)):
        assert "Penstock" in run(*endpoint, *form, "-m", MODEL, "-o", "temperature", "0", QUESTION)


def test_a_conversation_goes_on_and_a_chat_remembers(run: Run) -> None:
    asked = ("-m", "chat", "-o", "temperature", "0")
    run(*asked, "My name is Ada.")
    assert "Ada" in run(*asked, "-c", "What is my name?")
    assert "Ada" in run("chat", *asked, stdin="My name is Ada.\nWhat is my name?\nexit\n")


@pytest.mark.parametrize("model", ["chat", "responses"])
def test_a_schema_is_followed(run: Run, model: str) -> None:
    schema = "name, age int"
    answer = run("-m", model, "--schema", schema, "Somebody.")
    person = json.loads(answer)
    # The schema allows other properties too, of which the model writes one now and then.
    assert person.keys() >= {"name", "age"} and isinstance(person["age"], int)
    (logged,) = json.loads(run("logs", "--schema", schema, "--data-array"))
    assert logged == person


def test_a_json_object_and_a_stop_string_are_options(run: Run) -> None:
    asked = ("-m", "chat", "-o", "temperature", "0")
    assert isinstance(json.loads(run(*asked, "-o", "json_object", "1", "Write JSON.")), dict)
    whole = run(*asked, QUESTION)
    assert run(*asked, "-o", "stop", "Penstock", QUESTION) == whole.partition("Penstock")[0].strip()


def test_a_text_is_completed(run: Run) -> None:
    asked = ("-m", "text", "-o", "temperature", "0", "-o", "max_tokens", "8", "Once upon a time")
    assert run(*asked) == run(*asked, "--no-stream") != ""


def test_embeddings_of_a_collection_find_the_nearest_text(run: Run) -> None:
    vector = json.loads(run("embed", "-m", "3-small", "-c", "one"))
    assert len(vector) > 1 and all(isinstance(value, float) for value in vector)
    texts = json.dumps([{"id": text, "content": text} for text in ("one", "two", "three")])
    run("embed-multi", "numbers", "-", "-m", "3-small", "--format", "json", stdin=texts)
    nearest = json.loads(run("similar", "numbers", "-n", "1", "-c", "two"))
    assert nearest["id"] == "two" and nearest["score"] == pytest.approx(1, abs=1e-3)


def test_a_key_is_sent_to_the_server_that_wants_one(run: Run) -> None:
    asked = ("-m", "guarded", "-o", "max_tokens", "4", QUESTION)
    assert "key" in run(*asked, "--key", "wrong", code=1)
    assert run(*asked, "--key", "secret")


def test_an_error_has_the_servers_own_message(run: Run) -> None:
    assert f"'gpt-none' does not exist on this server, which serves '{MODEL}'" in run(
        "-m", "wrong", QUESTION, code=1
    )
    assert "context" in run("-m", "chat", stdin="word " * 4000, code=1)


def with_one_call(model: Any) -> Any:
    """The demo model calls no tool by itself: the first turn forces one, the next forbids it."""
    build = model.build_kwargs

    def build_kwargs(prompt: Any, stream: bool) -> Any:
        choice = {"tool_choice": "none" if prompt.tool_results else "required"}
        return build(prompt, stream) | (choice if prompt.tools else {})

    model.build_kwargs, model.needs_key = build_kwargs, None
    return model


@pytest.fixture
def python_api(demo: str) -> dict[str, Any]:
    names = {"model_id": "local", "model_name": MODEL, "api_base": f"{demo}/v1"}
    return names | {"supports_tools": True, "supports_schema": True}


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_calls_its_tool_and_continues(python_api: dict[str, Any], stream: bool) -> None:
    chain = with_one_call(Chat(**python_api)).chain(
        "How is the weather?",
        tools=[get_weather],
        stream=stream,
        options={"temperature": 0, "max_tokens": 200},
    )
    first, second = chain.responses()
    assert {call.name for call in first.tool_calls()} == {"get_weather"}
    assert {result.output[:9] for result in second.prompt.tool_results} == {"sunny in "}
    assert second.text() and not second.tool_calls()


async def test_an_async_chain_does_the_same(python_api: dict[str, Any]) -> None:
    chain = with_one_call(AsyncChat(**python_api)).chain(
        "How is the weather?", tools=[get_weather], options={"temperature": 0, "max_tokens": 200}
    )
    first, second = [response async for response in chain.responses()]
    assert {call.name for call in await first.tool_calls()} == {"get_weather"}
    assert await second.text()


def test_a_conversation_of_the_python_api_streams_and_has_usage(python_api: dict[str, Any]) -> None:
    conversation = with_one_call(Chat(**python_api)).conversation()
    first = conversation.prompt("My name is Ada.", temperature=0)
    assert "Ada" in "".join(first) and first.usage().output > 0
    second = conversation.prompt("What is my name?", stream=False, temperature=0)
    assert "Ada" in second.text() and second.usage().input > first.usage().input


def test_a_pydantic_class_is_a_schema(python_api: dict[str, Any]) -> None:
    answer = with_one_call(Chat(**python_api)).prompt("Somebody.", schema=Person)
    Person.model_validate_json(answer.text())
