"""Custom tools, whose input is a text: as the model sees them, as the client gets their calls."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.scheduler.types import FinishReason
from penstock.server.errors import InvalidRequest
from penstock.server.output.parts import CallArguments, CallStart, Part, TextPart, merged
from penstock.server.tools.custom_input import CustomInputs
from tests.support.chatting import PLAIN, QWEN, WEATHER, Answer, make_model, prompt_of, request
from tests.support.serving import MODEL, RunningServer

# Codex's.
PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
PATCH = '*** Begin Patch\n*** Add File: a "b".py\n+print("é \\ 😀")\n*** End Patch'


def custom(name: str = "apply_patch", **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **fields}}


def grammar(definition: str, syntax: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"definition": definition, "syntax": syntax}}


LARK = custom(description="Edits files.", format=grammar(PATCH_GRAMMAR, "lark"))
CODE = custom("code", format=grammar("[ab]{3}", "regex"))
TEXT = custom("say", format={"type": "text"})


def call(name: str, arguments: Any, **options: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, **options)
    return f"<tool_call>\n{text}\n</tool_call>"


def calls_of(answer: Answer) -> list[dict[str, Any]]:
    """From the events: each call, with its deltas joined."""
    calls: list[dict[str, Any]] = []
    for event in answer.sse.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        for choice in json.loads(event[6:])["choices"]:
            for delta in choice["delta"].get("tool_calls", ()):
                if delta["index"] == len(calls):
                    calls.append(delta)
                else:
                    kind = calls[-1]["type"]
                    for key, value in delta[kind].items():
                        calls[-1][kind][key] += value
    return calls


def test_the_model_sees_a_function_of_one_string_and_the_grammar(tmp_path: Path) -> None:
    text = prompt_of(make_model(tmp_path, QWEN), tools=[LARK])
    shown = json.loads(re.findall(r"^{.*}$", text, re.MULTILINE)[0])
    assert shown["type"] == "function" and shown["function"]["name"] == "apply_patch"
    assert shown["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert shown["function"]["description"].startswith("Edits files.")
    assert PATCH_GRAMMAR in shown["function"]["description"]


def test_a_template_without_tools_gets_it_in_words(tmp_path: Path) -> None:
    assert "apply_patch" in prompt_of(make_model(tmp_path, PLAIN), tools=[LARK])


@pytest.mark.parametrize("ascii", [True, False])
def test_a_call_has_the_text_that_the_model_wrote_as_json(tmp_path: Path, ascii: bool) -> None:
    text = call("apply_patch", {"input": PATCH}, ensure_ascii=ascii)
    answer = Answer(make_model(tmp_path, QWEN), text, tools=[LARK])
    (streamed,) = calls_of(answer)
    (plain,) = answer.plain().choices[0].message.tool_calls
    assert answer.plain().choices[0].finish_reason == "tool_calls"
    assert streamed["type"] == plain.type == "custom"
    assert streamed["custom"] == {"name": "apply_patch", "input": PATCH}
    assert plain.custom.name == "apply_patch" and plain.custom.input == PATCH


def test_its_text_arrives_while_it_is_written(tmp_path: Path) -> None:
    text = call("say", {"input": "one two"})
    answer = Answer(make_model(tmp_path, QWEN), text[: text.index(" two")], FinishReason.LENGTH,
                    tools=[TEXT])  # fmt: skip
    assert calls_of(answer)[0]["custom"] == {"name": "say", "input": "one"}


def test_functions_beside_it_keep_their_arguments(tmp_path: Path) -> None:
    arguments = {"city": "Paris", "unit": "celsius", "input": "x"}
    text = call("get_weather", arguments) + call("say", {"input": "a"}) + call("say", {"input": ""})
    answer = Answer(make_model(tmp_path, QWEN), text, tools=[TEXT, WEATHER])
    function, first, second = calls_of(answer)
    assert json.loads(function["function"]["arguments"]) == arguments
    assert first["custom"]["input"] == "a" and second["custom"]["input"] == ""
    assert len(answer.plain().choices[0].message.tool_calls) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb\\u0041\\\\"}', "a\nbA\\"),
        ('{"input":"\\ud83d\\ude00!"}', "😀!"),
        ('{"input": "\\ud83dx\\ude00"}', "\ufffdx\ufffd"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"why": {"input": "no"}, "input": "yes", "more": [1]}', "yes"),
        ('{"\\u0069nput": "yes"}', "yes"),
        ('{"input": ""}', ""),
        # No text is lost where the model did not write it as it was told.
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("{}", "{}"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_an_input_is_read_from_its_json_however_it_is_divided(
    arguments: str, text: str, size: int
) -> None:
    inputs = CustomInputs(frozenset(("say",)))
    given: list[Part] = [CallStart(0, "id", "say")]
    given += [CallArguments(0, arguments[i : i + size]) for i in range(0, len(arguments), size)]
    parts = [each for part in given for each in inputs.rewritten([part])] + inputs.rewritten(
        [TextPart("!")]
    )
    expected: list[Part] = [CallStart(0, "id", "say", is_custom=True)]
    expected += [CallArguments(0, text, is_custom=True)] if text else []
    assert merged(parts) == [*expected, TextPart("!")]


def test_a_call_of_the_conversation_is_the_models_own_again(tmp_path: Path) -> None:
    before = {"id": "c1", "type": "custom", "custom": {"name": "say", "input": "hello"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [before]},
        {"role": "tool", "tool_call_id": "c1", "content": "said"},
    ]
    text = prompt_of(make_model(tmp_path, QWEN), tools=[TEXT], messages=messages)
    assert '{"name": "say", "arguments": {"input": "hello"}}' in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [custom("a b")]}, "tools[0].custom.name"),
        ({"tools": [custom(format={"type": "grammar"})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom(format={"type": "xml"})]}, "tools[0].custom.format.type"),
        ({"tools": [custom(format=grammar("a", "gbnf"))]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [TEXT, TEXT]}, "tools[1].custom.name"),
        (
            {"tools": [TEXT], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice.custom.name",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice.custom.name",
        ),
        (
            {"tools": [TEXT], "tool_choice": {"type": "function", "function": {"name": "say"}}},
            "tool_choice.function.name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]},
            "messages[0].tool_calls[0].custom",
        ),
    ],
)
def test_what_is_wrong_with_a_custom_tool_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        _ = request(**fields).for_template
    assert error.value.param == param


@pytest.fixture(scope="module", params=["demo", "random"])
def server(request: pytest.FixtureRequest) -> RunningServer:
    running: RunningServer = request.getfixturevalue(f"{request.param}_server")
    return running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="x",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


def chat(client: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Hi"}]
    options = {"model": MODEL, "messages": messages, "max_tokens": 900, "seed": 2} | fields
    return client.chat.completions.create(**options)


def is_patch(text: str) -> bool:
    """At least as far as the lines go."""
    begin, *lines, end = text.removesuffix("\n").split("\n")
    begins = (
        "*** Add File: ",
        "*** Delete File: ",
        "*** Update File: ",
        "+",
        "-",
        " ",
        "@@",
        "***",
    )
    return (begin, end) == ("*** Begin Patch", "*** End Patch") and all(
        line.startswith(begins) for line in lines
    )


def test_a_lark_grammar_is_enforced_where_its_tool_must_be_called(client: openai.OpenAI) -> None:
    choice = {"type": "custom", "custom": {"name": "apply_patch"}}
    # Short, as random weights would write lines without end.
    limited = PATCH_GRAMMAR.replace("/(.+)/", "/.{1,9}/").replace("/(.*)/", "/.{0,9}/")
    limited = limited.replace("hunk+", "hunk").replace("add_line+", "add_line")
    limited = limited.replace("(change_context | change_line)+", "(change_context | change_line)")
    tool = custom(format=grammar(limited, "lark"))
    for fields in ({"tools": [tool, WEATHER], "tool_choice": choice},
                   {"tools": [tool], "tool_choice": "required"}):  # fmt: skip
        (answer,) = chat(client, **fields).choices
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (called,) = answer.message.tool_calls
        assert called.type == "custom" and called.custom.name == "apply_patch"
        assert is_patch(called.custom.input)


def test_a_regex_is_enforced_beside_other_tools(client: openai.OpenAI) -> None:
    for choice in chat(client, tools=[CODE, WEATHER], tool_choice="required", n=8).choices:
        for called in choice.message.tool_calls or ():
            if called.type == "custom":
                assert re.fullmatch("[ab]{3}", called.custom.input)
    named = {"type": "custom", "custom": {"name": "code"}}
    (answer,) = chat(client, tools=[CODE, WEATHER], tool_choice=named).choices
    (called,) = answer.message.tool_calls
    assert called.type == "custom" and re.fullmatch("[ab]{3}", called.custom.input)


def test_allowed_tools_may_be_custom(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "code"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    (answer,) = chat(client, tools=[WEATHER, CODE], tool_choice=choice).choices
    assert all(called.type == "custom" for called in answer.message.tool_calls or ())
    assert answer.message.tool_calls


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_grammar_that_does_not_compile_is_a_400(server: RunningServer, syntax: str) -> None:
    tool = custom(format=grammar("start: (((", syntax))
    answer = server.chat(tools=[tool], tool_choice="required")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


RESPONSE_TOOL = {
    "type": "custom",
    "name": "code",
    "description": "Takes a code.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"},
}
RESPONSE_CHOICE = {"type": "custom", "name": "code"}


def respond(client: Any, **fields: Any) -> Any:
    options = {"model": MODEL, "input": "Hi", "max_output_tokens": 1500, "tools": [RESPONSE_TOOL]}
    return client.responses.create(**options | {"tool_choice": RESPONSE_CHOICE} | fields)


def test_a_response_has_a_custom_tool_call(client: openai.OpenAI) -> None:
    response = respond(client)
    (item,) = response.output
    assert item.type == "custom_tool_call" and item.name == "code"
    assert item.id.startswith("ctc_") and item.call_id.startswith("call_")
    assert re.fullmatch("[ab]{3}", item.input)
    (tool,) = response.tools
    assert tool.type == "custom" and tool.format.definition == "[ab]{3}"
    assert response.tool_choice.type == "custom" and response.tool_choice.name == "code"


def test_the_events_of_a_custom_tool_call_add_up_to_it(client: openai.OpenAI) -> None:
    events = list(respond(client, stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    begin, end = kinds.index("response.output_item.added"), -4
    assert set(kinds[begin + 1 : end + 1]) == {"response.custom_tool_call_input.delta"}
    assert kinds[end + 1 :] == [
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
    (item,) = events[-1].response.output
    done = events[end + 1]
    assert "".join(event.delta for event in deltas) == done.input == item.input
    assert {event.item_id for event in (*deltas, done)} == {item.id}
    assert events[begin].item.input == "" and events[-2].item == item


def test_a_conversation_goes_on_after_the_output_of_a_custom_tool(
    client: openai.OpenAI,
) -> None:
    first = respond(client)
    (item,) = first.output
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "fine"}
    second = respond(
        client, previous_response_id=first.id, input=[output], tool_choice="none",
        max_output_tokens=5,
    )  # fmt: skip
    sent = [{"role": "user", "content": "Hi"}, item.to_dict(), output]
    again = respond(client, input=sent, tool_choice="none", max_output_tokens=5)
    assert second.usage.input_tokens == again.usage.input_tokens
    alone = respond(client, tool_choice="none", max_output_tokens=5)
    assert alone.usage.input_tokens < again.usage.input_tokens
    kinds = {each.type for each in client.responses.input_items.list(second.id)}
    assert kinds == {"message", "custom_tool_call", "custom_tool_call_output"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [RESPONSE_TOOL | {"name": None}]}, "tools[0].name"),
        (
            {"tools": [RESPONSE_TOOL | {"format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.definition",
        ),
        ({"tool_choice": {"type": "custom", "name": "other"}}, "tool_choice.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "n"}]}, "input[0].input"),
    ],
)
def test_what_is_wrong_on_responses_has_the_names_of_responses(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    body = {"input": "Hi", "tools": [RESPONSE_TOOL], "tool_choice": RESPONSE_CHOICE} | fields
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
