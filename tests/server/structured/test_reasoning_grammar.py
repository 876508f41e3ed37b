"""Reasoning before a constrained answer, and reasoning budgets, with weights that never end it.

The model has the demo's shape with random weights, and two more tokens, the reasoning markers.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from penstock.server.errors import UnsupportedParameter
from tests.support.chatting import ADD, PLAIN, QWEN, ask, make_model
from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer

DEMO = ROOT / "engine" / "hub" / "demo_model"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BUDGET = 9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = thinking_model(tmp_path_factory.mktemp("models") / "thinker")
    flags = ("--load-format", "dummy", "--served-model-name", MODEL)
    running = RunningServer(str(directory), *flags)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


def thinking_model(directory: Path) -> Path:
    """Its template supports enable_thinking, and the markers are plain tokens, as in Qwen3."""
    shutil.copytree(DEMO, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.save(str(path))
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size()
    (directory / "config.json").write_text(json.dumps(config))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] += (
        "{%- if enable_thinking is defined and not enable_thinking -%}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def chat(server: RunningServer, **fields: Any) -> Any:
    answer = server.chat(**({"max_tokens": 60, "thinking_token_budget": BUDGET} | fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("budget", [0, 1, BUDGET])
def test_reasoning_ends_when_its_budget_is_spent(server: RunningServer, budget: int) -> None:
    answer = chat(server, thinking_token_budget=budget, n=2, logprobs=True)
    for choice in answer["choices"]:
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert tokens[0] == "<think>"
        assert tokens.index("</think>") <= budget + 1
        assert choice["message"]["content"]
        assert bool(choice["message"].get("reasoning_content")) == bool(budget)
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] <= 2 * budget


def test_without_a_budget_nothing_ends_the_reasoning(server: RunningServer) -> None:
    choice = chat(server, thinking_token_budget=-1)["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_constrained_answer_follows_the_reasoning(server: RunningServer) -> None:
    answer = chat(server, response_format=JSON_FORMAT, n=4)
    for choice in answer["choices"]:
        message = choice["message"]
        assert message["reasoning_content"] == message["reasoning"] != ""
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_with_thinking_off_the_constrained_answer_begins_at_once(server: RunningServer) -> None:
    answer = server.chat(max_tokens=60, response_format=JSON_FORMAT, reasoning_effort="none")
    message = answer.json()["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert message["reasoning_content"] is None


def test_a_required_call_follows_the_reasoning(server: RunningServer) -> None:
    fields = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    message = chat(server, **fields, max_tokens=200)["choices"][0]["message"]
    assert message["reasoning_content"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"a", "b"}


def test_a_stream_of_budgeted_reasoning_adds_up_to_the_plain_answer(server: RunningServer) -> None:
    plain = chat(server, seed=3)["choices"][0]["message"]
    answer = server.chat(max_tokens=60, thinking_token_budget=BUDGET, seed=3, stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == plain[name]


def test_anthropics_budget_ends_reasoning_too(server: RunningServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="x") as client:
        message = client.messages.create(
            model=MODEL,
            max_tokens=60,
            messages=[{"role": "user", "content": "Hi"}],
            thinking={"type": "enabled", "budget_tokens": BUDGET},
        )
    thinking, text = message.content
    assert thinking.type == "thinking" and thinking.thinking
    assert text.type == "text" and text.text


def test_a_budget_is_refused_by_name_if_the_model_does_not_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        ask(make_model(tmp_path, PLAIN), thinking_token_budget=5)
    assert caught.value.param == "thinking_token_budget"


def test_a_budget_is_refused_if_the_markers_are_not_tokens(tmp_path: Path) -> None:
    model = make_model(tmp_path, QWEN)
    with pytest.raises(UnsupportedParameter, match="not special tokens"):
        ask(model, thinking_token_budget=5)
    assert ask(model, thinking_token_budget=-1).requests[0].sampling.grammar is None
