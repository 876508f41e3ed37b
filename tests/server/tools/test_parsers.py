"""The text of answers to text and calls: each format, any division, and text that is not a call."""

import json
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.server.api.openai.chat_writer import message_of
from penstock.server.output.json_scanner import JsonScanner
from penstock.server.output.parts import CallArguments, CallStart, Part, TextPart, merged
from penstock.server.tools.parsers.base import ToolParser
from penstock.server.tools.parsers.header_calls import MistralParser
from penstock.server.tools.parsers.json_calls import (
    HermesParser,
    JsonParser,
    Llama3JsonParser,
    NamedCallParser,
)
from penstock.server.tools.parsers.pythonic import PythonicParser

NAMES = frozenset(("add", "get_weather", "say"))
PARSERS = (HermesParser, JsonParser, Llama3JsonParser, MistralParser, PythonicParser)
Call = tuple[str, dict[str, object]]
ADD: Call = ("add", {"a": 1, "b": 2})
SAY: Call = ("say", {"text": "Ü \"]}[{('\\n</tool_call>", "deep": {"x": [1, None, True, {}]}})


def read(kind: type[ToolParser], pieces: list[str], **options: Any) -> list[Part]:
    numbers = count()
    parser = kind(NAMES, make_id=lambda: f"call_{next(numbers)}", **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.end()])


def calls_of(parts: list[Part]) -> list[tuple[str, object]]:
    calls = message_of(parts).get("tool_calls", [])
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def as_json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def hermes(*calls: Call) -> str:
    return "\n".join(f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in calls)


def pythonic(*calls: Call) -> str:
    calls_text = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"[{', '.join(calls_text)}]"


BOTH = [ADD, SAY]
EXAMPLES = [
    (HermesParser, hermes(ADD, SAY)),
    (HermesParser, hermes(ADD, SAY).replace("\n", "")),
    (JsonParser, f"[{as_json(ADD)}, {as_json(SAY)}]"),
    (JsonParser, f"{as_json(ADD)}\n{as_json(SAY)}"),
    (JsonParser, json.dumps([{"type": "function", "arguments": a, "name": n} for n, a in BOTH])),
    (Llama3JsonParser, f"{as_json(ADD, 'parameters')}; {as_json(SAY, 'parameters')}"),
    (Llama3JsonParser, f"<|python_tag|>{as_json(ADD, 'parameters')};{as_json(SAY)}"),
    (MistralParser, f"[TOOL_CALLS] [{as_json(ADD)}, {as_json(SAY)}]"),
    (MistralParser, "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in BOTH)),
    (MistralParser, "".join(f"[TOOL_CALLS]{n}{json.dumps(a)}" for n, a in BOTH)),
    (PythonicParser, pythonic(ADD, SAY)),
    (PythonicParser, f"<|python_start|>{pythonic(ADD, SAY)}<|python_end|>"),
]


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_two_calls_are_read_with_arguments_and_no_text(kind: type[ToolParser], text: str) -> None:
    parts = read(kind, [text])
    assert calls_of(parts) == BOTH
    assert text_of(parts) == ""


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_an_answer_of_calls_has_no_part_of_text(kind: type[ToolParser], text: str) -> None:
    """Responses would have a message for one, even if it is empty."""
    assert all(isinstance(part, CallStart | CallArguments) for part in read(kind, [text]))


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_text_before_and_after_calls_stays_text(kind: type[ToolParser], text: str) -> None:
    parts = read(kind, [f"  Let me see.\n{text}\nDone. "])
    assert calls_of(parts) == BOTH
    assert text_of(parts).replace(",", "") == "  Let me see.Done. "


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_every_division_in_two_and_single_characters_give_the_same(
    kind: type[ToolParser], text: str
) -> None:
    text = f"Well\n{text}\n"
    whole = read(kind, [text])
    assert read(kind, list(text)) == whole
    for cut in range(len(text)):
        assert read(kind, [text[:cut], text[cut:]]) == whole


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_only_the_first_part_of_a_call_has_id_and_name(kind: type[ToolParser], text: str) -> None:
    starts = [part for part in read(kind, list(text)) if isinstance(part, CallStart)]
    assert starts == [CallStart(0, "call_0", "add"), CallStart(1, "call_1", "say")]


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_with_one_call_allowed_the_first_ends_the_answer(kind: type[ToolParser], text: str) -> None:
    assert calls_of(read(kind, list(text), max_calls=1)) == [ADD]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HermesParser, "<tool_call>{}</tool_call>"),
        (HermesParser, "<tool_call>none</tool_call>"),
        (HermesParser, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (HermesParser, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HermesParser, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (HermesParser, '<tool_call>{"name": "add", "argum'),
        (HermesParser, "<tool_call><tool_call><tool"),
        (JsonParser, '{"title": "A book", "pages": [1, 2]}'),
        (JsonParser, '{"name": "unknown", "arguments": {}}'),
        (JsonParser, '[1, 2, {"name": "add"}]'),
        (JsonParser, 'so {"name": "add", "arguments": {}}'),
        (JsonParser, '{{{"name": "add"}}}'),
        (Llama3JsonParser, "<|python_tag|>print(1)"),
        (Llama3JsonParser, '{"name": "\\ud800", "parameters": {}}'),
        (MistralParser, "[TOOL_CALLS]"),
        (MistralParser, "[TOOL_CALLS] [3]"),
        (MistralParser, "[TOOL_CALLS]two words{}"),
        (PythonicParser, "[1, 2, 3]"),
        (PythonicParser, "[add, say]"),
        (PythonicParser, "[print(1)]"),
        (PythonicParser, "[add(1, 2)]"),
        (PythonicParser, "[add(a=f())]"),
        (PythonicParser, "[add(a='\\ud800')]"),
        (PythonicParser, "[add(a=1"),
        (PythonicParser, "[add(" + "(" * 3000),
        (PythonicParser, "[add(a=" + "-" * 9000 + "1)]"),
    ],
)
def test_text_that_is_not_a_call_is_unchanged(kind: type[ToolParser], text: str) -> None:
    assert read(kind, [text]) == [TextPart(text)]
    assert read(kind, list(text)) == [TextPart(text)]


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = HermesParser(NAMES, make_id=lambda: "call_0")
    parts = parser.feed('<tool_call>{"name": "add", "arguments": {"a": 1')
    assert parts == [CallStart(0, "call_0", "add"), CallArguments(0, '{"a": 1')]
    assert parser.feed(', "b": 2}') == [CallArguments(0, ', "b": 2}')]


