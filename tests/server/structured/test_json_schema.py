"""Rewritten schemas allow the same values, as judged by `jsonschema` and llguidance's grammars."""

import contextlib
import json
import time
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from llguidance import LLMatcher

from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.server.structured.constraint import enforced_json
from penstock.server.structured.grammar import grammar_text
from penstock.server.structured.json_schema import Unenforceable, enforceable
from tests.support.paths import DEMO_MODEL
from tests.support.structured import closed

TEXT, INT, ANY = {"type": "string"}, {"type": "integer"}, True
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 5, 7, -4, 1.5, 2.0, 1e9),
    *("", "a", "b", "ab", "abc", "a\n", "\n", "é", "cat", "dog", "x-1", "𝄞"),
    *([], [1], [2], [1, 2], [2, 1], [1, 1], ["a"], ["a", "b"], ["b", "a"], ["a", "a"], [None]),
    *([True, False], [1, "a"], ["a", 1, 2], [[1]], [{}], ["a", "b", "c"], [1, 2, 3, 4]),
    *({}, {"a": 1}, {"a": "a"}, {"b": 1}, {"b": "b"}, {"a": "a", "b": "b"}, {"a": 1, "b": 2}),
    *(
        {"c": 1},
        {"a": "x", "c": 1},
        {"kind": "cat"},
        {"kind": "dog", "a": 1},
        {"kind": "cat", "b": 1},
    ),
    *({"aa": 1}, {"aa": "x"}, {"a": None}, {"a": {"b": 1}}, {"a": "a", "b": "b", "c": "c"}),
]
CLOSED = closed({"a": ANY, "b": ANY, "c": ANY}, "a", "b", "c")
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}

REWRITTEN: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"not": {"type": ["string", "null", "array"]}},
    {"not": {"const": "a"}},
    {"not": {"enum": ["a", "ab", "", "cat", "é", "𝄞"]}},
    {"not": {"enum": [1, 2.0, None, True]}},
    {"type": "integer", "not": {"const": 0}},
    {"type": "integer", "not": {"enum": [1, 3, 5]}, "minimum": 0},
    {"type": ["integer", "string"], "not": {"type": "integer"}},
    {"type": "string", "not": {"enum": ["cat", "dog"]}, "maxLength": 3},
    {"not": {"required": ["a"]}},
    {"type": "object", "not": {"required": ["a", "b"]}},
    {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {"not": {"properties": {"a": TEXT}, "required": ["a"]}},
    {"not": {"minimum": 2}},
    {"not": {"minimum": 2, "maxLength": 1}},
    {"not": {"minLength": 2}},
    {"not": {"maxItems": 1}},
    {"not": {"not": {"type": "array"}}},
    {"not": {"allOf": [{"minimum": 1}, {"maximum": 3}]}},
    {"not": {"$ref": "#/$defs/few"}, "$defs": {"few": {"enum": ["a", 1]}}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "integer"}},
    {"if": {"type": "string"}, "else": {"maximum": 2}},
    {"if": CAT, "then": {"required": ["b"]}, "else": {"properties": {"a": INT}}},
    {"if": {"properties": {"kind": {"const": "cat"}}}, "then": {"required": ["b"]}},
    {"if": {"type": "string"}},
    {"then": {"type": "string"}},
    {"oneOf": [TEXT, INT]},
    {"oneOf": [TEXT, {"maxLength": 1}]},
    {"oneOf": [{"minimum": 2}, {"maximum": 5}]},
    {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 2}]},
    {"oneOf": [CAT, DOG]},
    {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"enum": [1, 2, 3]}, {"enum": [3, "a"]}]},
    {"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]},
    {"oneOf": [True, {"type": "string"}]},
    {"oneOf": [False, {"type": "string"}]},
    {"uniqueItems": False},
    {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2},
    {"items": {"type": "boolean"}, "uniqueItems": True},
    {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1},
    {"type": "array", "contains": TEXT, "maxItems": 3},
    {"contains": {"const": 2}, "items": INT, "maxItems": 3},
    {"type": "array", "contains": TEXT, "minContains": 0},
    {"dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentRequired": {"a": ["b", "c"], "kind": ["a"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"dependencies": {"a": ["b"], "kind": {"properties": {"a": INT}}}},
    {**CLOSED, "minProperties": 1},
    {**CLOSED, "minProperties": 2, "maxProperties": 2},
    {**CLOSED, "maxProperties": 1, "required": ["a"]},
    {**CLOSED, "maxProperties": 0},
    {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": INT},
    {"type": "object", "propertyNames": {"maxLength": 1}},
    {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 4}},
    {"type": "object", "propertyNames": False},
    {"type": "object", "properties": {"a": ANY}, "unevaluatedProperties": False},
    {
        "allOf": [{"properties": {"a": TEXT}}],
        "properties": {"b": ANY},
        "unevaluatedProperties": INT,
    },
    {"prefixItems": [TEXT], "unevaluatedItems": INT},
    {"type": "string", "format": "password"},
    {"x-guidance": {"lenient": True}, "type": "string"},
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(GrammarCompiler(DEMO_MODEL, 2048, (2, 0)))


def allows(grammars: Grammars, schema: dict[str, Any], value: Any) -> bool:
    """Whether the value matches in some order of its properties: the grammar fixes one."""
    grammar = grammar_text(enforced_json(schema))
    assert grammar
    matcher = grammars.compile(grammar).result()
    orders = [value]
    if isinstance(value, dict):
        orders = [dict(items) for items in permutations(value.items())]
    return any(accepts(grammars, matcher.deep_copy(), order) for order in orders)


def accepts(grammars: Grammars, matcher: LLMatcher, value: Any) -> bool:
    assert grammars._compiler._tokenizer
    ids = grammars._compiler._tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("schema", REWRITTEN, ids=json.dumps)
def test_a_rewritten_schema_has_the_same_values(schema: dict[str, Any], grammars: Grammars) -> None:
    validator = Draft7Validator if "dependencies" in schema else Draft202012Validator
    before, after = validator(schema), Draft202012Validator(enforceable(schema))
    for value in VALUES:
        expected = before.is_valid(value)
        assert after.is_valid(value) == expected, (value, enforceable(schema))
        # Numbers written with a point or an exponent are not integers to llguidance.
        if not isinstance(value, float):
            assert allows(grammars, schema, value) == expected, (value, enforceable(schema))


LEAVES = st.sampled_from(
    [
        *(TEXT, INT, True, False, {"type": "null"}, {"const": "a"}, {"enum": ["a", 1, None]}),
        *({"minimum": 2}, {"maxLength": 1}, {"required": ["a"]}, {"maxItems": 1}, CAT, DOG),
        {"type": ["object", "string"]},
    ]
)


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda s: {"not": s}, inner),
        st.builds(lambda s: {"oneOf": s}, some),
        st.builds(lambda s: {"anyOf": s}, some),
        st.builds(lambda s: {"allOf": s}, some),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a, b: {"properties": {"a": a, "kind": b}}, inner, inner),
        st.builds(lambda s: {"type": "object", "dependentSchemas": {"a": s}}, inner),
        st.builds(lambda s: {"contains": s, "maxItems": 2}, inner),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(LEAVES, deeper, max_leaves=6))
