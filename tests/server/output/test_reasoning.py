"""Reasoning: the splitter, the wire, and the fields that reach the chat template."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.output.parts import Part, ReasoningPart, TextPart, merged
from penstock.server.output.reasoning import ReasoningFormat, ReasoningSplitter
from penstock.server.tools.chat_format import ChatFormat
from tests.support.chatting import ADD, PLAIN, QWEN, Answer, make_model, prompt_of

REASONED = "<think>\nIt is 2 < 3.\n</think>\n\nYes."


def split(pieces: list[str], *, is_open: bool = False) -> list[Part]:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    return merged([*parts, *splitter.end()])


def test_reasoning_and_text_are_split_without_the_space_around_the_markers() -> None:
    assert split([REASONED]) == [ReasoningPart("It is 2 < 3."), TextPart("Yes.")]


def test_reasoning_opened_by_the_prompt_needs_no_marker() -> None:
    text = REASONED.removeprefix("<think>")
    assert split([text], is_open=True) == [ReasoningPart("It is 2 < 3."), TextPart("Yes.")]


@pytest.mark.parametrize("text", ["Yes. <think> no", "<thin", " <b> ", "", "  "])
def test_an_answer_that_does_not_begin_with_the_marker_is_all_text(text: str) -> None:
    assert split([text]) == ([TextPart(text)] if text else [])
    assert split(list(text)) == split([text])


def test_reasoning_without_an_end_is_reasoning() -> None:
    assert split(["<think>Hm </thin"]) == [ReasoningPart("Hm </thin")]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "\n", " ", "x", "é"])),
    st.booleans(),
)
def test_any_division_gives_the_same_parts(chunks: list[str], is_open: bool) -> None:
    text = "".join(chunks)
    whole = split([text], is_open=is_open)
    assert split(chunks, is_open=is_open) == whole
    assert split(list(text), is_open=is_open) == whole
    kept = "".join(part.text for part in whole if isinstance(part, TextPart | ReasoningPart))
    lost = len("".join(text.split())) - len("".join(kept.split()))
    assert lost in (0, len("<think>"), len("</think>"), len("<think></think>"))


@pytest.mark.parametrize("way", ["streamed", "plain"])
def test_reasoning_reaches_the_client_apart_from_the_content(tmp_path: Path, way: str) -> None:
    answer = Answer(make_model(tmp_path, QWEN), REASONED)
    completion = getattr(answer, way)()
    message = completion.choices[0].message
    assert message.reasoning_content == "It is 2 < 3."
    assert message.content == "Yes."
    assert completion.choices[0].finish_reason == "stop"


def test_reasoning_tokens_are_counted_within_the_completion_tokens(tmp_path: Path) -> None:
    usage = Answer(make_model(tmp_path, QWEN), REASONED).plain().usage
    assert usage and usage.completion_tokens_details
    # Tokens are bytes; all but the last of the closing marker count as reasoning.
    num_inside = len("\nIt is 2 < 3.\n</think")
    assert usage.completion_tokens_details.reasoning_tokens == num_inside
    assert usage.completion_tokens == len(REASONED) + 1


def test_reasoning_may_precede_a_call(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    text = f"<think>I need <tool_call> here</think>\n{call}"
    message = Answer(make_model(tmp_path, QWEN), text, tools=[ADD]).streamed().choices[0].message
    assert message.model_extra and message.model_extra["reasoning_content"].startswith("I need <to")
    assert message.tool_calls and message.tool_calls[0].function.arguments == '{"a": 1}'
    assert not message.content


def test_reasoning_opened_by_the_template_is_split_off(tmp_path: Path) -> None:
    model = make_model(tmp_path, PLAIN + "<think>\n")
    message = Answer(model, "Hm.</think>Yes.").plain().choices[0].message
    assert message.model_extra and message.model_extra["reasoning_content"] == "Hm."
    assert message.content == "Yes."


def test_a_marker_in_a_users_message_opens_no_reasoning(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What does <think> mean?"}]
    answer = Answer(make_model(tmp_path, QWEN), "A thought.", messages=messages)
    assert answer.plain().choices[0].message.content == "A thought."


def test_the_reasoning_format_is_taken_from_the_template_or_the_flag() -> None:
    assert ChatFormat.detect("... </think> ...", None, None).reasoning is ReasoningFormat.QWEN3
    assert ChatFormat.detect("...", None, None).reasoning is None
    assert ChatFormat.detect("<think>", None, "none").reasoning is None
    flagged = ChatFormat.detect("...", None, "deepseek_r1")
    assert flagged.reasoning is ReasoningFormat.DEEPSEEK_R1


def test_with_deepseek_r1_all_before_the_closing_marker_is_reasoning(tmp_path: Path) -> None:
    model = make_model(tmp_path, PLAIN, reasoning_parser="deepseek_r1")
    message = Answer(model, "Hm.</think>Yes.").plain().choices[0].message
    assert message.model_extra and message.model_extra["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>Hm.</think>Yes.", "Hm."),
        ("\n<think>\nHm.</think>Yes.", "Hm."),
        ("<thin>Hm.</think>Yes.", "<thin>Hm."),
        ("Hm. <think></think>Yes.", "Hm. <think>"),
        ("<think> <think>Hm.</think>Yes.", "<think>Hm."),
    ],
)
def test_a_marker_that_opens_open_reasoning_is_dropped(
    tmp_path: Path, text: str, reasoning: str
) -> None:
    model = make_model(tmp_path, PLAIN, reasoning_parser="deepseek_r1")
    message = Answer(model, text).plain().choices[0].message
    assert message.model_extra and message.model_extra["reasoning_content"] == reasoning
    assert message.content == "Yes."


def test_enable_thinking_false_reaches_the_template_and_the_answer_is_text(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path, QWEN)
    kwargs = {"enable_thinking": False}
    prompt = prompt_of(model, chat_template_kwargs=kwargs)
    assert prompt == "<user>Hi<assistant><think>\n\n</think>\n\n"
    answer = Answer(model, "Yes.", chat_template_kwargs=kwargs)
    assert answer.plain().choices[0].message.content == "Yes."


def test_earlier_reasoning_reaches_the_template(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
    prompt = prompt_of(make_model(tmp_path, QWEN), messages=messages)
    assert prompt == "<assistant><think>Hm.</think>Yes.<assistant>"


def test_a_final_message_that_is_continued_stays_open(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    template = PLAIN.replace("{% endfor %}", "<end>\n{% endfor %}")
    model = make_model(tmp_path, template)
    prompt = prompt_of(model, messages=messages, continue_final_message=True)
    assert prompt == "<user>Hi<end>\n<assistant>Well, "


@pytest.mark.parametrize("prefix", ["<", "im", "end", "|", " ", "\n", "a  "])
def test_a_final_message_whose_text_occurs_in_the_markup_after_it_stays_open_too(
    tmp_path: Path, prefix: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": prefix}]
    template = PLAIN.replace("{% endfor %}", "<|im_end|>\n{% endfor %}")
    prompt = prompt_of(
        make_model(tmp_path, template), messages=messages, continue_final_message=True
    )
    assert prompt == f"<user>Hi<|im_end|>\n<assistant>{prefix}"


def test_a_template_that_trims_messages_trims_the_continued_one(
    tmp_path: Path,
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    template = PLAIN.replace("{% endfor %}", "<end>{% endfor %}").replace(
        "m.content", "m.content | trim"
    )
    prompt = prompt_of(
        make_model(tmp_path, template), messages=messages, continue_final_message=True
    )
    assert prompt == "<user>Hi<end><assistant>Well,"


def test_add_generation_prompt_false_leaves_it_out(tmp_path: Path) -> None:
    assert prompt_of(make_model(tmp_path, QWEN), add_generation_prompt=False) == "<user>Hi"


def test_a_request_may_contain_a_template_if_the_server_trusts_it(tmp_path: Path) -> None:
    model = make_model(tmp_path, QWEN, trusts_templates=True)
    template = "{{ messages | length }} {{ mood }}"
    prompt = prompt_of(model, chat_template=template, chat_template_kwargs={"mood": "glad"})
    assert prompt == "1 glad"


def test_a_stream_of_reasoning_has_no_content_until_the_text_begins(tmp_path: Path) -> None:
    sse = Answer(make_model(tmp_path, QWEN), REASONED).sse
    events = [json.loads(e[6:]) for e in sse.split(b"\n\n") if e.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    kinds = [next(iter(delta), None) for delta in deltas]
    last_reasoning = len(kinds) - 1 - kinds[::-1].index("reasoning_content")
    assert kinds[1 : last_reasoning + 1] == ["reasoning_content"] * last_reasoning
    assert "".join(d.get("content") or "" for d in deltas) == "Yes."
