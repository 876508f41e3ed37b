"""Values that a model writes without JSON's quotes, and whose type the schema gives."""

import json
from typing import Any

_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_PYTHON_LITERALS = {"True": True, "False": False, "None": None}
# Bounds references that refer to themselves.
_MAX_REFERENCES = 8


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schemas of an object's properties, references resolved."""
    properties = _resolved(schema, schema).get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _resolved(each, schema) for name, each in properties.items()}


def types_of(schema: Any) -> frozenset[str]:
    """JSON's names of the types that a value may have; empty if it may have any."""
    if not isinstance(schema, dict):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_NAMES[type(value)] for value in values if type(value) in _NAMES)
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            types = [types_of(branch) for branch in branches]
            return frozenset().union(*types) if all(types) else frozenset()
    return frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """The text as JSON: as a value of one of the types if it can be read as one, else a string."""
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    try:
        literal = text.strip()
        is_python = literal in _PYTHON_LITERALS
        value = _PYTHON_LITERALS[literal] if is_python else _loads(literal)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    if types and "string" in types and not _is_one_of(value, types):
        value = text
    return json.dumps(value, ensure_ascii=False)


def _is_one_of(value: object, types: frozenset[str]) -> bool:
    name = _NAMES[type(value)]
    return name in types or (name == "integer" and "number" in types)


def _loads(text: str) -> Any:
    """Raises ValueError also for NaN and infinities, and for text that clients cannot read."""
    value = json.loads(text, parse_constant=_refuse)
    json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for key in reference[2:].split("/"):
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}
