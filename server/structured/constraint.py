"""Constraints on an answer: the request fields that set them, and what they let an answer be.

Why llguidance and not xgrammar: it computes each mask when it is needed, in about 50 us, and
compiles next to nothing in advance, so no request waits for a compilation; it is one small wheel
that imports neither torch nor transformers; and a JSON schema that it cannot enforce is an error
with a message, not a silently weaker grammar.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from penstock.engine.client import BadGrammar
from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.structured.grammar import (
    WHITESPACE,
    Content,
    JsonText,
    LarkText,
    json_text,
    quoted,
)
from penstock.server.structured.grammar_checker import GrammarChecker
from penstock.server.structured.json_schema import enforceable
from penstock.server.structured.limits import check_lark, check_regex, check_schema

MAX_GRAMMAR_CHARS = 1 << 20
MAX_GBNF_CHARS = 1 << 16  # translated in Python, about 4 us per character
# Members of `structured_outputs` by older names of vLLM, and by names of SGLang.
SYNONYMS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
}


class Constraint(NamedTuple):
    """A field that constrains the answer. build: what it lets the answer be, which may take a while
    to find; raises InvalidRequest."""

    param: str
    build: Callable[[], Content]


def _check_length(num_chars: int, limit: int = MAX_GRAMMAR_CHARS) -> None:
    """Before anything looks at a text, during which no other thread would run. Raises
    ValueError."""
    if num_chars > limit:
        raise ValueError(f"it has {num_chars} characters, more than the {limit} allowed")


def _read(text: str) -> Any:
    """Reads JSON in a text of JSON. Raises ValueError."""
    _check_length(len(text))
    return json.loads(text)


def enforced_json(
    schema: dict[str, Any] | str, *, whitespace: str = WHITESPACE, is_lenient: bool = False
) -> JsonText:
    """The JSON texts that validate against the schema, an object or its JSON text. whitespace,
    is_lenient: see `json_text`. Raises ValueError."""
    if isinstance(schema, str):
        schema = _read(schema)
        if not isinstance(schema, dict):
            raise ValueError("it is not a JSON object")
    _check_length(len(json.dumps(schema, allow_nan=False)))
    check_schema(schema)
    enforced = enforceable(schema, is_lenient=is_lenient)
    return json_text(enforced, whitespace=whitespace, is_lenient=is_lenient)


def _matching(regex: str) -> LarkText:
    """The texts that the regex matches completely; anchors around it change nothing. Raises
    ValueError."""
    _check_length(len(regex))
    regex = without_anchors(regex)
    check_regex(regex)
    escaped = json.loads(LLMatcher.grammar_from_regex(regex))
    return LarkText(escaped["grammars"][0]["lark_grammar"])


def without_anchors(regex: str) -> str:
    regex = regex.removeprefix("^")
    num_backslashes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    has_end = regex.endswith("$") and num_backslashes % 2 == 0
    return regex[:-1] if has_end else regex


def _one_of(choices: list[str]) -> LarkText:
    """Raises ValueError."""
    _check_length(sum(map(len, choices)))
    # One terminal, not a rule: then all choices are one automaton.
    return LarkText(f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, choices))}")


def _gbnf(text: str) -> LarkText:
    """A grammar in GBNF, llama.cpp's notation, or in Lark. Raises ValueError."""
    _check_length(len(text), MAX_GBNF_CHARS)
    try:
        lark = any_to_lark(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (
        Exception
    ) as error:  # the translator raises plain Exception, and IndexError at the end of the text
        raise ValueError(str(error)) from error
    return lark_text(lark)


def lark_text(text: str) -> LarkText:
    """Raises ValueError."""
    _check_length(len(text))
    check_lark(text)
    return LarkText(text)


def _tagged(value: dict[str, Any] | str) -> LarkText:
    """Free text in which each trigger begins a tag, whose content follows the tag's schema. value:
    vLLM's first form: `structures` of begin, schema and end, and `triggers`. Raises ValueError."""
    value = _read(value) if isinstance(value, str) else value
    try:
        triggers = value["triggers"]
        tags = [_tag(structure, triggers) for structure in value["structures"]]
        return LarkText(StructTag.to_grammar(tags, assume_special=False))
    except (KeyError, TypeError, AttributeError, AssertionError, StopIteration) as error:
        raise ValueError(
            'it must hold "structures", each with "begin", which begins with a trigger, "schema" '
            'and "end", and "triggers"'
        ) from error


def _tag(structure: dict[str, Any], triggers: list[str]) -> StructTag:
    begin, schema, end = structure["begin"], structure["schema"], structure["end"]
    trigger = next(each for each in triggers if each and begin.startswith(each))
    if not (isinstance(schema, dict) and isinstance(end, str)):
        raise TypeError
    check_schema(schema)
    schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)


