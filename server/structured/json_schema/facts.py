"""Conclusions about a schema without values: its types, its values, the names that it requires."""

import json
from typing import Any, NamedTuple

# Schemas that one schema may expand to, itself and its parts included; more would take llguidance,
# and the rewriting, too long.
_MAX_PARTS = 50_000
MAX_REFS = 8  # followed in a row when a schema is analysed

TYPES = ("null", "boolean", "number", "string", "array", "object")
ANY_TYPE = frozenset(TYPES) | {"integer"}

Schema = Any  # a dict or a bool; the client may have sent anything else


class Unenforceable(ValueError):
    """A keyword that no grammar can enforce; the message names it and its place in the schema."""


class CannotExpress(Exception):
    """Why a keyword cannot be rewritten, or what could be written instead."""


class _Facts(NamedTuple):
    """values: as `canonical` writes them; None if they cannot be listed."""

    schema: dict[str, Any]  # kept alive, so that its id stays its own
    types: frozenset[str]
    values: frozenset[str] | None


class SchemaFacts:
    """Conclusions about the schemas within `root`, and a bound on the work that they take."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_parts = 0
        self._facts: dict[int, _Facts] = {}  # by the schema's id

    def count(self, num_parts: int = 1) -> None:
        """Raises Unenforceable once the schema has become too large."""
        self._num_parts += num_parts
        if self._num_parts > _MAX_PARTS:
            raise Unenforceable(f"it expands to more than {_MAX_PARTS} parts; simplify it")

    def resolved(self, schema: Schema) -> Schema:
        """The schema that its `$ref` points to, joined with its other keywords. Raises
        CannotExpress if there is no such schema."""
        for _ in range(MAX_REFS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            target = self._target(schema["$ref"])
            others = {key: value for key, value in schema.items() if key != "$ref"}
            if others.keys() - {"title", "description", "default"}:
                return {"allOf": [target, others]}
            schema = target
        return schema

    def _target(self, ref: str) -> Schema:
        if not ref.startswith("#"):
            raise CannotExpress(f"{ref[:100]} is not in this schema")
        found: Any = self._root
        for part in ref[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, ValueError, IndexError, TypeError):
                raise CannotExpress(f"{ref[:100]} does not exist") from None
        return found

    def required(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        """Names that every object must have, by `required`, `allOf` and `$ref`."""
        self.count()
        schema = self.resolved(schema) if depth else schema
        if not isinstance(schema, dict) or depth > MAX_REFS:
            return frozenset()
        inner = [*schema.get("allOf", ())]
        inner += [{"$ref": schema["$ref"]}] if "$ref" in schema else []
        found = (self.required(each, depth + 1) for each in inner)
        return frozenset(schema.get("required", ())).union(*found)

    def values(self, schema: Schema) -> list[Any] | None:
        """All values that it allows, each once; None if they cannot be listed."""
        schema = self.resolved(schema)
        if not isinstance(schema, dict):
            return None
        others = schema.keys() - {"title", "description", "default", "type", "enum", "const"}
        if others:
            return None
        types = types_of(schema)
        if "const" in schema:
            values = [schema["const"]]
        elif "enum" in schema:
            values = schema["enum"]
        elif types <= {"boolean", "null"}:
            values = [value for value in (True, False, None) if type_of(value) in types]
        else:
            return None
        by_text = {canonical(value): value for value in values if type_of(value) in types}
        return list(by_text.values())

    def are_disjoint(self, a: Schema, b: Schema, depth: int = 0) -> bool:
        """Whether certainly no value satisfies both."""
        self.count()
        if depth > MAX_REFS:
            return False
        a, b = self.resolved(a), self.resolved(b)
        for one, other in ((a, b), (b, a)):
            if one is False:
                return True
            if isinstance(one, dict):
                if any(self.are_disjoint(each, other, depth + 1) for each in one.get("allOf", ())):
                    return True
                if "anyOf" in one and all(
                    self.are_disjoint(each, other, depth + 1) for each in one["anyOf"]
                ):
                    return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        return self._have_disjoint_values(a, b) or self._have_disjoint_properties(a, b, depth)

    def _have_disjoint_values(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        facts_a, facts_b = self._facts_of(a), self._facts_of(b)
        if facts_a.types.isdisjoint(facts_b.types):
            return True
        if facts_a.values is None or facts_b.values is None:
            return False
        return facts_a.values.isdisjoint(facts_b.values)

    def _have_disjoint_properties(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        if not self._facts_of(a).types == self._facts_of(b).types == {"object"}:
            return False
        required = {*a.get("required", ()), *b.get("required", ())}
        return any(
            self.are_disjoint(_property(a, name), _property(b, name), depth + 1)
            for name in required
        )

    def _facts_of(self, schema: dict[str, Any]) -> _Facts:
        """Computed once: each branch of a oneOf is compared with all others."""
        facts = self._facts.get(id(schema))
        if facts is None:
            values = self.values(schema)
            texts = None if values is None else frozenset(map(canonical, values))
            facts = self._facts[id(schema)] = _Facts(schema, types_of(schema), texts)
        return facts


def types_of(schema: Schema) -> frozenset[str]:
    """Types that its values may have, by `type`, `const` or `enum`; "integer" is in "number"."""
    if not isinstance(schema, dict):
        return ANY_TYPE
    if "type" in schema:
        declared = schema["type"]
        found = frozenset([declared] if isinstance(declared, str) else declared)
    elif "const" in schema:
        found = frozenset([type_of(schema["const"])])
    elif "enum" in schema:
        found = frozenset(type_of(value) for value in schema["enum"])
    else:
        return ANY_TYPE
    return found | {"integer"} if "number" in found else found


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def canonical(value: Any) -> str:
    """The same text for values that are equal to JSON Schema."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _property(schema: dict[str, Any], name: str) -> Schema:
    """The schema of a property."""
    declared: dict[str, Schema] = schema.get("properties", {})
    if name in declared:
        return declared[name]
    return schema.get("additionalProperties", True) if "patternProperties" not in schema else True
