"""`python -m tests.fuzz.many_schemas` (`make test-schemas`): 200 JSON schemas of common kinds.

Each runs on the demo model and on random weights, one request and 32 requests at a time, at
temperature 1, plain and streamed, with several choices and with logprobs. Every output that ends
with `stop` must validate, including integers and formats.
"""

import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support.serving import MODEL, RunningServer
from tests.support.structured import SCHEMAS, assert_validates, closed, json_schema

INT, BOOL, NULL = {"type": "integer"}, {"type": "boolean"}, {"type": "null"}
SHORT = {"type": "string", "maxLength": 8}
NUM_SEEDS = 2  # for 32 requests at a time

_FORMATS = "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905
_PATTERNS = [
    "^[a-z]{1,5}$",
    "^\\d{3}-\\d{4}$",
    "^(GET|POST|PUT)$",
    "^#[0-9a-fA-F]{6}$",
    "^v[0-9]+\\.[0-9]{1,2}\\.[0-9]$",
    "^[A-Z][a-z]{2,6}( [A-Z][a-z]{2,6})?$",
    "^\\S{1,6}$",
    "^[^,]{0,5},[^,]{0,5}$",
    "^[\\u00e4\\u00f6\\u00fc]{1,3}$",
    "^a?b*c{1,3}$",
]
_NAMES = ["name", "größe", "名前", "a b", "x.y", 'quo"te', "back\\slash", "$ref", "emoji 🎈", "-"]
_ENUMS: list[list[Any]] = [
    ["a"],
    ["low", "medium", "high"],
    [1, 2, 3],
    [1.5, -2, "x", None, True],
    ["é", "ü", "日本", 'quo"te', "line\nbreak", "tab\t"],
    [f"option {i}" for i in range(300)],
    [[1, 2], {"k": "v"}, "plain"],
    ["", "a", "ab", "abc"],
]
_NUMBERS: list[dict[str, Any]] = [
    {"minimum": 0},
    {"minimum": -3, "maximum": 3},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"minimum": 1000, "maximum": 1999},
    {"multipleOf": 7, "minimum": 0, "maximum": 700},
    {"minimum": -100, "maximum": -5},
]


def _shape(kind: str, **fields: Any) -> dict[str, Any]:
    return closed({"kind": {"const": kind}, **fields})


def _recursive(name: str, node: dict[str, Any]) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}", "$defs": {name: node}}


_ME = {"$ref": "#/$defs/node"}
_COMPOSED: list[dict[str, Any]] = [
    {"oneOf": [_shape("circle", radius=INT), _shape("square", side=INT), _shape("dot")]},
    {"anyOf": [_shape("user", id=INT), _shape("group", members=INT)]},
    {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {"cat": _shape("cat", lives=INT), "dog": _shape("dog", barks=BOOL)},
    },
    {"oneOf": [closed({"a": INT}), closed({"b": INT})]},
    {"oneOf": [INT, BOOL, NULL, {"type": "string", "maxLength": 4}]},
    {"oneOf": [{**INT, "maximum": 5}, {**INT, "minimum": 3}]},
    {"type": "object", "allOf": [closed({"a": INT, "b": BOOL}), {"required": ["b"]}]},
    {"allOf": [{"type": "string", "maxLength": 6}, {"pattern": "^[a-f]+$"}]},
    {"allOf": [{**INT, "minimum": 3}, {"maximum": 9}, {"not": {"const": 5}}]},
    {"type": ["integer", "string", "null"], "maxLength": 5},
    {"type": "string", "maxLength": 6, "not": {"enum": ["a", "ab", "null"]}},
    {**INT, "minimum": 0, "maximum": 50, "not": {"enum": [1, 2, 3]}},
    {**closed({"a": INT, "b": INT}, "a", "b"), "not": {"required": ["a", "b"]}},
    {**closed({"a": INT, "b": INT, "c": INT}, "a", "b", "c"), "minProperties": 1},
    {**closed({"a": INT, "b": INT, "c": INT}, "a", "b", "c"), "maxProperties": 2},
    {**closed({"a": BOOL, "b": BOOL}, "a", "b"), "dependentRequired": {"a": ["b"]}},
    {
        **closed({"country": {"enum": ["US", "DE"]}, "zip": {"type": "string", "maxLength": 9}}),
        "if": {"properties": {"country": {"const": "US"}}},
        "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
        "else": {"properties": {"zip": {"pattern": "^D-[0-9]{5}$"}}},
    },
    {"type": "array", "items": {"enum": ["a", "b", "c", "d"]}, "uniqueItems": True},
    {"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"type": ["integer", "null"]}, "contains": NULL, "maxItems": 4},
    {"type": "array", "prefixItems": [INT, BOOL], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [INT, SHORT], "items": NULL, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": INT, "maxItems": 2}, "maxItems": 2},
    {"type": "array", "maxItems": 0},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x-[a-z]{1,3}$": INT}, "maxProperties": 2}
    | {"additionalProperties": False},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,2}$"}, "maxProperties": 2}
    | {"additionalProperties": BOOL},
    {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 3},
    {"properties": {"a": INT}, "required": ["a"], "type": "object", "unevaluatedProperties": False},
    {"const": {"a": [1, "x", None]}},
    {"const": 'a constant with "quotes" and \\ and é'},
    {"const": None},
    {"not": {"type": ["object", "array", "string", "number"]}},
    closed({"anything": True, "end": BOOL}),
    closed({"anything": {}, "end": BOOL}),
    _recursive("node", closed({"v": BOOL, "next": {"anyOf": [NULL, _ME]}})),
    _recursive(
        "node", closed({"v": BOOL, "children": {"type": "array", "items": _ME, "maxItems": 1}})
    ),
    _recursive(
        "node", {"anyOf": [INT, closed({"op": {"enum": ["+", "-"]}, "left": INT, "right": _ME})]}
    ),
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"money": closed({"amount": INT, "currency": {"enum": ["EUR", "USD"]}})},
        **closed({"price": {"$ref": "#/definitions/money"}}),
    },
    {"title": "T", "description": "D", "examples": [1], "default": 2, "deprecated": True, **INT},
    closed({"x": {"type": "string", "nullable": True, "format": "password", "maxLength": 4}}),
]