def constraint_of(
    response_format: dict[str, Any] | None,
    structured_outputs: dict[str, Any] | None,
    grammar: str | None,
    json_schema: dict[str, Any] | None,
    others: Mapping[str, Any] | None = None,
) -> Constraint | None:
    """The constraint that one of these fields sets. Raises InvalidRequest, also if several do.
    others: the request's other fields, among which `structured_outputs` may have synonyms."""
    found = []
    if response_format is not None and (constraint := _from_response_format(response_format)):
        found.append(constraint)
    synonym, outputs = _by_synonym(structured_outputs, others or {})
    if outputs is not None:
        found.append(_from_structured_outputs(outputs, synonym))
    if grammar:
        found.append(_constraint("grammar", _gbnf, grammar))
    if json_schema is not None:
        found.append(_constraint("json_schema", enforced_json, json_schema))
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        message = f"{names} cannot be combined; send only one of them"
        raise InvalidRequest(message, param=found[1].param)
    return found[0] if found else None


async def check_grammar(checker: GrammarChecker, grammar: str, param: str, client: str) -> int:
    """Compiles it in another process; returns the bytes that the compiled grammar takes. client:
    see `GrammarChecker.check`. Raises InvalidRequest and GrammarQueueFull."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        _refuse(param, f"it has more than {MAX_GRAMMAR_CHARS} characters")
    try:
        return await checker.check(grammar, client)
    except BadGrammar as error:
        _refuse(param, str(error))


# Replaces messages of llguidance that name its own options, or no reason.
_EXPLAINED = {
    "oneOf constraints": "more than one branch of a oneOf may match; use anyOf, or give each "
    "branch a required property with a const of its own",
    "NoExtension": "no finite text satisfies it; does it refer to itself without an end?",
    "Unimplemented keys": "it has keywords that cannot be enforced: ",
    "Default retriever": "it refers to another document; put what it needs under $defs",
}


def _refuse(param: str, why: str) -> NoReturn:
    for text, better in _EXPLAINED.items():
        if text in why:
            why = better + why.partition(": ")[2] if better.endswith(": ") else better
            break
    message = f"{param} cannot be compiled to a grammar: {why}"
    raise InvalidRequest(message, param=param, code="invalid_grammar")


def _constraint(param: str, convert: Callable[[Any], Content], value: Any) -> Constraint:
    def build() -> Content:
        try:
            return convert(value)
        except (ValueError, RecursionError) as error:
            _refuse(param, str(error))

    return Constraint(param, build)


def _from_response_format(value: dict[str, Any]) -> Constraint | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind in ("json_object", "json"):
        return _constraint("response_format", enforced_json, _object_schema(value))
    if kind == "regex":
        pattern = _typed("response_format.value", value.get("value"), (str,), "a string")
        return _constraint("response_format.value", _matching, pattern)
    if kind == "json_schema":
        at = "response_format.json_schema"
        described = _object_at(value, "json_schema", at)
        if described is None:
            raise InvalidRequest(f"{at} is missing; it holds name and schema", param=at)
        schema = _object_at(described, "schema", f"{at}.schema")
        if schema is None:
            raise InvalidRequest(f"{at}.schema is missing", param=f"{at}.schema")
        strict = _typed(f"{at}.strict", described.get("strict") or False, (bool,), "true or false")
        # As at OpenAI: keywords that cannot be enforced are an error only if it is strict.
        convert = partial(enforced_json, is_lenient=not strict)
        return _constraint(f"{at}.schema", convert, schema)
    if kind == "structural_tag":
        return _constraint("response_format", _tagged, value)
    message = 'response_format.type must be "text", "json_object" or "json_schema"'
    raise InvalidRequest(message, param="response_format.type")


def _object_schema(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema beside json_object: llama.cpp calls it schema, TGI and huggingface_hub
    call it value. Raises InvalidRequest, also for other members, of which one may be a schema."""
    schemas = []
    for key in sorted(value.keys() - {"type"}):
        at = f"response_format.{key[:64]}"
        if value[key] is not None and key not in ("schema", "value"):
            message = f"{at} is not known; a schema is response_format.schema, or json_schema"
            raise InvalidRequest(message, param=at)
        schema = _object_at(value, key, at)
        if schema is not None and schema not in schemas:
            schemas.append(schema)
    if len(schemas) > 1:
        message = "response_format has two schemas, schema and value; send only one of them"
        raise InvalidRequest(message, param="response_format.value")
    if not schemas and value.get("type") == "json":
        message = "response_format.value is missing; it is the schema of the answer"
        raise InvalidRequest(message, param="response_format.value")
    return (schemas or [{"type": "object"}])[0] or {"type": "object"}


