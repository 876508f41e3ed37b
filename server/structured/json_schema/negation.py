"""The negation of a schema: a schema of exactly the values that it does not allow."""

from collections.abc import Iterable
from typing import Any

from penstock.server.structured.json_schema.facts import (
    ANY_TYPE,
    MAX_REFS,
    TYPES,
    CannotExpress,
    Schema,
    SchemaFacts,
    types_of,
)

# An excluded string becomes a regex nested as deeply as it is long; the regex parser allows 250.
_MAX_EXCLUDED_CHARS = 100
# The negation of a limit: the type that it limits, the opposite keyword, and what is added.
_OPPOSITE_LIMITS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
# Keywords whose negation cannot be expressed.
_NOT_NEGATABLE = {
    *("pattern", "format", "multipleOf", "items", "prefixItems", "additionalItems", "contains"),
    *("uniqueItems", "patternProperties", "additionalProperties", "propertyNames", "oneOf", "if"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
}


def negated(facts: SchemaFacts, schema: Schema, types: frozenset[str], depth: int = 0) -> Schema:
    """The values of these types that the schema does not allow. Raises CannotExpress."""
    facts.count()
    if depth > 4 * MAX_REFS:
        raise CannotExpress("it refers to itself")
    schema = facts.resolved(schema)
    if isinstance(schema, bool):
        return not schema
    union: list[Schema] = []
    for key, value in schema.items():
        union += _negations(facts, key, value, types, depth + 1)
    possible = [each for each in union if each is not False]
    return {"anyOf": possible} if possible else False


def _negations(
    facts: SchemaFacts, key: str, value: Any, types: frozenset[str], depth: int
) -> Iterable[Schema]:
    """The negation of one keyword, as a union of schemas."""
    if key in _NOT_NEGATABLE and not (key == "additionalProperties" and value in (True, {})):
        raise CannotExpress(f"{key} cannot be negated")
    if key in _OPPOSITE_LIMITS:
        kind, opposite, change = _OPPOSITE_LIMITS[key]
        limit = value + change
        possible = kind in types or (kind == "number" and "integer" in types)
        return [{"type": kind, opposite: limit}] if possible and not (change and limit < 0) else []
    match key:
        case "type":
            return [_other_types(value, types)]
        case "const":
            return _other_values([value], types)
        case "enum":
            facts.count(len(value))
            return _other_values(value, types)
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties":
            return [
                {"type": "object", "required": [name], "properties": {name: opposite}}
                for name, each in value.items()
                if (opposite := negated(facts, each, ANY_TYPE, depth)) is not False
            ]
        case "not":
            return [value]
        case "allOf":
            return [negated(facts, each, types, depth) for each in value]
        case "anyOf":
            return [{"allOf": [negated(facts, each, types, depth) for each in value]}]
    return []  # an annotation


def _other_types(value: Any, types: frozenset[str]) -> Schema:
    excluded = {value} if isinstance(value, str) else set(value)
    if "integer" in excluded and "number" not in excluded and "number" in types:
        raise CannotExpress("numbers that are not integers cannot be expressed")
    if "number" in excluded:
        excluded.add("integer")
    others = [each for each in TYPES if each in types and each not in excluded]
    if "integer" in types - excluded and "number" not in types:
        others.append("integer")
    return {"type": others} if others else False


def _other_values(values: list[Any], types: frozenset[str]) -> list[Schema]:
    """Returns the values of each type that are not listed."""
    if any(isinstance(value, list | dict) for value in values):
        raise CannotExpress(
            "const and enum can be negated only for strings, numbers, booleans and null"
        )
    union: list[Schema] = [
        {"const": each} for each in (None, True, False) if not any(each is v for v in values)
    ]
    union += [{"type": "array"}, {"type": "object"}]
    texts = [value for value in values if isinstance(value, str)]
    union.append(
        {"type": "string", "pattern": _pattern_of_others(texts)} if texts else {"type": "string"}
    )
    numbers = sorted({v for v in values if isinstance(v, int | float) and not isinstance(v, bool)})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True):
        between: dict[str, Any] = {"type": "number"}
        between |= {} if low is None else {"exclusiveMinimum": low}
        between |= {} if high is None else {"exclusiveMaximum": high}
        union.append(between)
    return [each for each in union if not types_of(each).isdisjoint(types)]


def _pattern_of_others(texts: list[str]) -> str:
    """A regex of every string except these."""
    if max(map(len, texts)) > _MAX_EXCLUDED_CHARS:
        raise CannotExpress(f"it excludes a string of more than {_MAX_EXCLUDED_CHARS} characters")
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^{_others(trie)}$"


def _others(node: dict[str, Any]) -> str:
    """The rests of strings that differ from all texts, which have led to this node of the trie."""
    chars = [char for char in node if char]
    if not chars:
        return "[\\s\\S]+"
    named = "".join(_escaped(char) for char in chars)
    ways = [f"[^{named}][\\s\\S]*", *(_escaped(char) + _others(node[char]) for char in chars)]
    return f"({'|'.join(ways)}){'' if '' in node else '?'}"


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