def test_any_rewritten_schema_has_the_same_values(schema: Any) -> None:
    schema = {"allOf": [schema]}
    try:
        after = Draft202012Validator(enforceable(schema))
    except Unenforceable:
        return
    before = Draft202012Validator(schema)
    for value in VALUES:
        assert after.is_valid(value) == before.is_valid(value), (value, enforceable(schema))


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"not": {"pattern": "a"}}, "not", "#"),
        ({"properties": {"x": {"not": {"multipleOf": 2}}}}, "not", "#/properties/x"),
        ({"items": {"type": "array", "uniqueItems": True}}, "uniqueItems", "#/items"),
        ({"items": {"enum": list(range(9))}, "uniqueItems": True}, "uniqueItems", "#"),
        ({"$defs": {"d": {"contains": TEXT}}, "$ref": "#/$defs/d"}, "contains", "#/$defs/d"),
        ({"contains": TEXT, "maxItems": 4, "minContains": 2}, "contains", "#"),
        ({"anyOf": [{"minProperties": 3}]}, "minProperties", "#/anyOf/0"),
        ({"properties": {"a": ANY}, "maxProperties": 0}, "maxProperties", "#"),
        ({"propertyNames": {"format": "uuid"}}, "propertyNames", "#"),
        ({"anyOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties", "#"),
        ({"anyOf": [{}], "unevaluatedItems": False}, "unevaluatedItems", "#"),
        ({"$dynamicRef": "#x"}, "$dynamicRef", "#"),
        ({"if": {"$ref": "#"}, "then": TEXT}, "if", "#"),
    ],
)
def test_an_unenforceable_keyword_is_refused_by_name_and_place(
    schema: dict[str, Any], keyword: str, path: str
) -> None:
    with pytest.raises(Unenforceable) as raised:
        enforceable(schema)
    assert str(raised.value).startswith(f"{keyword} at {path} cannot be enforced: ")


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"enum": 5}},
        {"dependentRequired": 5},
        {"oneOf": 5},
        {"minProperties": "a"},
        {"format": [], "uniqueItems": True, "maxItems": "x"},
        {"if": {"minimum": "x"}, "then": TEXT},
        {"contains": {}, "maxItems": []},
        {"not": {"type": 7}},
        {"not": {"properties": []}},
        {"propertyNames": 5},
    ],
)
def test_an_invalid_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(Unenforceable):
        enforceable(schema)


def test_a_schema_that_expands_too_far_is_refused() -> None:
    branches = [{"oneOf": [{"required": [f"p{i}{j}"]} for j in range(40)]} for i in range(40)]
    with pytest.raises(Unenforceable, match="parts"):
        enforceable({"type": "object", "allOf": branches})


SELF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": list(range(k, k + 800))} for k in range(0, 40_000, 800)]},
        {"oneOf": [{"enum": list(range(k, k + 800))} for k in range(100)]},
        {"type": "array", "items": {"enum": list(range(20_000))}, "uniqueItems": True},
        {"$defs": {"a": {"allOf": [SELF] * 10}}, "allOf": [SELF], "minProperties": 1},
        {
            "properties": dict.fromkeys(map(str, range(20_000)), True),
            "additionalProperties": False,
            "minProperties": 10_000,
        },
    ],
    ids=("disjoint", "overlapping", "arranged", "self", "chosen"),
)
def test_long_lists_are_rewritten_or_refused_in_bounded_time(schema: dict[str, Any]) -> None:
    started_s = time.thread_time()
    with contextlib.suppress(Unenforceable):
        enforceable(schema)
    assert time.thread_time() - started_s < 3


def test_an_infinity_which_json_can_spell_as_1e999_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        enforced_json({"oneOf": [{"const": float("inf")}, {"const": 1}]})


def test_unenforceable_keywords_are_dropped_if_lenient() -> None:
    schema = {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 3}
    rest = enforceable(schema, is_lenient=True)
    assert rest == {"type": "array", "items": TEXT, "maxItems": 3}


def test_dates_are_those_that_parsers_accept(grammars: Grammars) -> None:
    day = {"type": "string", "format": "date"}
    assert allows(grammars, day, "2024-02-29")
    assert not allows(grammars, day, "0000-01-01") and not allows(grammars, day, "2023-02-29")