def test_text_after_malformed_arguments_is_text() -> None:
    parts = read(HermesParser, ['<tool_call>{"name": "add", "arguments": {"a": oops}} and so on'])
    assert isinstance(parts[0], CallStart)
    assert parts[1] == CallArguments(0, '{"a": ')
    assert text_of(parts) == "oops}} and so on"


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert calls_of(read(HermesParser, ['<tool_call>{"name": "add"}</tool_call>'])) == [("add", {})]
    assert calls_of(read(PythonicParser, ["[add()]"])) == [("add", {})]


def test_arguments_in_a_string_of_json_are_unpacked() -> None:
    text = json.dumps({"name": "add", "arguments": json.dumps({"a": 1})})
    assert calls_of(read(JsonParser, [text])) == [("add", {"a": 1})]


def test_literals_of_python_and_json_both_become_json() -> None:
    parts = read(PythonicParser, ["[say(a=True, b=none, c=-1.5)]"])
    assert calls_of(parts) == []  # none is a literal of neither
    parts = read(PythonicParser, ["[say(a=True, b=null, c=[false, None], d=-1.5)]"])
    assert calls_of(parts) == [("say", {"a": True, "b": None, "c": [False, None], "d": -1.5})]


def test_strings_with_unknown_escapes_are_read_as_in_python() -> None:
    parts = read(PythonicParser, [r"[say(a='\d+', b='\n')]"])
    assert calls_of(parts) == [("say", {"a": r"\d+", "b": "\n"})]


def test_unclosed_markup_is_read_in_bounded_time() -> None:
    for text in (
        "[add(a=" + "-" * 50_000 + "1)]",
        "[add(a=" + "[" * 50_000,
        '{"name"' + " " * 9999,
    ):
        assert read(PythonicParser, [text]) == [TextPart(text)]
        assert text_of(read(JsonParser, [text])) == text


def test_a_named_call_is_all_arguments() -> None:
    parser = NamedCallParser("add", make_id=lambda: "call_0")
    assert parser.feed("") == []
    assert parser.feed('{"a"') == [CallStart(0, "call_0", "add"), CallArguments(0, '{"a"')]
    assert parser.feed(": 1}") == [CallArguments(0, ": 1}")]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
MARKUP = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "add", "say")
OBJECT = ('{"name": "add", "arguments": ', '"name"', ": ", ", ", "{", "}", "[", "]", "(", ")")
CHARS = ("\n", " ", "a=1", '"', "'", "\\", "\\u00", "1", "-", "<", "null", "é", ";")
CHUNKS = st.lists(st.sampled_from(MARKUP + OBJECT + CHARS))


@given(st.sampled_from(PARSERS), CHUNKS, st.data())
def test_any_division_of_any_text_gives_the_same_parts(
    kind: type[ToolParser], chunks: list[str], data: st.DataObject
) -> None:
    text = "".join(chunks)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert read(kind, pieces) == read(kind, [text])


@given(st.sampled_from(PARSERS), CHUNKS)
def test_a_text_without_calls_loses_no_character(kind: type[ToolParser], chunks: list[str]) -> None:
    text = "".join(chunks)
    parts = read(kind, [text])
    if not any(isinstance(part, CallStart) for part in parts):
        assert text_of(parts) == text


@given(JSON, st.booleans(), st.sampled_from([None, 2]))
@example([-0.0, 1e-7, "\x7f"], True, None)
def test_the_scanner_finds_the_end_of_every_json_value(
    value: object, is_ascii: bool, indent: int | None
) -> None:
    text = json.dumps({"k": value}, ensure_ascii=is_ascii, indent=indent)
    scanner = JsonScanner()
    for i, char in enumerate(text):
        assert not scanner.is_done, text[:i]
        assert scanner.feed(char), text[: i + 1]
    assert scanner.is_done


@given(st.text(alphabet='{}[]":,\\ux0a1-.eE+tru fals n\n'))
def test_text_that_the_scanner_accepts_is_valid_json(text: str) -> None:
    scanner = JsonScanner()
    for i, char in enumerate(text):
        if not scanner.feed(char):
            return
        if scanner.is_done:
            json.loads(text[: i + 1])
            return
