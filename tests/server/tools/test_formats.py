"""The formats of newer models: XML, and names between markers; types, streaming, any division."""

import json
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.api.openai.chat_writer import message_of
from penstock.server.output.parts import CallArguments, CallStart, Part, TextPart, merged
from penstock.server.tools.chat_format import ChatFormat
from penstock.server.tools.parsers import ToolFormat
from penstock.server.tools.parsers.base import ToolParser
from penstock.server.tools.parsers.gemma import GemmaParser
from penstock.server.tools.parsers.header_calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    DeepSeekParser,
    HarmonyParser,
    KimiParser,
)
from penstock.server.tools.parsers.json_calls import MarkedListParser
from penstock.server.tools.parsers.pythonic import Olmo3Parser
from penstock.server.tools.parsers.tagged import (
    GlmParser,
    MinimaxParser,
    QwenCoderParser,
    SeedOssParser,
)

NAMES = frozenset(("add", "say"))
SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
    },
    "say": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "loud": {"type": "boolean"},
            "to": {"type": ["array", "null"], "items": {"type": "string"}},
            "more": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        },
    },
}
Call = tuple[str, dict[str, object]]
ADD: Call = ("add", {"a": 1, "b": 2})
TEXT = 'Ü "x" <b>\n</par\\n 5'
SAY: Call = ("say", {"text": TEXT, "loud": True, "to": ["a", "b"], "more": "7 up"})
BOTH = [ADD, SAY]


def bare(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def qwen(*calls: Call) -> str:
    def one(name: str, arguments: dict[str, object]) -> str:
        parameters = (f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def seed(*calls: Call) -> str:
    def one(name: str, arguments: dict[str, object]) -> str:
        parameters = (f"<parameter={k}>{bare(v)}</parameter>\n" for k, v in arguments.items())
        return f"<function={name}>\n{''.join(parameters)}</function>"

    return "\n".join(f"<seed:tool_call>\n{one(*call)}\n</seed:tool_call>" for call in calls)


def glm(*calls: Call, line: str = "\n") -> str:
    def one(name: str, arguments: dict[str, object]) -> str:
        pairs = arguments.items()
        keys = (f"<arg_key>{k}</arg_key>{line}<arg_value>{bare(v)}</arg_value>" for k, v in pairs)
        return f"<tool_call>{line.join([name, *keys])}{line}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def minimax(*calls: Call) -> str:
    def one(name: str, arguments: dict[str, object]) -> str:
        pairs = arguments.items()
        keys = (f'<parameter name="{k}">{bare(v)}</parameter>\n' for k, v in pairs)
        return f'<invoke name="{name}">\n{"".join(keys)}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*c) for c in calls)}</minimax:tool_call>"


def deepseek(*calls: Call) -> str:
    calls_text = (f"{CALL_BEGIN}{n}{SEPARATOR}{json.dumps(a)}{CALL_END}" for n, a in calls)
    return f"{CALLS_BEGIN}{''.join(calls_text)}{CALLS_END}"


def deepseek_v3(*calls: Call) -> str:
    calls_text = (
        f"{CALL_BEGIN}function{SEPARATOR}{n}\n```json\n{json.dumps(a)}\n```{CALL_END}"
        for n, a in calls
    )
    return f"{CALLS_BEGIN}{chr(10).join(calls_text)}{CALLS_END}"


def kimi(*calls: Call) -> str:
    calls_text = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(calls_text)}<|tool_calls_section_end|>"


def phi(*calls: Call) -> str:
    listed = json.dumps([{"name": n, "arguments": a} for n, a in calls])
    return f"<|tool_call|>{listed}<|/tool_call|>"


def olmo(*calls: Call) -> str:
    lines = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"<function_calls>\n{chr(10).join(lines)}\n</function_calls>"


def gemma(*calls: Call, space: str = "") -> str:
    def value(each: object) -> str:
        if isinstance(each, str):
            return f'<|"|>{each}<|"|>'
        if isinstance(each, list):
            return f"[{f',{space}'.join(map(value, each))}]"
        if isinstance(each, dict):
            return f"{{{f',{space}'.join(f'{k}:{space}{value(v)}' for k, v in each.items())}}}"
        return json.dumps(each)

    return "".join(f"<|tool_call>call:{name}{value(a)}<tool_call|>" for name, a in calls)


def harmony(*calls: Call, constrain: str = " <|constrain|>json") -> str:
    return "".join(
        f"<|channel|>commentary to=functions.{name}{constrain}<|message|>{json.dumps(a)}<|call|>"
        for name, a in calls
    )


EXAMPLES = [
    (Olmo3Parser, olmo(*BOTH)),
    (Olmo3Parser, olmo(*BOTH).replace(">\n", ">").replace("\n<", "<")),
    (Olmo3Parser, "\n".join(olmo(call) for call in BOTH)),
    (GemmaParser, gemma(*BOTH)),
    (GemmaParser, gemma(*BOTH, space=" ")),
    (GemmaParser, gemma(*BOTH).replace("text:", '<|"|>text<|"|>:')),
    (HarmonyParser, harmony(*BOTH)),
    (HarmonyParser, harmony(*BOTH, constrain=" json")),
    (HarmonyParser, harmony(*BOTH, constrain="")),
    (QwenCoderParser, qwen(*BOTH)),
    (QwenCoderParser, qwen(*BOTH).replace("<tool_call>\n", "").replace("\n</tool_call>", "")),
    (SeedOssParser, seed(*BOTH)),
    (GlmParser, glm(*BOTH)),
    (GlmParser, glm(*BOTH, line="")),
    (MinimaxParser, minimax(*BOTH)),
    (DeepSeekParser, deepseek(*BOTH)),
    (DeepSeekParser, deepseek_v3(*BOTH)),
    (DeepSeekParser, deepseek(*BOTH).removeprefix(CALLS_BEGIN).removesuffix(CALLS_END)),
    (KimiParser, kimi(*BOTH)),
    (MarkedListParser, phi(*BOTH)),
    (MarkedListParser, phi(*BOTH).removesuffix("<|/tool_call|>")),
]
PARSERS = tuple(dict.fromkeys(kind for kind, _ in EXAMPLES))


def read(kind: type[ToolParser], pieces: list[str], **options: int) -> list[Part]:
    numbers = count()
    parser = kind(NAMES, schemas=SCHEMAS, make_id=lambda: f"call_{next(numbers)}", **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.end()])


