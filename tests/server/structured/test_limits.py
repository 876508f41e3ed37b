"""What is refused by its text alone, and what is not."""

import contextlib
import time
from typing import Any

import pytest

from penstock.server.errors import InvalidRequest
from penstock.server.structured.constraint import constraint_of
from penstock.server.structured.limits import (
    MAX_EXPANDED,
    MAX_NAMES,
    MAX_REFS,
    MAX_RULES,
    MAX_SCHEMA_DEPTH,
    check_lark,
    check_regex,
    check_schema,
)


@pytest.mark.parametrize(
    ("regex", "length"),
    [
        ("", 0),
        ("abc", 3),
        ("a{5}", 5),
        ("ab{5}", 6),
        ("a{5,}", 5),
        ("a{0,5}", 1),
        ("a{2}{3}", 6),
        ("(ab){3}", 6),
        ("((ab|c){2}d){3}", 15),
        ("ab|c{7}|d", 7),
        ("[a-z]{4}", 4),
        ("[(]{4}", 4),
        (r"[\]|]{4}", 4),
        (r"\({4}", 4),
        (r"\[a{4}", 5),
        ("a{,5}", 5),
        ("(?i:a){3}b", 13),
        ("[a-z]{1,10000000}", 1),
        ("a{" + "9" * 5000, 5002),
    ],
)
def test_the_length_of_what_a_regex_expands_to(regex: str, length: int) -> None:
    assert check_regex(regex) == length


@pytest.mark.parametrize(
    "regex",
    [
        "a{100001}",
        "a{" + "9" * 5000 + "}",
        "a" + "{2}" * 17,
        "a" + "{2}" * 100_000,
        "(" * 17 + "a" + "{2})" * 17,
        "a{60000}b{60000}",
        "x|a{100001}|y",
        r"\\[a\]]{100001}",
        "(" * 300,
    ],
)
def test_a_regex_that_is_too_large_or_too_deep_is_refused(regex: str) -> None:
    for check, text in ((check_regex, regex), (check_lark, f"start: /{regex}/")):
        with pytest.raises(ValueError, match=r"expand to more than|nested more than"):
            check(text)
    with pytest.raises(ValueError, match=r"expand to more than|nested more than"):
        check_schema({"items": [{"properties": {"a": {"pattern": regex}}}]})
    with pytest.raises(ValueError, match=r"expand to more than|nested more than"):
        check_schema({"patternProperties": {regex: True}})


@pytest.mark.parametrize(
    "text",
    [
        'start: "a"{100001}',
        'start: "a" ~ 100001',
        'start: "a" ~ 100001..200000',
        "start: a { 100001 , 100002 }",
        'start: ("a" "b"){60000}',
        'start: ("a"\n | "b"{60000} ){2}',
        "start: " + "(" * 300,
        "\n".join(f"r{i}: r{i}" for i in range(MAX_RULES + 1)),
    ],
)
def test_a_grammar_that_is_too_large_or_too_deep_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expand to|nested more than|more than 5000 rules"):
        check_lark(text)


@pytest.mark.parametrize(
    "text",
    [
        'start: "a{100001}"',
        'start: "\\"a{100001}"',
        "start: a // {100001}",
        "start: a # {100001}",
        "\n".join(f"r{i}: a{{99999}}" for i in range(100)),
        "start: a{1,999999999}",
        'start: "a" ~ 3..999999999',
    ],
)
def test_a_grammar_with_other_numbers_is_not_refused(text: str) -> None:
    check_lark(text)


def nested(depth: int, schema: Any) -> Any:
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(MAX_SCHEMA_DEPTH, {}),
        {"enum": nested(MAX_SCHEMA_DEPTH, {})},
        {"minItems": 1_000_001},
        {"minLength": 10**400},
        {"minLength": float("inf")},
        {"minItems": 1001, "items": {"type": "array", "minItems": 1001}},
        {"minItems": 1001, "items": {"minProperties": 10, "properties": {"a": {"minLength": 101}}}},
        {"required": ["a"] * (MAX_NAMES + 1)},
        {"properties": {str(i): {} for i in range(MAX_NAMES + 1)}},
        {"anyOf": [{"$ref": "#"}] * (MAX_REFS + 1)},
    ],
)
def test_a_schema_that_is_too_large_or_too_deep_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="more than"):
        check_schema(schema)


def test_a_schema_that_is_nested_almost_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="nested more than"):
        check_schema(nested(900_000, {}))


@pytest.mark.parametrize(
    "schema",
    [
        nested(MAX_SCHEMA_DEPTH - 1, {}),
        {"maxLength": 2**31 - 1, "maxItems": 10**12},
        {"minLength": MAX_EXPANDED},
        {"enum": [{"pattern": "a{999999}", "minItems": 10**9}]},
        {"const": {"required": ["a"] * 9999}},
        {"properties": {"pattern": {"pattern": "a"}, "minItems": {}, "enum": {}}},
        {"pattern": 5, "required": 7, "patternProperties": [], "minItems": "many"},
        {"enum": list(range(50_000))},
        {"anyOf": [{"minItems": 900_000}, {"minItems": 900_000}]},
    ],
)
def test_a_schema_with_other_numbers_is_not_refused(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize("part", ["[", "(?", '"', '"\\', "/", "\\", "{1", "a{1}", "|", "~", "\n"])
def test_any_text_is_looked_at_in_time_in_proportion_to_it(part: str) -> None:
    text = part * ((1 << 20) // len(part))
    started_s = time.process_time()
    for check in (check_regex, check_lark):
        with contextlib.suppress(ValueError):
            check(text)
    assert time.process_time() - started_s < 15  # quadratic: hours


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a" * 1_048_577},
        {"choice": ["a" * 600_000] * 2},
        {"json": "[" * 1_048_577},
        {"structural_tag": "[" * 1_048_577},
        {"grammar": "a" * 65_537},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_text_that_is_too_long_is_refused_before_anything_reads_it(
    fields: dict[str, Any],
) -> None:
    constraint = constraint_of(None, fields, None, None)
    assert constraint
    with pytest.raises(InvalidRequest, match=r"characters, more than the \d+ allowed"):
        constraint.build()
