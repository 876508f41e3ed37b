"""Keyword by keyword, what llguidance lacks is expressed by keywords that it has."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from typing import Any, NamedTuple

from penstock.server.structured.json_schema.facts import (
    MAX_REFS,
    TYPES,
    CannotExpress,
    Schema,
    SchemaFacts,
    Unenforceable,
    types_of,
)
from penstock.server.structured.json_schema.negation import negated

# Branches that one keyword may become.
_MAX_BRANCHES = 500
_MAX_CONTAINS_ITEMS = 32

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "allOf")
_SINGLES = ("additionalProperties", "items", "additionalItems")
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")


class _Rewritten(NamedTuple):
    """The result of one keyword: keywords in its place, and schemas that must hold too. In the
    latter, keywords that llguidance lacks are rewritten in turn."""

    keywords: dict[str, Any] = {}  # noqa: RUF012, never written to
    all_of: Sequence[Schema] = ()


def enforceable(schema: dict[str, Any], *, is_lenient: bool = False) -> dict[str, Any]:
    """A schema of the same values that llguidance can enforce. is_lenient: keywords that cannot be
    enforced are dropped, not refused. Raises Unenforceable."""
    rewritten = _Rewriter(schema, is_lenient).rewritten(schema, "#")
    assert isinstance(rewritten, dict), rewritten
    return rewritten


class _Rewriter:
    def __init__(self, root: dict[str, Any], is_lenient: bool) -> None:
        self._is_lenient = is_lenient
        self._facts = SchemaFacts(root)
        self._rules: dict[str, Callable[[dict[str, Any]], _Rewritten]] = {
            "not": self._not,
            "if": self._if,
            "oneOf": self._one_of,
            "uniqueItems": self._unique_items,
            "contains": self._contains,
            "dependentRequired": lambda schema: _dependent(schema["dependentRequired"]),
            "dependentSchemas": lambda schema: _dependent(schema["dependentSchemas"]),
            "dependencies": lambda schema: _dependent(schema["dependencies"]),
            "minProperties": self._min_properties,
            "maxProperties": self._max_properties,
            "propertyNames": self._property_names,
            "unevaluatedProperties": self._unevaluated_properties,
            "unevaluatedItems": self._unevaluated_items,
            "$dynamicRef": _dynamic_ref,
            "$recursiveRef": _dynamic_ref,
            "format": _format,
        }
        # The last are llguidance's own options, which clients may not set.
        self._consumed = {*self._rules, "then", "else", "minContains", "maxContains", "x-guidance"}

    def rewritten(self, schema: Schema, path: str) -> Schema:
        """path: the schema's place in the client's schema, as a JSON pointer."""
        if not isinstance(schema, dict):
            return schema
        self._facts.count()
        result = {
            key: self._rewritten_value(key, value, f"{path}/{key}")
            for key, value in schema.items()
            if key not in self._consumed
        }
        all_of: list[Schema] = []
        for key in schema:
            if key in self._rules:
                keywords, more = self._apply_rule(key, schema, path)
                result |= keywords
                all_of += [self.rewritten(each, f"{path}/{key}") for each in more]
        if all_of:
            given = result.get("allOf", [])
            result["allOf"] = [*given, *all_of] if isinstance(given, list) else given
        return result

    def _apply_rule(self, key: str, schema: dict[str, Any], path: str) -> _Rewritten:
        try:
            return self._rules[key](schema)
        except CannotExpress as error:
            if self._is_lenient:
                return _Rewritten()
            raise Unenforceable(f"{key} at {path} cannot be enforced: {error}") from None
        except (TypeError, AttributeError, KeyError) as error:
            raise Unenforceable(f"{key} at {path} does not follow JSON Schema") from error

    def _rewritten_value(self, key: str, value: Any, path: str) -> Any:
        if key in _MAPS and isinstance(value, dict):
            return {name: self.rewritten(each, f"{path}/{name}") for name, each in value.items()}
        if (key in _LISTS or key == "items") and isinstance(value, list):
            return [self.rewritten(each, f"{path}/{i}") for i, each in enumerate(value)]
        return self.rewritten(value, path) if key in _SINGLES else value

    def _not(self, schema: dict[str, Any]) -> _Rewritten:
        return _Rewritten(all_of=[negated(self._facts, schema["not"], types_of(schema))])

    def _if(self, schema: dict[str, Any]) -> _Rewritten:
        condition, then, otherwise = (schema.get(key, True) for key in ("if", "then", "else"))
        if then is True and otherwise is True:
            return _Rewritten()
        opposite = negated(self._facts, condition, types_of(schema))
        branches = [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]
        return _Rewritten(all_of=[{"anyOf": branches}])

    def _one_of(self, schema: dict[str, Any]) -> _Rewritten:
        branches = list(schema["oneOf"])
        types = types_of(schema)
        try:
            disjoint = [self._without_others(i, branches, types) for i in range(len(branches))]
        except CannotExpress:
            if not self._is_lenient:
                # llguidance may still find that they are disjoint; if not, it refuses.
                rewritten = [self.rewritten(each, "#") for each in branches]
                return _Rewritten(keywords={"oneOf": rewritten})
            disjoint = branches
        return _Rewritten(all_of=[{"anyOf": disjoint}])

    def _without_others(self, index: int, branches: list[Schema], types: frozenset[str]) -> Schema:
        own = branches[index]
        others = [
            negated(self._facts, other, types & types_of(self._facts.resolved(own)))
            for i, other in enumerate(branches)
            if i != index and not self._facts.are_disjoint(own, other)
        ]
        return {"allOf": [own, *others]} if others else own

    def _unique_items(self, schema: dict[str, Any]) -> _Rewritten:
        if schema["uniqueItems"] is not True or schema.get("maxItems", 2) <= 1:
            return _Rewritten()
        values = self._facts.values(schema.get("items", True))
        if values is None or "prefixItems" in schema:
            raise CannotExpress(
                "it is supported only for items of an enum; else set maxItems to 1, or leave it out"
            )
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
        sizes = range(least, min(most, len(values)) + 1)
        num = 0
        for size in sizes:
            num += math.perm(len(values), size)
            if num > _MAX_BRANCHES:
                raise CannotExpress(
                    f"its enum has more than {_MAX_BRANCHES} arrangements, the most that are "
                    "supported; give it fewer values, or a smaller maxItems"
                )
        constants = [{"const": value} for value in values]
        arrays = [
            {"type": "array", "prefixItems": list(some), "minItems": size, "maxItems": size}
            for size in sizes
            for some in permutations(constants, size)
        ]
        self._facts.count(num * len(values))
        return _Rewritten(all_of=[{"anyOf": [*_other_than_arrays(schema), *arrays]}])

    def _contains(self, schema: dict[str, Any]) -> _Rewritten:
        item, most = schema["contains"], schema.get("maxItems")
        if "maxContains" in schema or schema.get("minContains", 1) > 1:
            raise CannotExpress("minContains above 1 and maxContains are not supported")
        if schema.get("minContains", 1) == 0:
            return _Rewritten()
        if most is None or most > _MAX_CONTAINS_ITEMS:
            raise CannotExpress(f"it requires a maxItems of at most {_MAX_CONTAINS_ITEMS}")
        arrays = [
            {"type": "array", "prefixItems": [True] * i + [item], "minItems": i + 1}
            for i in range(most)
        ]
        return _Rewritten(all_of=[{"anyOf": [*_other_than_arrays(schema), *arrays]}])

    def _min_properties(self, schema: dict[str, Any]) -> _Rewritten:
        missing = schema["minProperties"] - len(self._facts.required(schema))
        if missing <= 0:
            return _Rewritten()
        optional = _optional(schema)
        if not optional:
            # llguidance counts them without checking that the names differ, so only one is certain.
            if missing > 1:
                raise CannotExpress(
                    "the names of additionalProperties cannot be forced to differ, so it may "
                    "exceed the number of required properties by 1 at most; require more by name"
                )
            return _Rewritten(keywords={"minProperties": schema["minProperties"]})
        some = _choices(schema, optional, missing)
        return _Rewritten(all_of=[{"anyOf": [{"required": names} for names in some]}])

    def _max_properties(self, schema: dict[str, Any]) -> _Rewritten:
        optional = _optional(schema)
        if not optional:
            return _Rewritten(keywords={"maxProperties": schema["maxProperties"]})
        most = schema["maxProperties"] - len(schema.get("required", ()))
        if most >= len(optional):
            _choices(schema, optional, 0)
            return _Rewritten()
        some = _choices(schema, optional, len(optional) - max(most, 0))
        absent = [{"properties": dict.fromkeys(names, False)} for names in some]
        return _Rewritten(all_of=[{"anyOf": absent}] if most >= 0 else [False])

    def _property_names(self, schema: dict[str, Any]) -> _Rewritten:
        names_schema = self._facts.resolved(schema["propertyNames"])
        if names_schema is True or names_schema is False:
            return _Rewritten(
                all_of=[True if names_schema else {"properties": {}, "maxProperties": 0}]
            )
        if (values := self._facts.values(names_schema)) is not None:
            names = [name for name in values if isinstance(name, str)]
            named = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
            return _Rewritten(all_of=[named])
        keywords = {key for key in names_schema if key not in ("type", "title", "description")}
        if not keywords:
            return _Rewritten()
        if keywords == {"pattern"}:
            pattern = names_schema["pattern"]
        elif keywords <= {"minLength", "maxLength"}:
            least, most = names_schema.get("minLength", 0), names_schema.get("maxLength", "")
            pattern = f"^[\\s\\S]{{{least},{most}}}$"
        else:
            raise CannotExpress("only an enum, a pattern, or minLength and maxLength are supported")
        if schema.get("properties") or schema.get("patternProperties"):
            raise CannotExpress("it cannot be combined with properties or patternProperties")
        rest = schema.get("additionalProperties", True)
        matching = {"patternProperties": {pattern: rest}, "additionalProperties": False}
        return _Rewritten(all_of=[matching])

    def _unevaluated_properties(self, schema: dict[str, Any]) -> _Rewritten:
        rest = schema["unevaluatedProperties"]
        if rest is True or "additionalProperties" in schema:
            return _Rewritten()
        names = self._evaluated_properties(schema)
        evaluated = {
            **dict.fromkeys(names, True),
            **self._rewritten_value("properties", schema.get("properties", {}), "#/properties"),
        }
        others = self.rewritten(rest, "#")
        return _Rewritten({"properties": evaluated, "additionalProperties": others})

    def _evaluated_properties(self, schema: Schema, depth: int = 0) -> list[str]:
        """The names of all properties that it evaluates, if that does not depend on the value."""
        schema = self._facts.resolved(schema) if depth else schema
        if isinstance(schema, bool):
            return []
        branching = {*_APPLICATORS, "patternProperties", "additionalProperties"} - {"allOf", "$ref"}
        if not branching.isdisjoint(schema) or depth > MAX_REFS:
            raise CannotExpress(
                "it can be combined only with properties, and with allOf and $ref to such schemas"
            )
        inner = [*schema.get("allOf", ())]
        inner += [{"$ref": schema["$ref"]}] if "$ref" in schema else []
        names = [name for each in inner for name in self._evaluated_properties(each, depth + 1)]
        return [*schema.get("properties", {}), *names]

    def _unevaluated_items(self, schema: dict[str, Any]) -> _Rewritten:
        rest = schema["unevaluatedItems"]
        if rest is True or "items" in schema:
            return _Rewritten()
        if not {*_APPLICATORS, "contains"}.isdisjoint(schema):
            raise CannotExpress("it can be combined only with prefixItems; use items")
        return _Rewritten({"items": self.rewritten(rest, "#")})


def _dependent(by_name: dict[str, Any]) -> _Rewritten:
    """by_name: property -> the names that it requires, or the schema."""
    return _Rewritten(
        all_of=[
            {"anyOf": [{"properties": {name: False}}, _as_schema(each)]}
            for name, each in by_name.items()
        ]
    )


def _as_schema(names_or_schema: Any) -> Schema:
    is_names = isinstance(names_or_schema, list)
    return {"required": names_or_schema} if is_names else names_or_schema


def _dynamic_ref(schema: dict[str, Any]) -> _Rewritten:
    raise CannotExpress("use $ref")


def _format(schema: dict[str, Any]) -> _Rewritten:
    """The format of llguidance that enforces this one, if any, and the patterns to add."""
    name = _NARROWER_FORMATS.get(schema["format"], schema["format"])
    patterns = [{"pattern": each} for each in _PATTERNS.get(name, ())]
    return _Rewritten({"format": name} if name in _FORMATS else {}, patterns)


def _other_than_arrays(schema: dict[str, Any]) -> list[Schema]:
    """Values of the schema's types that are not arrays."""
    types = types_of(schema)
    others = [each for each in TYPES if each != "array" and each in types]
    return [{"type": others}] if others else []


