"""Tools and a response_format in one request: a call, or an answer in the format."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from tests.support.chatting import ADD, QWEN, ask, make_model
from tests.support.serving import RunningServer

SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


def choice_of(server: RunningServer, **fields: Any) -> dict[str, Any]:
    reply = server.chat(tools=[ADD], response_format=FORMAT, max_tokens=500, **fields)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_with_auto_the_answer_calls_or_follows_the_format(server: RunningServer) -> None:
    seen = set()
    for seed in range(24):
        choice = choice_of(server, seed=seed, temperature=1)
        seen.add(choice["finish_reason"])
        if choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                assert json.loads(call["function"]["arguments"]).keys() == {"a", "b"}
            assert choice["message"]["content"] is None
        else:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert seen == {"tool_calls", "stop"}


def test_a_required_call_takes_precedence_over_the_format(server: RunningServer) -> None:
    choice = choice_of(server, tool_choice="required")
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


def test_with_tool_choice_none_only_the_format_applies(server: RunningServer) -> None:
    choice = choice_of(server, tool_choice="none")
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_after_its_reasoning_a_model_may_call_in_its_own_format_or_answer(tmp_path: Path) -> None:
    model = make_model(tmp_path, QWEN, special=("<think>", "</think>"))
    grammar = ask(model, tools=[ADD], response_format=FORMAT).requests[0].sampling.grammar or ""
    words = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reads = LLTokenizer(words.to_str(), n_vocab=words.get_vocab_size(), eos_token=[256])
    for answer in (
        '{"mood": "sad"}',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}',
    ):
        matcher = LLMatcher(reads, grammar)
        ids = words.encode(f"<think>Hm.</think>\n{answer}").ids
        assert matcher.validate_tokens(ids) == len(ids), matcher.get_error()