def calls_of(parts: list[Part]) -> list[tuple[str, object]]:
    calls = message_of(parts).get("tool_calls", [])
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_two_calls_are_read_with_types_and_no_text(kind: type[ToolParser], text: str) -> None:
    parts = read(kind, [text])
    assert calls_of(parts) == BOTH
    assert text_of(parts) == ""


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_text_before_and_after_the_calls_stays_text(kind: type[ToolParser], text: str) -> None:
    parts = read(kind, [f"  Let me see.\n{text}\nDone. "])
    assert calls_of(parts) == BOTH
    assert text_of(parts) == "  Let me see.Done. "


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
def test_with_one_call_allowed_text_after_it_is_ignored(kind: type[ToolParser], text: str) -> None:
    assert calls_of(read(kind, list(text), max_calls=1)) == [ADD]


@pytest.mark.parametrize("kind", [QwenCoderParser, GlmParser, MinimaxParser])
def test_a_string_streams_before_it_is_complete(kind: type[ToolParser]) -> None:
    whole = next(text for each, text in EXAMPLES if each is kind)
    parser = kind(NAMES, schemas=SCHEMAS)
    parts = parser.feed(whole[: whole.index("<b>")])
    assert isinstance(parts[-1], CallArguments)
    assert parts[-1].text.endswith('{"text": "Ü \\"x\\" ')


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (QwenCoderParser, "<tool_call>none</tool_call>"),
        (QwenCoderParser, "<tool_call>\n<function=add"),
        (QwenCoderParser, "<function=two words>"),
        (GlmParser, "<tool_call>{}</tool_call>"),
        (GlmParser, "<tool_call>"),
        (MinimaxParser, "<minimax:tool_call>no"),
        (MinimaxParser, '<invoke name="add">'),
        (DeepSeekParser, CALLS_BEGIN + "no"),
        (DeepSeekParser, CALL_BEGIN + "two words{}"),
        (DeepSeekParser, CALL_BEGIN + "add"),
        (KimiParser, "<|tool_call_begin|>add{}"),
        (MarkedListParser, "<|tool_call|>[1]"),
        (GemmaParser, "<|tool_call>add{a:1}<tool_call|>"),
        (GemmaParser, "<|tool_call>call:two words{}"),
        (GemmaParser, "<|tool_call>call:add"),
        (HarmonyParser, "<|channel|>final<|message|>{}"),
        (HarmonyParser, "<|channel|>commentary to=python<|message|>{}"),
        (Olmo3Parser, "<function_calls>"),
        (Olmo3Parser, "<function_calls>\n</function_calls>"),
        (Olmo3Parser, "<function_calls>\nadd(1)\n</function_calls>"),
        (Olmo3Parser, "add(a=1)"),
    ],
)
def test_text_that_is_not_a_call_is_unchanged(kind: type[ToolParser], text: str) -> None:
    assert read(kind, [text]) == [TextPart(text)]
    assert read(kind, list(text)) == [TextPart(text)]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.0", {"type": "number"}, 5.0),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ('{"x": [1]}', {"type": "object"}, {"x": [1]}),
        ("not JSON", {"type": "object"}, "not JSON"),
        ("NaN", {"type": "number"}, "NaN"),
        ("5", {}, 5),
        ("five", {}, "five"),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("2", {"enum": [1, 2]}, 2),
        ("", {"type": "string"}, ""),
        (" x\n", {"type": "string"}, " x\n"),
    ],
)
def test_the_schema_gives_the_type_of_a_value_without_quotes(
    text: str, types: dict[str, object], value: object
) -> None:
    parser = QwenCoderParser(NAMES, schemas={"add": {"properties": {"v": types}}})
    parts = parser.feed(f"<function=add><parameter=v>\n{text}\n</parameter></function>")
    ((_, arguments),) = calls_of(parts)
    assert arguments == {"v": value}
    assert isinstance(arguments, dict) and type(arguments["v"]) is type(value)


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert calls_of(read(QwenCoderParser, [qwen(("add", {}))])) == [("add", {})]
    assert calls_of(read(GlmParser, [glm(("add", {}))])) == [("add", {})]
    assert calls_of(read(GlmParser, [glm(("add", {}), line="")])) == [("add", {})]


