"""Tools with tool_choice auto: the prompt, and how the answer is divided into text and calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.scheduler.types import FinishReason
from penstock.server.errors import InvalidRequest
from penstock.server.tools.chat_format import ChatFormat
from penstock.server.tools.parsers import ToolFormat
from tests.support.chatting import (
    ADD,
    PLAIN,
    QWEN,
    WEATHER,
    Answer,
    ask,
    make_model,
    prompt_of,
    request,
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [WEATHER, ADD]


@pytest.mark.parametrize("way", ["streamed", "plain"])
def test_a_call_reaches_the_client_with_id_name_and_arguments(tmp_path: Path, way: str) -> None:
    answer = Answer(make_model(tmp_path, QWEN), CALL, tools=TOOLS)
    choice = getattr(answer, way)().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "add"
    assert call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}


@pytest.mark.parametrize("way", ["streamed", "plain"])
def test_text_and_several_calls_reach_the_client_in_order(tmp_path: Path, way: str) -> None:
    answer = Answer(make_model(tmp_path, QWEN), f"Both.\n{CALL}\n{CALL}", tools=TOOLS)
    message = getattr(answer, way)().choices[0].message
    assert message.content == "Both."
    ids = {call.id for call in message.tool_calls}
    assert len(ids) == 2
    assert all(json.loads(c.function.arguments) == {"a": 1, "b": 2} for c in message.tool_calls)


def test_a_plain_body_with_only_a_call_has_null_content(tmp_path: Path) -> None:
    answer = Answer(make_model(tmp_path, QWEN), CALL, tools=TOOLS)
    assert answer.plain().choices[0].message.content is None


def test_only_the_first_delta_of_a_call_has_id_type_and_name(tmp_path: Path) -> None:
    answer = Answer(make_model(tmp_path, QWEN), CALL, tools=TOOLS)
    events = [json.loads(e[6:]) for e in answer.sse.split(b"\n\n") if e.startswith(b"data: {")]
    deltas = [c["delta"]["tool_calls"][0] for e in events for c in e["choices"] if "tool_calls" in
              c["delta"]]  # fmt: skip
    first, *rest = deltas
    assert first.keys() == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "add", "arguments": ""}
    assert len(rest) > 3
    assert all(d.keys() == {"index", "function"} for d in rest)
    assert all(d["function"].keys() == {"arguments"} for d in rest)


def test_an_answer_without_a_call_is_text_and_ends_with_stop(tmp_path: Path) -> None:
    answer = Answer(make_model(tmp_path, QWEN), "Two < three. <tool", tools=TOOLS)
    choice = answer.streamed().choices[0]
    assert choice.message.content == "Two < three. <tool"
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls


def test_a_call_cut_short_ends_with_length(tmp_path: Path) -> None:
    answer = Answer(make_model(tmp_path, QWEN), CALL[:-25], FinishReason.LENGTH, tools=TOOLS)
    choice = answer.plain().choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls and choice.message.tool_calls[0].function.name == "add"


def test_without_tools_markup_is_text(tmp_path: Path) -> None:
    answer = Answer(make_model(tmp_path, QWEN), CALL)
    assert answer.plain().choices[0].message.content == CALL


def test_parallel_tool_calls_false_ends_the_answer_at_the_first_call(tmp_path: Path) -> None:
    model = make_model(tmp_path, QWEN)
    answer = Answer(model, f"{CALL}\n{CALL}", tools=TOOLS, parallel_tool_calls=False)
    choice = answer.streamed().choices[0]
    assert choice.message.tool_calls and len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    assert answer.choice.num_tokens < len(CALL) + 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ tools }}<|python_tag|>", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("{{ tools }}[TOOL_CALLS]", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
        ("{{ tools }}[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
    ],
)
def test_markers_that_are_special_tokens_are_seen(tmp_path: Path, template: str, text: str) -> None:
    answer = Answer(make_model(tmp_path, template + PLAIN), text, tools=TOOLS)
    message = answer.streamed().choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.arguments == '{"a": 1}'
    assert not message.content


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call> ...", ToolFormat.HERMES),
        ("... [TOOL_CALLS] ...", ToolFormat.MISTRAL),
        ('Respond in the format {"name": f, "parameters": dictionary}', ToolFormat.LLAMA3_JSON),
        ("[func_name1(params_name1=params_value1)]", ToolFormat.PYTHONIC),
        ("nothing of the kind", ToolFormat.JSON),
    ],
)
def test_the_format_of_calls_is_detected_from_the_template(template: str, form: ToolFormat) -> None:
    assert ChatFormat.detect(template, None, None).tools is form
    assert ChatFormat.detect(template, "pythonic", None).tools is ToolFormat.PYTHONIC
    assert ChatFormat.detect(template, "none", None).tools is None


def test_the_template_gets_the_tools_as_the_client_sent_them(tmp_path: Path) -> None:
    prompt = prompt_of(make_model(tmp_path, QWEN), tools=TOOLS)
    assert prompt == f"# Tools\n{json.dumps(WEATHER)}\n{json.dumps(ADD)}\n<user>Hi<assistant>"


def test_with_tool_choice_none_the_prompt_has_no_tools(tmp_path: Path) -> None:
    model = make_model(tmp_path, QWEN)
    assert prompt_of(model, tools=TOOLS, tool_choice="none") == prompt_of(model)
    answer = Answer(model, CALL, tools=TOOLS, tool_choice="none")
    assert answer.plain().choices[0].message.content == CALL


CONVERSATION = [
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]


def test_earlier_calls_and_results_reach_the_template_with_arguments_as_objects(
    tmp_path: Path,
) -> None:
    prompt = prompt_of(make_model(tmp_path, QWEN), messages=CONVERSATION)
    assert prompt == f"<user>1 + 2?<assistant>{CALL}<tool>3<assistant>"


def test_a_template_without_tools_gets_instructions_in_words(tmp_path: Path) -> None:
    model = make_model(tmp_path, PLAIN)
    prompt = prompt_of(model, tools=[ADD], messages=CONVERSATION)
    assert prompt.startswith("<system>You can call functions.")
    assert json.dumps(ADD["function"]) in prompt
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    assert prompt.endswith(f"<user>1 + 2?<assistant>{call}<user>Result of add: 3")
    message = Answer(model, call, tools=[ADD]).plain().choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.name == "add"


def test_the_clients_system_message_precedes_the_instructions(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = prompt_of(make_model(tmp_path, PLAIN), tools=[ADD], messages=messages)
    assert prompt.startswith("<system>Be brief.\n\nYou can call functions.")


def test_a_template_that_concatenates_arguments_gets_strings(tmp_path: Path) -> None:
    template = (
        "{{ tools }}{% for m in messages %}{% for c in m.tool_calls %}"
        "{{ 'args: ' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    prompt = prompt_of(make_model(tmp_path, template), messages=CONVERSATION)
    assert prompt == 'args: {"a": 1, "b": 2}'


def test_ids_are_shortened_for_templates_that_require_nine_letters(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('IDs must have length 9!') }}{% endif %}{{ c.id }} {% endfor %}"
        "{{ m.tool_call_id }}{% endfor %}"
    )
    first, second = prompt_of(make_model(tmp_path, template), messages=CONVERSATION).split()
    assert first == second


def call_with(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": call_with("[1]")}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": call_with("{")}, "messages[1].tool_calls[0].function.arguments"),
        ({"functions": [{"name": "x"}, {"name": "x"}]}, "functions"),
        ({"functions": [{"name": "x"}], "tools": [ADD]}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions"),
        ({"functions": 5}, "functions"),
        ({"functions": [{"name": "x"}], "function_call": {"name": "y"}}, "function_call"),
        ({"function_call": {"name": "y"}}, "function_call"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_invalid_tools_and_template_fields_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(make_model(tmp_path, QWEN), **fields)
    assert caught.value.param == param


def test_auto_is_refused_without_a_tool_call_parser(tmp_path: Path) -> None:
    model = make_model(tmp_path, QWEN, tool_parser="none")
    with pytest.raises(InvalidRequest, match="--tool-call-parser none"):
        ask(model, tools=TOOLS)
    assert ask(model, tools=TOOLS, tool_choice="required").make_reader


def test_an_empty_list_of_tools_is_accepted_with_auto() -> None:
    assert not request(tools=[], tool_choice="auto").call_rules.functions