def _many() -> dict[str, dict[str, Any]]:
    parts: list[tuple[str, dict[str, Any]]] = []
    parts += [(f"format {name}", {"type": "string", "format": name}) for name in _FORMATS]
    parts += [(f"pattern {each}", {"type": "string", "pattern": each}) for each in _PATTERNS]
    parts += [(f"enum {i}", {"enum": each}) for i, each in enumerate(_ENUMS)]
    parts += [(f"integer {i}", {**INT, **each}) for i, each in enumerate(_NUMBERS)]
    parts += [(f"number {i}", {"type": "number", **each}) for i, each in enumerate(_NUMBERS[:4])]
    parts += [(f"length {n}", {"type": "string", "minLength": n, "maxLength": n}) for n in range(5)]
    schemas = dict(SCHEMAS)
    schemas |= {f"composed {i}": each for i, each in enumerate(_COMPOSED)}
    for name, part in parts:
        schemas[f"{name}, required"] = closed({"x": part})
        schemas[f"{name}, in a list"] = {
            "type": "array",
            "items": part,
            "minItems": 1,
            "maxItems": 2,
        }
        schemas[f"{name}, or null"] = closed({"a": {"anyOf": [part, NULL]}, "b": BOOL}, "a")
    schemas |= {f"property {name}": closed({name: INT, f"{name}2": BOOL}) for name in _NAMES}
    return schemas


MANY = _many()


_VARIANTS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
]


def bodies(seed: int, every: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """A request for every `every`-th schema, with the fields of `_VARIANTS` in turn."""
    requests = []
    for i, name in enumerate(list(MANY)[seed % every :: every]):
        variant = _VARIANTS[(i + seed) % len(_VARIANTS)]
        format_ = json_schema(MANY[name])
        body = {
            "response_format": format_,
            "max_tokens": 300,
            "temperature": 1,
            "seed": seed * 1000 + i,
        }
        requests.append((name, body | variant))
    return requests


def check(
    server: RunningServer, requests: list[tuple[str, dict[str, Any]]], concurrency: int
) -> Counter[str]:
    """Counts the finish reasons. Raises if an output that ends with `stop` does not validate."""
    reasons: Counter[str] = Counter()
    with ThreadPoolExecutor(concurrency) as pool:
        responses = list(pool.map(lambda each: _send(server, each[1]), requests))
    for (name, body), response in zip(requests, responses, strict=True):
        assert response.status_code == 200, (name, response.text)
        for text, reason in _outputs(response.text, body):
            reasons[reason] += 1
            if reason == "stop":
                try:
                    assert_validates(text, MANY[name])
                except Exception as error:
                    raise AssertionError(f"{name}, seed {body['seed']}: {text!r}") from error
    return reasons


def _send(server: RunningServer, body: dict[str, Any]) -> httpx.Response:
    """Like `RunningServer.chat`, with a longer timeout for busy machines."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "An example, please."}]}
    return httpx.post(f"{server.url}/v1/chat/completions", json=fields | body, timeout=200)


def _outputs(raw: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    """The text and the finish reason of each choice."""
    if "stream" not in body:
        choices = json.loads(raw)["choices"]
        return [(each["message"]["content"], each["finish_reason"]) for each in choices]
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    return [(text, events[-1]["choices"][0]["finish_reason"])]


def main() -> int:
    print(f"{len(MANY)} schemas")
    for flags in ((), ("--load-format", "dummy")):
        server = RunningServer(*flags)
        try:
            server.wait_until_ready()
            for concurrency, seeds in ((1, range(1)), (32, range(1, 1 + NUM_SEEDS))):
                started_s, reasons = time.monotonic(), Counter[str]()
                for seed in seeds:
                    reasons += check(server, bodies(seed), concurrency)
                print(
                    f"{'random weights' if flags else 'demo model'}, {concurrency} at a time: "
                    f"{reasons['stop']} finished and validate, {reasons['length']} were truncated, "
                    f"in {time.monotonic() - started_s:.0f} s",
                    flush=True,
                )
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
