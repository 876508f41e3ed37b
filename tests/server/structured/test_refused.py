"""Constraints that cannot be enforced are refused by field name, in bounded time, and do not
disturb other requests."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.serving import RunningServer
from tests.support.structured import SCHEMAS, ask_all, assert_validates, json_schema

# Compiling is bounded by fuel, and takes 1.6 s at most where eight processes share two cores; what
# is not bounded takes longer than the 30 s that the client waits.
MAX_SECONDS = 15.0
WHITESPACE = "structured_outputs.whitespace_pattern"


@pytest.fixture(scope="module")
def server(random_server: RunningServer) -> RunningServer:
    return random_server


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubled(depth: int) -> dict[str, Any]:
    """Each definition refers to the next twice: 2 ** depth parts."""
    defs: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": {"type": "string"}}}


def crossed(num: int) -> dict[str, Any]:
    """An intersection of unions: 2 ** num parts."""
    branches = [
        {"anyOf": [{"properties": {f"a{i}": {"type": "string"}}}, {"required": [f"b{i}"]}]}
        for i in range(num)
    ]
    return {"type": "object", "allOf": branches}


def if_then(i: int) -> dict[str, Any]:
    return {"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "jsn"}}, "response_format.type"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        ({"response_format": {"type": "json_object", "value": "{}"}}, "response_format.value"),
        ({"response_format": {"type": "json_object", "scheme": {}}}, "response_format.scheme"),
        (
            {"response_format": {"type": "json", "schema": {}, "value": {"type": "object"}}},
            "response_format.value",
        ),
        ({"response_format": {"type": "regex", "value": "(?=a)b"}}, "response_format.value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": json_schema({"not": {}})}, "response_format.json_schema.schema"),
        (
            {"response_format": json_schema({"type": "nothing"})},
            "response_format.json_schema.schema",
        ),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "json_schema"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "json_schema"),
        ({"json_schema": {"$ref": "#/$defs/missing"}}, "json_schema"),
        ({"json_schema": {"oneOf": [{"type": "number"}, {"multipleOf": 2}]}}, "json_schema"),
        ({"json_schema": {"type": "object", "not": {"pattern": "a"}}}, "json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": 1},
                }
            },
            "response_format.json_schema.strict",
        ),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": "["}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, WHITESPACE),
        ({"grammar": "root ::= missing"}, "grammar"),
        ({"grammar": "root ::= ["}, "grammar"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"grammar": "nonsense"}, "grammar"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json"),
        ({"ebnf": 'root ::= "a"', "guided_grammar": 'root ::= "b"'}, "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ],
)
def test_an_invalid_constraint_is_refused_by_its_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    for answer in (server.chat(**fields), server.complete(**fields)):
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text


def test_the_refusal_of_an_older_name_keeps_to_that_name(server: RunningServer) -> None:
    message = server.chat(guided_choice="a").json()["error"]["message"]
    assert "guided_choice must be a list" in message and "structured_outputs" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": deep(300)},
        {"json_schema": doubled(40)},
        {"json_schema": crossed(16)},
        {"json_schema": {"enum": [f"value {i}" for i in range(60_000)]}},
        {"json_schema": {"type": "string", "pattern": "^(([a-z]{1,500}){1,500}){1,500}$"}},
        {"json_schema": {"type": "array", "minItems": 10**9}},
        {"json_schema": {"type": "object", "oneOf": [{"required": [f"p{i}"]} for i in range(99)]}},
        {"json_schema": {"type": "object", "allOf": [if_then(i) for i in range(20)]}},
        {"json_schema": {"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}},
        {"json_schema": {"type": "string", "not": {"enum": [f"value {i}" for i in range(3000)]}}},
        {"json_schema": {"enum": ["x" * 100 + str(i) for i in range(12_000)]}},
        {"json_schema": {"description": "x" * 900_000}},
        {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}},
        {"structured_outputs": {"regex": "(x+x+)+y" * 200}},
        {"structured_outputs": {"regex": "(a|aa|aaa){1,100000}b"}},
        {"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}},
        {"structured_outputs": {"choice": [f"choice number {i}" for i in range(20_000)]}},
        {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
        {"grammar": 'root ::= a*\na ::= b*\nb ::= root* "x"'},
        {"grammar": 'start: start start | start start start | "a" | '},
        {"grammar": "start: A\nA: /.*a.{20}b/ & /.*b.{21}a/ & ~/.*c.{18}d/"},
        {"grammar": "start: a\na: b\nb: a"},
        {"grammar": 'root ::= "' + "x" * 70_000 + '"'},
    ],
)
def test_an_expensive_constraint_ends_in_bounded_time_and_the_next_request_is_served(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    started_s = time.monotonic()
    answer = server.chat(max_tokens=20, **fields)
    assert answer.status_code in (200, 400), answer.text
    assert time.monotonic() - started_s < MAX_SECONDS
    assert server.chat(max_tokens=2).status_code == 200


def test_a_large_schema_does_not_delay_other_requests(server: RunningServer) -> None:
    """In either process: several short requests are answered while it is compiled."""
    schema = {
        "type": "object",
        "properties": {
            f"k{i}": {"enum": [f"value {i} {j} {salt}" for j in range(60) for salt in range(8)]}
            for i in range(60)
        },
    }
    num_answered = 0
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.chat, json_schema=schema, max_tokens=4)
        while not large.done():
            assert server.chat(max_tokens=1).status_code == 200
            num_answered += 1
    assert large.result().status_code in (200, 400)
    assert num_answered >= 2


def test_a_grammar_that_fails_midway_ends_only_its_own_answer(
    server: RunningServer,
) -> None:
    regex = {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}}
    bodies: list[dict[str, Any]] = [{"max_tokens": 200, "seed": i} for i in range(4)]
    bodies += [{"max_tokens": 200, "json_schema": SCHEMAS["enum"], "seed": i} for i in range(4)]
    *others, failing = ask_all(server, [*bodies, {"max_tokens": 200, **regex}], 9)
    assert [answer.status_code for answer in others] == [200] * 8
    assert failing.status_code == 200 or failing.json()["error"]["code"] == "grammar_failed"


def test_the_scripted_executor_follows_grammars_too(scripted_server: RunningServer) -> None:
    answer = scripted_server.chat(json_schema=SCHEMAS["enum"], max_tokens=300, seed=5).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert_validates(answer["choices"][0]["message"]["content"], SCHEMAS["enum"])
