"""Which functions may be called (tool_choice), and calls enforced in the model's own format."""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from penstock.server.api.openai.chat_writer import message_of
from penstock.server.api.responses.truncation import MAX_ITEMS, droppable, with_what_fits
from penstock.server.errors import InvalidRequest
from penstock.server.protocol.responses import ResponsesRequest, chat_request
from penstock.server.structured.grammar import grammar_text
from penstock.server.tools.call_syntax import native_calls
from penstock.server.tools.parsers import MARKUP, ToolFormat
from tests.support.chatting import ADD, QWEN, WEATHER, ask, make_model, prompt_of, request
from tests.support.paths import ROOT

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"$ref": "#/$defs/yes"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"yes": {"type": "boolean"}},
    },
    "say": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "how": {"enum": ["loud", "low"]}},
        "required": ["text", "how"],
        "additionalProperties": False,
    },
}
OWN = [form for form in ToolFormat if native_calls(form, SCHEMAS, {}, max_calls=1)]
TOOLS = [WEATHER, ADD]
VALUE_ENDS = ("\n</parameter>\n", "</parameter>\n", "</arg_value>\n")


def tokenizer(special: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(ROOT / "engine" / "hub" / "demo_model" / "tokenizer.json"))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def random_text(words: Tokenizer, grammar: str, seed: int) -> str:
    """Random text that follows the grammar, with a preference for tokens that end values."""
    size = words.get_vocab_size()
    matcher = LLMatcher(LLTokenizer(words.to_str(), n_vocab=size, eos_token=[0]), grammar)
    assert not matcher.is_error(), matcher.get_error()
    choose, ids = random.Random(seed), list[int]()
    closings = [words.encode(end, add_special_tokens=False).ids for end in VALUE_ENDS]
    while not matcher.is_stopped():
        for end in closings:  # by chance alone no value without quotes would ever end
            if choose.random() < 0.2 and matcher.validate_tokens(end) == len(end):
                assert matcher.consume_tokens(end)
                ids += end
        if matcher.is_stopped():
            break
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")[:size].nonzero()[0].tolist()
        ends = [i for i in allowed if i == 0 or words.decode([i])[:1] in ('"', "<", "}")]
        chosen = choose.choice(ends if ends and choose.random() < 0.3 else allowed)
        if chosen == 0:
            break
        matcher.consume_token(chosen)
        ids.append(chosen)
        assert len(ids) < 3000
    return words.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("is_special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("form", OWN)
def test_calls_enforced_in_the_models_own_format_are_read_back_and_validate(
    form: ToolFormat, is_special: bool
) -> None:
    words = tokenizer(MARKUP if is_special else ())
    special = {text: words.token_to_id(text) or 0 for text in MARKUP} if is_special else {}
    calls = native_calls(form, SCHEMAS, special, max_calls=3)
    grammar = grammar_text(calls=calls) or ""
    for seed in range(2):
        text = random_text(words, grammar, seed)
        parser = form.parser(frozenset(SCHEMAS), schemas=SCHEMAS)
        message = message_of([*parser.feed(text), *parser.end()])
        assert not message["content"], text
        assert 1 <= len(message["tool_calls"]) <= 3
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_all_formats_but_four_can_be_enforced() -> None:
    in_json = {ToolFormat.PYTHONIC, ToolFormat.OLMO3, ToolFormat.GEMMA4, ToolFormat.JSON}
    assert set(ToolFormat) - set(OWN) == in_json


def test_a_string_with_a_pattern_is_not_written_without_quotes() -> None:
    bare = {"f": {"type": "object", "properties": {"x": {"type": "string", "pattern": "a+"}}}}
    assert native_calls(ToolFormat.QWEN3_CODER, bare, {}, max_calls=1) is None
    assert native_calls(ToolFormat.HERMES, bare, {}, max_calls=1)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": True}},
        {"properties": {"a": 5}},
        {"properties": ["a"]},
        {"properties": {"a": {"type": "string"}}, "required": 7},
        {"properties": {"a": {"type": "string"}}, "required": [["a"]]},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "enum": [1]}}},
        {"properties": {"a": {"type": "string", "const": 1}}},
        {"properties": {"a>b": {"type": "string"}}},
    ],
)
def test_schemas_of_other_than_plain_values_are_enforced_as_json(
    tmp_path: Path, schema: dict[str, Any]
) -> None:
    """The JSON grammar accepts the schema, as that of `true`, or refuses it with a message."""
    parameters = {"type": "object"} | schema
    assert native_calls(ToolFormat.QWEN3_CODER, {"f": parameters}, {}, max_calls=1) is None
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    model = make_model(tmp_path, QWEN, tool_parser="qwen3_coder")
    grammar = ask(model, tools=[tool], tool_choice="required").requests[0].sampling.grammar
    assert grammar and "json_schema" in grammar and "parameter=" not in grammar


