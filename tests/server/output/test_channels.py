"""Harmony, the format of gpt-oss: messages on channels become reasoning, text and calls."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from penstock.server.output.channels import HARMONY_MARKUP, ChannelSplitter
from penstock.server.output.parts import Part, ReasoningPart, TextPart, merged
from penstock.server.output.reasoning import ReasoningFormat
from penstock.server.prompt.model import ServedModel
from penstock.server.tools.chat_format import ChatFormat
from penstock.server.tools.parsers import ToolFormat
from tests.support.chatting import ADD, PLAIN, WEATHER, Answer, ask, make_model

# As far as it matters here.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{# <|start|>assistant<|channel|>analysis<|message|> #}"
)
ANALYSIS = "<|channel|>analysis<|message|>The sum is 3.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>It is < 3.\n\nYes <|.<|return|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
ARGUMENTS = '{"a": 1, "b": 2}'


def split(pieces: list[str], *, is_open: bool = False, is_final: bool = False) -> list[Part]:
    splitter = ChannelSplitter(is_open=is_open, is_final=is_final)
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    return merged([*parts, *splitter.end()])


def test_analysis_is_reasoning_and_final_is_text() -> None:
    expected = [ReasoningPart("The sum is 3."), TextPart("It is < 3.\n\nYes <|.")]
    assert split([ANALYSIS + NEXT + FINAL]) == expected
    assert split([ANALYSIS + FINAL]) == expected  # without the next header's beginning
    assert split([FINAL]) == expected[1:]


def test_commentary_to_nobody_is_text_before_the_answer() -> None:
    text = f"<|channel|>commentary<|message|>I add.<|end|>{NEXT}{ANALYSIS}{NEXT}{FINAL}"
    assert split([text]) == [
        TextPart("I add."),
        ReasoningPart("The sum is 3."),
        TextPart("\nIt is < 3.\n\nYes <|."),
    ]


def test_what_is_said_to_a_tool_that_is_no_function_is_reasoning() -> None:
    assert split(["<|channel|>analysis to=python code<|message|>1+2<|call|>"]) == [
        ReasoningPart("1+2")
    ]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.add<|message|>",
        "<|channel|>analysis to=functions.add code<|message|>",
        " to=functions.add<|channel|>commentary json<|message|>",
    ],
)
def test_a_call_keeps_its_markup_in_one_form(header: str) -> None:
    assert split([header + ARGUMENTS + "<|call|>"]) == [TextPart(CALL + ARGUMENTS + "<|call|>")]
    assert split(list(ANALYSIS + NEXT + header + ARGUMENTS)) == [
        ReasoningPart("The sum is 3."),
        TextPart(CALL + ARGUMENTS),
    ]


@pytest.mark.parametrize("text", ["Yes.", "to be", " <b>", "t", "<|x|> no", "a <|message|> b"])
def test_an_answer_without_a_header_is_text(text: str) -> None:
    assert split([text]) == [TextPart(text)]
    assert split(list(text)) == [TextPart(text)]


def test_a_message_that_the_prompt_has_begun_goes_on() -> None:
    assert split(["2.<|end|>" + NEXT + FINAL], is_open=True)[0] == ReasoningPart("2.")
    assert split([" more<|return|>"], is_final=True) == [TextPart(" more")]


@given(
    st.lists(
        st.sampled_from([*HARMONY_MARKUP, "assistant", "analysis", "to=functions.f ", "<|", "x"])
    ),
    st.data(),
)
def test_any_division_gives_the_same_parts(chunks: list[str], data: st.DataObject) -> None:
    text = "".join(chunks)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert split(pieces) == split([text])


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    return make_model(tmp_path, TEMPLATE, special=HARMONY_MARKUP)


@pytest.mark.parametrize("way", ["streamed", "plain"])
def test_each_channel_reaches_its_field(model: ServedModel, way: str) -> None:
    completion = getattr(Answer(model, ANALYSIS + NEXT + FINAL), way)()
    message = completion.choices[0].message
    assert message.reasoning_content == "The sum is 3."
    assert message.content == "It is < 3.\n\nYes <|."


@pytest.mark.parametrize("way", ["streamed", "plain"])
@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_a_call_is_read_with_and_without_its_last_token(
    model: ServedModel, way: str, end: str
) -> None:
    answer = Answer(model, ANALYSIS + NEXT + CALL + ARGUMENTS + end, tools=[ADD])
    (choice,) = getattr(answer, way)().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "The sum is 3." and not choice.message.content
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", ARGUMENTS)


def test_the_format_is_taken_from_the_template_or_the_flags() -> None:
    found = ChatFormat.detect(TEMPLATE, None, None)
    assert (found.tools, found.reasoning) == (ToolFormat.OPENAI, ReasoningFormat.OPENAI_GPTOSS)
    assert set(HARMONY_MARKUP) <= set(found.markup)
    # The ends of a turn of other models, which are no text there.
    phi = ChatFormat.detect("<|user|>{{ m }}<|end|>\n<|assistant|>", None, None)
    assert phi.reasoning is None and not set(HARMONY_MARKUP) & set(phi.markup)
    assert ChatFormat.detect(PLAIN, "openai", "openai_gptoss") == found


def allows(model: ServedModel, directory: Path, text: str, **fields: Any) -> bool:
    """Whether the request's grammar allows this whole answer."""
    grammar = ask(model, **fields).requests[0].sampling.grammar
    assert grammar
    words = Tokenizer.from_file(str(directory / "tokenizer.json"))
    eos = model.info.eos_token_ids[0]
    tokens = LLTokenizer(words.to_str(), n_vocab=words.get_vocab_size(), eos_token=[eos])
    matcher = LLMatcher(tokens, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = [*words.encode(text, add_special_tokens=False).ids, eos]
    return bool(matcher.validate_tokens(ids) == len(ids))


def test_a_required_call_is_enforced_in_harmony(model: ServedModel, tmp_path: Path) -> None:
    required: dict[str, Any] = {"tools": [ADD, WEATHER], "tool_choice": "required"}
    assert allows(model, tmp_path, CALL + ARGUMENTS, **required)
    assert allows(model, tmp_path, ANALYSIS + NEXT + CALL + ARGUMENTS, **required)
    assert not allows(model, tmp_path, CALL + '{"a": 1, "b": 2000}', **required)
    assert not allows(model, tmp_path, FINAL.removesuffix("<|return|>"), **required)
    assert not allows(model, tmp_path, ARGUMENTS, **required)


def test_a_response_format_holds_in_the_final_message(model: ServedModel, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    final = "<|channel|>final<|message|>"
    for fields in ({}, {"tools": [ADD]}):
        wanted: dict[str, Any] = {"response_format": form, **fields}
        assert allows(model, tmp_path, final + '{"n": 3}', **wanted)
        assert allows(model, tmp_path, ANALYSIS + NEXT + final + '{"n": 3}', **wanted)
        assert not allows(model, tmp_path, '{"n": 3}', **wanted)
        assert not allows(model, tmp_path, final + "three", **wanted)
    answer = Answer(model, ANALYSIS + NEXT + final + '{"n": 3}', response_format=form)
    assert json.loads(answer.plain().choices[0].message.content) == {"n": 3}


def test_gemmas_thoughts_are_reasoning(tmp_path: Path) -> None:
    special = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
    template = PLAIN + "{# <|channel>thought<channel|> <|tool_call>call: #}"
    model = make_model(tmp_path, template, special=special)
    text = "<|channel>thought\nAdd.\n<channel|><|tool_call>call:add{a:1,b:2}<tool_call|>"
    for way in ("streamed", "plain"):
        message = getattr(Answer(model, text, tools=[ADD]), way)().choices[0].message
        assert message.reasoning_content == "Add." and not message.content
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    # Forced calls are JSON, after the thoughts.
    required: dict[str, Any] = {"tools": [ADD], "tool_choice": "required"}
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    assert allows(model, tmp_path, "<|channel>thought\nAdd.<channel|>" + call, **required)
    assert allows(model, tmp_path, call, **required)
