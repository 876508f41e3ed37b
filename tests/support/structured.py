"""Shared by tests of structured output: typical schemas, and how to send and check them."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from tests.support.serving import RunningServer

_TEXT = {"type": "string", "maxLength": 12}


def closed(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    """An object schema in OpenAI's strict form, except that some properties are optional."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed({"name": _TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "nested": closed({"a": closed({"b": closed({"c": {"type": "boolean"}}), "d": _TEXT})}),
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
    "array of objects": {
        "type": "array",
        "items": closed({"id": {"type": "integer"}, "done": {"type": "boolean"}}),
        "maxItems": 2,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["km", "mi"]}],
        "items": False,
        "minItems": 2,
    },
    "enum": closed({"unit": {"enum": ["celsius", "fahrenheit"]}, "level": {"enum": [1, 2, None]}}),
    "const": closed({"kind": {"const": "event"}, "version": {"const": 3}}),
    "pattern": closed({"code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}}),
    "number bounds": closed(
        {
            "p": {"type": "number", "minimum": 0, "maximum": 1},
            "t": {"type": "integer", "exclusiveMinimum": -40, "exclusiveMaximum": 60},
            "step": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
        }
    ),
    "string lengths": closed({"s": {"type": "string", "minLength": 2, "maxLength": 5}}),
    "references": {
        **closed({"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}}),
        "$defs": {"place": closed({"city": _TEXT, "zip": {"type": "integer"}})},
    },
    "recursion": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": closed(
                {
                    "value": {"type": "boolean"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                }
            )
        },
    },
    "any of": closed({"x": {"anyOf": [{"type": "integer"}, {"type": "boolean"}, _TEXT]}}),
    "one of": {
        "oneOf": [
            closed({"type": {"const": "cat"}, "lives": {"type": "integer"}}),
            closed({"type": {"const": "dog"}, "barks": {"type": "boolean"}}),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
        "minProperties": 2,
    },
    "optional": closed({"a": {"type": "integer"}, "b": _TEXT, "c": {"type": "null"}}, "b", "c"),
    "map": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "type list": closed({"x": {"type": ["integer", "null"]}, "y": {"type": ["boolean", "null"]}}),
    "formats": closed(
        {
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
            "ip": {"type": "string", "format": "ipv4"},
        }
    ),
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Review",
        "description": "As pydantic writes it.",
        **closed({"stars": {"type": "integer", "title": "Stars", "default": 3, "maximum": 5}}),
    },
}


def json_schema(schema: dict[str, Any], name: str = "answer") -> dict[str, Any]:
    """A response_format of OpenAI's."""
    described = {"name": name, "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": described}


def ask_all(
    server: RunningServer, bodies: list[dict[str, Any]], concurrency: int
) -> list[httpx.Response]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda body: server.chat(**body), bodies))


def assert_validates(text: str, schema: dict[str, Any]) -> None:
    checker = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