def test_a_single_required_call_needs_no_list(tmp_path: Path) -> None:
    generation = ask(make_model(tmp_path, "{{ messages }}"), tools=TOOLS, tool_choice="required")
    grammar = generation.requests[0].sampling.grammar or ""
    words = tokenizer(())
    size = words.get_vocab_size()
    matcher = LLMatcher(LLTokenizer(words.to_str(), n_vocab=size, eos_token=[0]), grammar)
    call = '{"name":"add","arguments":{"a":1,"b":2}}'
    assert matcher.consume_tokens(words.encode(call).ids) and matcher.is_accepting()
    listed = f"[{call},{call}]"
    matcher.reset()
    assert matcher.consume_tokens(words.encode(listed).ids) and matcher.is_accepting()


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_the_prompt_has_only_the_allowed_tools(tmp_path: Path) -> None:
    model = make_model(tmp_path, QWEN)
    prompt = prompt_of(model, tools=TOOLS, tool_choice=allowed("auto", "add"))
    assert prompt == prompt_of(model, tools=[ADD])


def test_allowed_tools_may_be_required(tmp_path: Path) -> None:
    rules = request(tools=TOOLS, tool_choice=allowed("required", "add")).call_rules
    assert rules.must_call and [f.name for f in rules.to_call] == ["add"]
    assert not request(tools=TOOLS, tool_choice=allowed("auto", "add")).call_rules.must_call
    generation = ask(
        make_model(tmp_path, QWEN), tools=TOOLS, tool_choice=allowed("required", "add")
    )
    grammar = generation.requests[0].sampling.grammar or ""
    assert "add" in grammar and "get_weather" not in grammar


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("auto", "no"), "tool_choice.allowed_tools.tools[0].function.name"),
        (allowed("any", "add"), "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    ],
)
def test_invalid_allowed_tools_are_refused_by_name(choice: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(tools=TOOLS, tool_choice=choice)
    assert caught.value.param == param


def test_a_choice_without_a_type_names_a_function() -> None:
    """As huggingface_hub sends it."""
    rules = request(tools=TOOLS, tool_choice={"function": {"name": "add"}}).call_rules
    assert rules.must_call and [f.name for f in rules.to_call] == ["add"]
    with pytest.raises(InvalidRequest, match="'no'") as caught:
        request(tools=TOOLS, tool_choice={"function": {"name": "no"}})
    assert caught.value.param == "tool_choice.function.name"


def responses(**fields: Any) -> Any:
    body = json.dumps({"model": "m", "input": "Hi"} | fields).encode()
    parsed = ResponsesRequest.parse(body)
    with parsed.error_names():
        return chat_request(parsed, [], parsed.input_items)


def test_responses_accepts_allowed_tools_in_its_own_form() -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools[1:]}
    assert [f.name for f in responses(tools=tools, tool_choice=choice).call_rules.to_call] == ["g"]


