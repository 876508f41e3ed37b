"""JSON schemas in llguidance's words: what it lacks is said by what it has, or refused.

A keyword is remade only where the result allows exactly the same values: `not` by De Morgan's laws,
`if` and the `dependent...` by unions, a `oneOf` whose branches are not provably apart by taking the
other branches out of each, `uniqueItems` of a short list of values by all its arrangements. An
unknown keyword or `format` is an annotation, as JSON Schema has it.

Source of the meanings: JSON Schema 2020-12, core and validation.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, permutations
from typing import Any, NamedTuple

# Schemas that one may become, parts and all; more would take llguidance, and us, too long.
_MAX_PARTS = 50_000
# Branches that one keyword may become.
_MAX_BRANCHES = 500
_MAX_CONTAINS_ITEMS = 32
# A forbidden text becomes a regex nested as deeply as it is long; the regex parser allows 250.
_MAX_FORBIDDEN_CHARS = 100
_MAX_REFS = 8  # followed one after the other, where a schema must be looked into

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "allOf")
_SINGLES = ("additionalProperties", "items", "additionalItems")
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")
# Formats that llguidance knows, and others that one of these is a kind of. Any other is an
# annotation. A pattern goes with some: llguidance's dates may be February 29 of any year, and RFC
# 3339 allows year 0 and second 60, which few parsers take.
_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
}
_NARROWER_FORMATS = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "uri-reference": "uri",
    "iri-reference": "uri",
}
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_REAL_DATE = f"^([0-9]{{4}}-(0[013-9]|1|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_AFTER_YEAR_0 = "^[0-9]{0,3}[1-9]"
_PATTERNS_OF_FORMAT = {
    "date": (_REAL_DATE, _AFTER_YEAR_0),
    "date-time": (_REAL_DATE, _AFTER_YEAR_0, "^[^:]*:[0-9]{2}:[0-5]"),
    "time": ("^[^:]*:[0-9]{2}:[0-5]",),
    "json-pointer": ("^(/([^~/]|~[01])*)*$",),
}
# The opposite of a limit: the type that it limits, the keyword that says so, and what is added.
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
# They say something of which the opposite cannot be said.
_NOT_NEGATED = {
    *("pattern", "format", "multipleOf", "items", "prefixItems", "additionalItems", "contains"),
    *("uniqueItems", "patternProperties", "additionalProperties", "propertyNames", "oneOf", "if"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
}

Schema = Any  # a dict or a bool; whatever a client sent


class Unenforceable(ValueError):
    """A keyword that no grammar can hold an answer to; the message names it, and where it is."""


class _CannotSay(Exception):
    """Why this one cannot be remade, or what could be written in its place."""


class _Remade(NamedTuple):
    """What a keyword becomes: keywords beside it, and schemas that must hold too. Of the latter,
    keywords that llguidance lacks are remade in their turn."""

    beside: dict[str, Any] = {}  # noqa: RUF012, never written to
    also: Sequence[Schema] = ()


class _Facts(NamedTuple):
    """values: as `_text` tells them; None where they are not plain."""

    schema: dict[str, Any]  # kept, so that no other gets its id
    types: frozenset[str]
    values: frozenset[str] | None


def enforceable(schema: dict[str, Any], *, leaves_out: bool = False) -> dict[str, Any]:
    """A schema of the same values that llguidance can enforce.

    leaves_out: what cannot be enforced is left out, not refused. Raises Unenforceable.
    """
    remade = _Remaker(schema, leaves_out).remade(schema, "#")
    assert isinstance(remade, dict), remade
    return remade


class _Remaker:
    def __init__(self, root: dict[str, Any], leaves_out: bool) -> None:
        self._root = root
        self._leaves_out = leaves_out
        self._num_parts = 0
        self._facts: dict[int, _Facts] = {}  # by the schema's id
        self._makers: dict[str, Callable[[dict[str, Any]], _Remade]] = {
            "not": self._not,
            "if": self._if,
            "oneOf": self._one_of,
            "uniqueItems": self._unique_items,
            "contains": self._contains,
            "dependentRequired": lambda schema: self._dependent(schema["dependentRequired"]),
            "dependentSchemas": lambda schema: self._dependent(schema["dependentSchemas"]),
            "dependencies": lambda schema: self._dependent(schema["dependencies"]),
            "minProperties": self._min_properties,
            "maxProperties": self._max_properties,
            "propertyNames": self._property_names,
            "unevaluatedProperties": self._unevaluated_properties,
            "unevaluatedItems": self._unevaluated_items,
            "$dynamicRef": _no_dynamic_ref,
            "$recursiveRef": _no_dynamic_ref,
            "format": _format,
        }
        # And llguidance's own options, which are not the client's to set.
        self._consumed = {*self._makers, "then", "else", "minContains", "maxContains"}
        self._consumed.add("x-guidance")

    def remade(self, schema: Schema, path: str) -> Schema:
        """path: where it is in what was asked, as a JSON pointer."""
        if not isinstance(schema, dict):
            return schema
        self._count()
        result = {
            key: self._remade_value(key, value, f"{path}/{key}")
            for key, value in schema.items()
            if key not in self._consumed
        }
        also: list[Schema] = []
        for key in schema:
            if key in self._makers:
                beside, more = self._made(key, schema, path)
                result |= beside
                also += [self.remade(each, f"{path}/{key}") for each in more]
        if also:
            given = result.get("allOf", [])
            result["allOf"] = [*given, *also] if isinstance(given, list) else given
        return result

    def _made(self, key: str, schema: dict[str, Any], path: str) -> _Remade:
        try:
            return self._makers[key](schema)
        except _CannotSay as error:
            if self._leaves_out:
                return _Remade()
            raise Unenforceable(f"{key} at {path} cannot be enforced: {error}") from None
        except (TypeError, AttributeError, KeyError) as error:
            raise Unenforceable(f"{key} at {path} is not as JSON Schema has it") from error

    def _remade_value(self, key: str, value: Any, path: str) -> Any:
        if key in _MAPS and isinstance(value, dict):
            return {name: self.remade(each, f"{path}/{name}") for name, each in value.items()}
        if (key in _LISTS or key == "items") and isinstance(value, list):
            return [self.remade(each, f"{path}/{i}") for i, each in enumerate(value)]
        return self.remade(value, path) if key in _SINGLES else value

    def _count(self, num: int = 1) -> None:
        self._num_parts += num
        if self._num_parts > _MAX_PARTS:
            raise Unenforceable(f"it comes to more than {_MAX_PARTS} parts; simplify it")

    # -- what each keyword becomes --

    def _not(self, schema: dict[str, Any]) -> _Remade:
        return _Remade(also=[self._negated(schema["not"], _types(schema))])

    def _if(self, schema: dict[str, Any]) -> _Remade:
        condition, then, otherwise = (schema.get(key, True) for key in ("if", "then", "else"))
        if then is True and otherwise is True:
            return _Remade()
        opposite = self._negated(condition, _types(schema))
        branches = [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]
        return _Remade(also=[{"anyOf": branches}])

    def _one_of(self, schema: dict[str, Any]) -> _Remade:
        branches = list(schema["oneOf"])
        try:
            apart = [
                self._without_others(i, branches, _types(schema)) for i in range(len(branches))
            ]
        except _CannotSay:
            if not self._leaves_out:
                # llguidance may yet find that they are apart; if not, it refuses.
                return _Remade(beside={"oneOf": [self.remade(each, "#") for each in branches]})
            apart = branches
        return _Remade(also=[{"anyOf": apart}])

    def _without_others(self, index: int, branches: list[Schema], types: frozenset[str]) -> Schema:
        own = branches[index]
        others = [
            self._negated(other, types & _types(self._resolved(own)))
            for i, other in enumerate(branches)
            if i != index and not self._are_apart(own, other)
        ]
        return {"allOf": [own, *others]} if others else own

    def _unique_items(self, schema: dict[str, Any]) -> _Remade:
        if schema["uniqueItems"] is not True or schema.get("maxItems", 2) <= 1:
            return _Remade()
        values = self._values(schema.get("items", True))
        if values is None or "prefixItems" in schema:
            raise _CannotSay(
                "it needs items of an enum; for others say maxItems 1, or leave it out"
            )
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
        sizes = range(least, min(most, len(values)) + 1)
        num = 0
        for size in sizes:
            num += math.perm(len(values), size)
            if num > _MAX_BRANCHES:
                raise _CannotSay(
                    f"its enum can be arranged in more than the {_MAX_BRANCHES} ways that can be "
                    "served; give it fewer values, or a smaller maxItems"
                )
        constants = [{"const": value} for value in values]
        arrays = [
            {"type": "array", "prefixItems": list(some), "minItems": size, "maxItems": size}
            for size in sizes
            for some in permutations(constants, size)
        ]
        self._count(num * len(values))
        return _Remade(also=[{"anyOf": [*_any_but("array", schema), *arrays]}])

    def _contains(self, schema: dict[str, Any]) -> _Remade:
        wanted, most = schema["contains"], schema.get("maxItems")
        if "maxContains" in schema or schema.get("minContains", 1) > 1:
            raise _CannotSay("minContains above 1 and maxContains are not served")
        if schema.get("minContains", 1) == 0:
            return _Remade()
        if most is None or most > _MAX_CONTAINS_ITEMS:
            raise _CannotSay(f"give the array a maxItems of {_MAX_CONTAINS_ITEMS} at most")
        arrays = [
            {"type": "array", "prefixItems": [True] * i + [wanted], "minItems": i + 1}
            for i in range(most)
        ]
        return _Remade(also=[{"anyOf": [*_any_but("array", schema), *arrays]}])

    def _dependent(self, by_name: dict[str, Any]) -> _Remade:
        """A list names properties that must be there too."""
        return _Remade(
            also=[
                {"anyOf": [{"properties": {name: False}}, _required_too(each)]}
                for name, each in by_name.items()
            ]
        )

    def _min_properties(self, schema: dict[str, Any]) -> _Remade:
        missing = schema["minProperties"] - len(self._required(schema))
        if missing <= 0:
            return _Remade()
        optional = _optional(schema)
        if not optional:
            # llguidance counts them, but not whether the names differ: one at most is certain.
            if missing > 1:
                raise _CannotSay(
                    "that names of additionalProperties differ cannot be enforced, so 1 more than "
                    "the required ones is the most; require some by name"
                )
            return _Remade(beside={"minProperties": schema["minProperties"]})
        some = _choices(schema, optional, missing)
        return _Remade(also=[{"anyOf": [{"required": names} for names in some]}])

    def _max_properties(self, schema: dict[str, Any]) -> _Remade:
        optional = _optional(schema)
        if not optional:
            return _Remade(beside={"maxProperties": schema["maxProperties"]})
        most = schema["maxProperties"] - len(schema.get("required", ()))
        if most >= len(optional):
            _choices(schema, optional, 0)
            return _Remade()
        some = _choices(schema, optional, len(optional) - max(most, 0))
        left_out = [{"properties": dict.fromkeys(names, False)} for names in some]
        return _Remade(also=[{"anyOf": left_out}] if most >= 0 else [False])

    def _property_names(self, schema: dict[str, Any]) -> _Remade:
        wanted = self._resolved(schema["propertyNames"])
        if wanted is True or wanted is False:
            return _Remade(also=[True if wanted else {"properties": {}, "maxProperties": 0}])
        if (values := self._values(wanted)) is not None:
            names = [name for name in values if isinstance(name, str)]
            named = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
            return _Remade(also=[named])
        said = {key for key in wanted if key not in ("type", "title", "description")}
        if not said:
            return _Remade()
        if said == {"pattern"}:
            pattern = wanted["pattern"]
        elif said <= {"minLength", "maxLength"}:
            least, most = wanted.get("minLength", 0), wanted.get("maxLength", "")
            pattern = f"^[\\s\\S]{{{least},{most}}}$"
        else:
            raise _CannotSay("of names, an enum, a pattern, or minLength and maxLength are served")
        if schema.get("properties") or schema.get("patternProperties"):
            raise _CannotSay("it is served where no properties are declared beside it")
        rest = schema.get("additionalProperties", True)
        held = {"patternProperties": {pattern: rest}, "additionalProperties": False}
        return _Remade(also=[held])

    def _unevaluated_properties(self, schema: dict[str, Any]) -> _Remade:
        rest = schema["unevaluatedProperties"]
        if rest is True or "additionalProperties" in schema:
            return _Remade()
        names = self._declared(schema)
        seen = {
            **dict.fromkeys(names, True),
            **self._remade_value("properties", schema.get("properties", {}), "#/properties"),
        }
        return _Remade({"properties": seen, "additionalProperties": self.remade(rest, "#")})

    def _declared(self, schema: Schema, depth: int = 0) -> list[str]:
        """Names of all properties that it evaluates, where no branch decides which."""
        schema = self._resolved(schema) if depth else schema
        if isinstance(schema, bool):
            return []
        branching = {*_APPLICATORS, "patternProperties", "additionalProperties"} - {"allOf", "$ref"}
        if not branching.isdisjoint(schema) or depth > _MAX_REFS:
            raise _CannotSay("beside it only properties, allOf and $ref of such are served")
        inner = [*schema.get("allOf", ())]
        inner += [{"$ref": schema["$ref"]}] if "$ref" in schema else []
        names = [name for each in inner for name in self._declared(each, depth + 1)]
        return [*schema.get("properties", {}), *names]

    def _unevaluated_items(self, schema: dict[str, Any]) -> _Remade:
        rest = schema["unevaluatedItems"]
        if rest is True or "items" in schema:
            return _Remade()
        if not {*_APPLICATORS, "contains"}.isdisjoint(schema):
            raise _CannotSay("beside it only prefixItems are served; use items")
        return _Remade({"items": self.remade(rest, "#")})

    # -- what is known of a schema --

    def _resolved(self, schema: Schema) -> Schema:
        """What its `$ref` points to, where that is all it says."""
        for _ in range(_MAX_REFS):
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
            raise _CannotSay(f"{ref[:100]} is not in this schema")
        found: Any = self._root
        for part in ref[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, ValueError, IndexError, TypeError):
                raise _CannotSay(f"{ref[:100]} does not exist") from None
        return found

    def _required(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        """Names that must be there, as far as that is plain."""
        self._count()
        schema = self._resolved(schema) if depth else schema
        if not isinstance(schema, dict) or depth > _MAX_REFS:
            return frozenset()
        inner = [*schema.get("allOf", ())]
        inner += [{"$ref": schema["$ref"]}] if "$ref" in schema else []
        found = (self._required(each, depth + 1) for each in inner)
        return frozenset(schema.get("required", ())).union(*found)

    def _values(self, schema: Schema) -> list[Any] | None:
        """All values that it allows, each once; None where they are too many, or not plain."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict):
            return None
        others = schema.keys() - {"title", "description", "default", "type", "enum", "const"}
        if others:
            return None
        types = _types(schema)
        if "const" in schema:
            values = [schema["const"]]
        elif "enum" in schema:
            values = schema["enum"]
        elif types <= {"boolean", "null"}:
            values = [value for value in (True, False, None) if _type_of(value) in types]
        else:
            return None
        by_text = {_text(value): value for value in values if _has_type(value, types)}
        return list(by_text.values())

    def _are_apart(self, a: Schema, b: Schema, depth: int = 0) -> bool:
        """Whether no value is both: true only where that is certain."""
        self._count()
        if depth > _MAX_REFS:
            return False
        a, b = self._resolved(a), self._resolved(b)
        for one, other in ((a, b), (b, a)):
            if one is False:
                return True
            if isinstance(one, dict):
                if any(self._are_apart(each, other, depth + 1) for each in one.get("allOf", ())):
                    return True
                if "anyOf" in one and all(
                    self._are_apart(each, other, depth + 1) for each in one["anyOf"]
                ):
                    return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        return self._have_apart_kinds(a, b) or self._have_apart_properties(a, b, depth)

    def _have_apart_kinds(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        of_a, of_b = self._facts_of(a), self._facts_of(b)
        if of_a.types.isdisjoint(of_b.types):
            return True
        if of_a.values is None or of_b.values is None:
            return False
        return of_a.values.isdisjoint(of_b.values)

    def _have_apart_properties(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        if not self._facts_of(a).types == self._facts_of(b).types == {"object"}:
            return False
        required = {*a.get("required", ()), *b.get("required", ())}
        return any(
            self._are_apart(_property(a, name), _property(b, name), depth + 1) for name in required
        )

    def _facts_of(self, schema: dict[str, Any]) -> "_Facts":
        """Found once: each branch of a oneOf is held against all others."""
        facts = self._facts.get(id(schema))
        if facts is None:
            values = self._values(schema)
            texts = None if values is None else frozenset(map(_text, values))
            facts = self._facts[id(schema)] = _Facts(schema, _types(schema), texts)
        return facts

    # -- opposites --

    def _negated(self, schema: Schema, types: frozenset[str], depth: int = 0) -> Schema:
        """The values of these types that the schema does not allow."""
        self._count()
        if depth > 4 * _MAX_REFS:
            raise _CannotSay("it refers to itself")
        schema = self._resolved(schema)
        if isinstance(schema, bool):
            return not schema
        union: list[Schema] = []
        for key, value in schema.items():
            union += self._opposites(key, value, types, depth + 1)
        possible = [each for each in union if each is not False]
        return {"anyOf": possible} if possible else False

    def _opposites(
        self, key: str, value: Any, types: frozenset[str], depth: int
    ) -> Iterable[Schema]:
        """Of one keyword: schemas of which one holds where the keyword does not."""
        if key in _NOT_NEGATED and not (key == "additionalProperties" and value in (True, {})):
            raise _CannotSay(f"the opposite of {key} cannot be said")
        if key in _OPPOSITES:
            kind, opposite, change = _OPPOSITES[key]
            limit = value + change
            possible = kind in types or (kind == "number" and "integer" in types)
            return (
                [{"type": kind, opposite: limit}] if possible and not (change and limit < 0) else []
            )
        match key:
            case "type":
                return [_other_types(value, types)]
            case "const":
                return _other_values([value], types)
            case "enum":
                self._count(len(value))
                return _other_values(value, types)
            case "required":
                return [_absent([name]) for name in value]
            case "properties":
                return [
                    {"type": "object", "required": [name], "properties": {name: opposite}}
                    for name, each in value.items()
                    if (opposite := self._negated(each, _ANY_TYPE, depth)) is not False
                ]
            case "not":
                return [value]
            case "allOf":
                return [self._negated(each, types, depth) for each in value]
            case "anyOf":
                return [{"allOf": [self._negated(each, types, depth) for each in value]}]
        return []  # an annotation


_ANY_TYPE = frozenset(_TYPES) | {"integer"}


def _no_dynamic_ref(schema: dict[str, Any]) -> _Remade:
    raise _CannotSay("use $ref")


def _format(schema: dict[str, Any]) -> _Remade:
    name = schema["format"]
    name = _NARROWER_FORMATS.get(name, name)
    beside = {"format": name} if name in _FORMATS else {}
    return _Remade(beside, [{"pattern": each} for each in _PATTERNS_OF_FORMAT.get(name, ())])


def _types(schema: Schema) -> frozenset[str]:
    """What its values may be, by `type` and the values that it names; "number" has all integers."""
    if not isinstance(schema, dict):
        return _ANY_TYPE
    if "type" in schema:
        said = schema["type"]
        found = frozenset([said] if isinstance(said, str) else said)
    elif "const" in schema:
        found = frozenset([_type_of(schema["const"])])
    elif "enum" in schema:
        found = frozenset(_type_of(value) for value in schema["enum"])
    else:
        return _ANY_TYPE
    return found | {"integer"} if "number" in found else found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _has_type(value: Any, types: frozenset[str]) -> bool:
    return _type_of(value) in types


def _text(value: Any) -> str:
    """Equal for values that JSON Schema calls equal."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _property(schema: dict[str, Any], name: str) -> Schema:
    """What the property must be."""
    declared: dict[str, Schema] = schema.get("properties", {})
    if name in declared:
        return declared[name]
    return schema.get("additionalProperties", True) if "patternProperties" not in schema else True


def _required_too(each: Any) -> Schema:
    return {"required": each} if isinstance(each, list) else each


def _absent(names: Iterable[str]) -> Schema:
    """An object without any of these."""
    return {"type": "object", "properties": dict.fromkeys(names, False)}


def _any_but(kind: str, schema: dict[str, Any]) -> list[Schema]:
    others = [each for each in _TYPES if each != kind and each in _types(schema)]
    return [{"type": others}] if others else []


def _optional(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required", ())
    declared: dict[str, Schema] = schema.get("properties", {})
    return [name for name, each in declared.items() if name not in required and each is not False]


def _choices(schema: dict[str, Any], names: list[str], size: int) -> list[list[str]]:
    """All ways to take so many of these, where no other properties count."""
    if schema.get("additionalProperties", True) is not False or schema.get("patternProperties"):
        raise _CannotSay('it is served beside "additionalProperties": false')
    if math.comb(len(names), size) > _MAX_BRANCHES:
        raise _CannotSay(
            f"more choices of properties meet it than the {_MAX_BRANCHES} that can be served"
        )
    return [list(some) for some in combinations(names, size)]


def _other_types(value: Any, types: frozenset[str]) -> Schema:
    excluded = {value} if isinstance(value, str) else set(value)
    if "integer" in excluded and "number" not in excluded and "number" in types:
        raise _CannotSay("a number that is no integer cannot be said")
    if "number" in excluded:
        excluded.add("integer")
    others = [each for each in _TYPES if each in types and each not in excluded]
    if "integer" in types - excluded and "number" not in types:
        others.append("integer")
    return {"type": others} if others else False


def _other_values(values: list[Any], types: frozenset[str]) -> list[Schema]:
    """Of each type what is not among the values."""
    if any(isinstance(value, list | dict) for value in values):
        raise _CannotSay(
            "of const and enum, the opposite can be said of texts, numbers and the like"
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
    return [each for each in union if not _types(each).isdisjoint(types)]


def _pattern_of_others(texts: list[str]) -> str:
    """A regex of every text but these."""
    if max(map(len, texts)) > _MAX_FORBIDDEN_CHARS:
        raise _CannotSay(f"a text of more than {_MAX_FORBIDDEN_CHARS} characters is forbidden")
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^{_others(tree)}$"


def _others(node: dict[str, Any]) -> str:
    """What may follow where the texts have come to this node of their tree."""
    chars = [char for char in node if char]
    if not chars:
        return "[\\s\\S]+"
    named = "".join(_escaped(char) for char in chars)
    ways = [f"[^{named}][\\s\\S]*", *(_escaped(char) + _others(node[char]) for char in chars)]
    return f"({'|'.join(ways)}){'' if '' in node else '?'}"


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