def _object_at(value: dict[str, Any], key: str, param: str) -> dict[str, Any] | None:
    found = value.get(key)
    if found is not None and not isinstance(found, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return found


def _by_synonym(
    outputs: dict[str, Any] | None, others: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any] | None]:
    """The first synonym that was sent, if any, and `structured_outputs` as both mean it. Raises
    InvalidRequest where they differ."""
    sent = [name for name in SYNONYMS if others.get(name) not in (None, False)]
    if sent:
        outputs = {k: v for k, v in (outputs or {}).items() if v not in (None, False)}
    for name in sent:
        meant = {SYNONYMS[name]: others[name]}
        if outputs and outputs != meant:
            message = f"{name} cannot be combined with another constraint; send only one of them"
            raise InvalidRequest(message, param=name)
        outputs = meant
    return next(iter(sent), None), outputs


# Each member of `structured_outputs`: how it is read, its types, and their name.
_MEMBERS: dict[str, tuple[Callable[[Any], Content], tuple[type, ...], str]] = {
    "json": (enforced_json, (dict, str), "a schema"),
    "json_object": (lambda _: enforced_json({"type": "object"}), (bool,), "true"),
    "regex": (_matching, (str,), "a string"),
    "choice": (_one_of, (list,), "a list of at least one string"),
    "grammar": (_gbnf, (str,), "a string"),
    "structural_tag": (_tagged, (dict, str), "an object"),
}


def _from_structured_outputs(fields: dict[str, Any], synonym: str | None) -> Constraint:
    """vLLM's field. Raises InvalidRequest, which names the synonym if there is one."""
    present = {key: each for key, each in fields.items() if each not in (None, False)}
    kinds = ", ".join(_MEMBERS)
    for key in present:
        if key not in _MEMBERS:
            raise UnsupportedParameter(f"structured_outputs.{key[:64]}", f"use one of {kinds}")
    if len(present) != 1:
        message = f"structured_outputs needs exactly one of {kinds}"
        raise InvalidRequest(message, param="structured_outputs")
    ((key, value),) = present.items()
    param = synonym or f"structured_outputs.{key}"
    convert, types, expected = _MEMBERS[key]
    _typed(param, value, types, expected)
    if key == "choice" and not (value and all(isinstance(each, str) for each in value)):
        raise InvalidRequest(f"{param} must be {expected}", param=param)
    return _constraint(param, convert, value)


def _typed(param: str, value: Any, kinds: tuple[type, ...], expected: str) -> Any:
    if not isinstance(value, kinds):
        raise InvalidRequest(f"{param} must be {expected}", param=param)
    return value