def test_several_reasoning_items_before_an_answer_belong_to_one_turn() -> None:
    def reasoning(text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "summary": [], "content": content}

    answer = {"role": "assistant", "content": "Yes."}
    question = {"role": "user", "content": "Hi"}
    messages = responses(input=[question, reasoning("Hm."), reasoning("Well."), answer]).messages
    assert [(m.role, m.content, m.reasoning_content) for m in messages] == [
        ("user", "Hi", None),
        ("assistant", "Yes.", "Hm.\nWell."),
    ]


def test_an_error_about_a_tool_has_the_clients_index() -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "function",
             "name": "two words"}]  # fmt: skip
    with pytest.raises(InvalidRequest) as caught:
        responses(tools=tools)
    assert caught.value.param == "tools[2].name"
    assert "tools[2].name" in str(caught.value)


def turn(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "Well."}]


def call(name: str) -> list[dict[str, Any]]:
    return [
        {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": name, "output": "x"},
    ]


def test_old_turns_are_dropped_first_then_old_calls_with_their_results() -> None:
    rule = {"role": "system", "content": "Be brief."}
    items = [rule, *turn("a"), *turn("b"), turn("c")[0], *call("1"), *call("2"), *call("3")]
    assert droppable(items) == [{1, 2}, {3, 4}, {6, 7}, {8, 9}]


def test_parallel_calls_are_dropped_with_all_their_results() -> None:
    first, second = call("1"), call("2")
    both = [first[0], second[0], first[1], second[1]]
    items = [turn("a")[0], *both, *call("3")]
    assert droppable(items) == [{1, 2, 3, 4}]


def test_what_is_dropped_of_30_000_items_is_found_in_time() -> None:
    same_id = [item for _ in range(15_000) for item in call("1")]
    started_s = time.monotonic()
    units = droppable([turn("a")[0], *same_id])
    calls_alone = droppable([turn("a")[0], *same_id[::2], *same_id[1::2], *call("2")])
    assert time.monotonic() - started_s < 5
    assert sum(map(len, units)) == len(set().union(*units)) == 30_000 - 1
    assert calls_alone == [set(range(1, 30_001))]


def test_a_conversation_of_too_many_items_is_not_even_rendered() -> None:
    past = [item for _ in range(MAX_ITEMS) for item in turn("x")]
    sizes = []

    async def render(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> int:
        sizes.append(len(before) + len(now))
        return sizes[-1]

    def kept(max_messages: int) -> int:
        return asyncio.run(
            with_what_fits(past, turn("last")[:1], render, max_messages=max_messages)
        )

    assert kept(1_000_000) == MAX_ITEMS - 1
    assert kept(50) == 49 * 2 + 1
    assert len(sizes) == 2


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
def test_outputs_of_any_tool_are_messages_of_which_too_many_are_not_rendered(kind: str) -> None:
    past = [turn("a")[0]]
    for i in range(10):
        past += [{"type": kind, "call_id": f"{i}"}, {"type": f"{kind}_output", "call_id": f"{i}"}]
    rendered = []

    async def render(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
        rendered.append(before + now)

    asyncio.run(with_what_fits(past, turn("last")[:1], render, max_messages=10))
    assert rendered == [turn("last")[:1]]


def test_a_lone_question_has_nothing_to_drop() -> None:
    assert droppable(turn("a")[:1]) == []


def test_no_more_is_dropped_than_needed_and_a_question_that_never_fits_is_refused() -> None:
    past = [item for text in "abcdefgh" for item in turn(text)]

    def kept(limit: int) -> list[str]:
        async def count(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
            if len(before) + len(now) > limit:
                raise InvalidRequest("too long", code="context_length_exceeded")
            return [item["content"] for item in before + now]

        return asyncio.run(with_what_fits(past, turn("last")[:1], count, max_messages=100))

    assert len(kept(17)) == 17
    assert kept(16)[0] == "b" and len(kept(16)) == 15
    assert kept(1) == kept(2) == ["last"]
    with pytest.raises(InvalidRequest):
        kept(0)