def _optional(schema: dict[str, Any]) -> list[str]:
    required = frozenset(schema.get("required", ()))
    declared: dict[str, Schema] = schema.get("properties", {})
    return [name for name, each in declared.items() if name not in required and each is not False]


def _choices(schema: dict[str, Any], names: list[str], size: int) -> list[list[str]]:
    """All choices of `size` of these names, provided that there are no other properties."""
    if schema.get("additionalProperties", True) is not False or schema.get("patternProperties"):
        raise CannotExpress('it requires "additionalProperties": false')
    if math.comb(len(names), size) > _MAX_BRANCHES:
        raise CannotExpress(
            f"it allows more than {_MAX_BRANCHES} choices of properties, the most that are "
            "supported"
        )
    return [list(some) for some in combinations(names, size)]


# The formats of llguidance.
_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
}
# Formats that contain one of llguidance's, which is enforced in their place.
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
_SECOND_BELOW_60 = "^[^:]*:[0-9]{2}:[0-5]"
# Patterns that must hold too: llguidance accepts February 29 of any year, and RFC 3339 allows
# year 0 and second 60, which few parsers accept.
_PATTERNS = {
    "date": (_REAL_DATE, _AFTER_YEAR_0),
    "date-time": (_REAL_DATE, _AFTER_YEAR_0, _SECOND_BELOW_60),
    "time": (_SECOND_BELOW_60,),
    "json-pointer": ("^(/([^~/]|~[01])*)*$",),
}