def test_malformed_markup_ends_the_arguments_and_the_rest_is_text() -> None:
    text = "<function=add>\n<parameter=a>\n1\n</parameter>\nand so on"
    parts = read(QwenCoderParser, [text])
    assert calls_of(parts) == [("add", {"a": 1})]
    assert text_of(parts) == "\nand so on"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{}", {}),
        ("{a:-1.5e3,b:true,c:null,d:None}", {"a": -1500.0, "b": True, "c": None, "d": None}),
        ('{a:{b:[{},[],{c:<|"|>,}]<|"|>}]}}', {"a": {"b": [{}, [], {"c": ",}]"}]}}),
        ('{ a : [ 1 , <|"|>x<|"|> ] }', {"a": [1, "x"]}),
        ('{a:Paris,"b":"x"}', {"a": "Paris", "b": "x"}),
        ('{<|"|>a:b<|"|>:<|"|><|"|>}', {"a:b": ""}),
    ],
)
def test_gemmas_values_become_json(written: str, expected: dict[str, object]) -> None:
    text = f"<|tool_call>call:add{written}<tool_call|>"
    assert calls_of(read(GemmaParser, list(text))) == [("add", expected)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{a:1]", {"a": None}),
        ("{a:1,b", {"a": 1}),
        ("{a:1,}", {"a": 1}),
        ('{a:[<|"|>x<|"|>;', {"a": ["x"]}),
        ("{a:,", {"a": None}),
        ("{,", {}),
    ],
)
def test_gemmas_malformed_arguments_end_as_valid_json(
    written: str, expected: dict[str, object]
) -> None:
    parts = read(GemmaParser, list(f"<|tool_call>call:add{written}}} and so on"))
    ((_, arguments),) = calls_of(parts)
    assert arguments == expected


def test_kimis_ids_are_kept_since_its_template_shows_them_again() -> None:
    starts = [part for part in read(KimiParser, [kimi(*BOTH)]) if isinstance(part, CallStart)]
    assert [start.id for start in starts] == ["functions.add:0", "functions.say:1"]


PIECES = ("<tool_call>", "</tool_call>", "<function=", "add", ">", "<parameter=", "a", "\n", "1")
MORE = ("</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKS = (CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END, "{", "}", '"a": 1', "```", "x")
NEWEST = (
    *('<|"|>', "<|tool_call>", "call:say", "<tool_call|>", "text:", ",", "[", "]", "null"),
    *("<function_calls>", "</function_calls>", "add(a=1)", "<|channel|>", "<|message|>"),
    *("commentary to=functions.add", "<|call|>"),
)
OTHERS = ('<invoke name="', '">', '<parameter name="', "</invoke>", "<minimax:tool_call>", "<|")
CHUNKS = st.lists(st.sampled_from(PIECES + MORE + MARKS + OTHERS + NEWEST))


@given(st.sampled_from(PARSERS), CHUNKS, st.data())
def test_any_division_of_any_text_gives_the_same(
    kind: type[ToolParser], chunks: list[str], data: st.DataObject
) -> None:
    text = "".join(chunks)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = read(kind, [text])
    assert read(kind, pieces) == whole
    if not any(isinstance(part, CallStart) for part in whole):
        assert text_of(whole) == text


@given(st.text())
def test_any_string_is_read_back(value: str) -> None:
    call: Call = ("say", {"text": value})
    assert calls_of(read(QwenCoderParser, list(qwen(call)))) == [call]
    assert calls_of(read(GlmParser, list(glm(call)))) == [call]
    if '<|"|>' not in value:
        assert calls_of(read(GemmaParser, list(gemma(call)))) == [call]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>\n<function=x>", ToolFormat.QWEN3_CODER),
        ("<tool_call>{{ name }}<arg_key>", ToolFormat.GLM45),
        ("<minimax:tool_call>", ToolFormat.MINIMAX_M2),
        ("<|tool_calls_section_begin|>", ToolFormat.KIMI_K2),
        (f"{CALLS_BEGIN}```json", ToolFormat.DEEPSEEK_V3),
        (CALLS_BEGIN, ToolFormat.DEEPSEEK_V31),
        ("<|tool|>{{ tools }}<|/tool|>", ToolFormat.PHI4_MINI_JSON),
        ("<|tool_call|>", ToolFormat.GRANITE),
        ("<function_calls>{{ calls }}</function_calls>", ToolFormat.OLMO3),
        ("<|tool_call>call:{{ name }}", ToolFormat.GEMMA4),
        ("<|start|>assistant<|channel|>analysis<|message|>", ToolFormat.OPENAI),
    ],
)
def test_these_formats_are_detected_from_the_template_too(template: str, form: ToolFormat) -> None:
    assert ChatFormat.detect(template, None, None).tools is form
