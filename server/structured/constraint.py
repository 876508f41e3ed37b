"""Constraints on an answer: the request fields that set them, as grammars for llguidance.

Why llguidance and not xgrammar: it computes each mask when it is needed, in about 50 us, and
compiles next to nothing in advance, so no request waits for a compilation; it is one small wheel
that imports neither torch nor transformers; and a JSON schema that it cannot enforce is an error
with a message, not a silently weaker grammar.

A grammar is a string here. `check_grammar` compiles it, as the engine does later.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from penstock.engine.client import BadGrammar
from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.structured.grammar_checker import GrammarChecker
from penstock.server.structured.json_schema import enforceable
from penstock.server.structured.limits import check_lark, check_regex, check_schema

MAX_GRAMMAR_CHARS = 1 << 20
MAX_GBNF_CHARS = 1 << 16  # translated in Python, about 4 us per character
# Between the tokens of a JSON text: nothing, a space, or one or two newlines with indentation. With
# more freedom a model may write whitespace forever. Source: llama.cpp's `space` rule.
_WHITESPACE = r"( |\n{1,2}[ \t]{0,20})?"
# Older names of vLLM, and names of SGLang.
RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
}


class Constraint(NamedTuple):
    """A field that constrains the answer. build: makes its grammar, which may take a while; raises
    InvalidRequest."""

    param: str
    build: Callable[[], str]


def _check_length(num_chars: int, limit: int = MAX_GRAMMAR_CHARS) -> None:
    """Before anything looks at a text, during which no other thread would run. Raises
    ValueError."""
    if num_chars > limit:
        raise ValueError(f"it has {num_chars} characters, more than the {limit} allowed")


def _read(text: str) -> Any:
    """Of JSON in a text of JSON. Raises ValueError."""
    _check_length(len(text))
    return json.loads(text)


def json_schema_grammar(
    schema: dict[str, Any], *, whitespace: str = _WHITESPACE, is_lenient: bool = False
) -> str:
    """The grammar of the JSON texts that validate against the schema, not yet compiled.

    whitespace: a regex of what may stand between tokens. is_lenient: keywords that cannot be
    enforced are ignored, not refused. Raises ValueError.
    """
    _check_length(len(json.dumps(schema, allow_nan=False)))
    check_schema(schema)
    enforced = enforceable(schema, is_lenient=is_lenient)
    return grammar_of_schema(enforced, whitespace=whitespace, is_lenient=is_lenient)


def grammar_of_schema(
    schema: dict[str, Any], *, whitespace: str = _WHITESPACE, is_lenient: bool = False
) -> str:
    """The same for a schema that `enforceable` returned."""
    options: Any = {"whitespace_pattern": whitespace, "lenient": is_lenient}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def regex_grammar(regex: str) -> str:
    """The texts that the regex matches completely; anchors around it change nothing.

    Raises ValueError.
    """
    _check_length(len(regex))
    regex = without_anchors(regex)
    check_regex(regex)
    return LLMatcher.grammar_from_regex(regex)


def without_anchors(regex: str) -> str:
    regex = regex.removeprefix("^")
    num_backslashes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    has_end = regex.endswith("$") and num_backslashes % 2 == 0
    return regex[:-1] if has_end else regex


def choice_grammar(choices: list[str]) -> str:
    """Raises ValueError."""
    _check_length(sum(map(len, choices)))
    # One terminal, not a rule: then all choices are one automaton.
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")


def gbnf_grammar(text: str) -> str:
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
    check_lark(lark)
    return LLMatcher.grammar_from_lark(lark)


def lark_grammar(text: str) -> str:
    """Raises ValueError."""
    _check_length(len(text))
    check_lark(text)
    return LLMatcher.grammar_from_lark(text)


def structural_tag_grammar(value: dict[str, Any] | str) -> str:
    """Free text in which each trigger begins a tag, whose content follows the tag's schema.

    value: vLLM's first form: `structures` of begin, schema and end, and `triggers`. Raises
    ValueError.
    """
    value = _read(value) if isinstance(value, str) else value
    try:
        triggers = value["triggers"]
        tags = [_tag(structure, triggers) for structure in value["structures"]]
        grammar = StructTag.to_grammar(tags, assume_special=False)
    except (KeyError, TypeError, AttributeError, AssertionError, StopIteration) as error:
        raise ValueError(
            'it must hold "structures", each with "begin", which begins with a trigger, "schema" '
            'and "end", and "triggers"'
        ) from error
    return LLMatcher.grammar_from_lark(grammar)


def _tag(structure: dict[str, Any], triggers: list[str]) -> StructTag:
    begin, schema, end = structure["begin"], structure["schema"], structure["end"]
    trigger = next(each for each in triggers if each and begin.startswith(each))
    if not (isinstance(schema, dict) and isinstance(end, str)):
        raise TypeError
    check_schema(schema)
    schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)


def constraint_of(
    response_format: dict[str, Any] | None,
    structured_outputs: dict[str, Any] | None,
    grammar: str | None,
    json_schema: dict[str, Any] | None,
) -> Constraint | None:
    """The constraint that one of these fields sets. Raises InvalidRequest, also if several do."""
    found = []
    if response_format is not None and (constraint := _from_response_format(response_format)):
        found.append(constraint)
    if structured_outputs is not None:
        found.append(_from_structured_outputs(structured_outputs))
    if grammar:
        found.append(_constraint("grammar", gbnf_grammar, grammar))
    if json_schema is not None:
        found.append(_constraint("json_schema", json_schema_grammar, json_schema))
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


def _constraint(param: str, convert: Callable[[Any], str], value: Any) -> Constraint:
    def build() -> str:
        try:
            return convert(value)
        except (ValueError, RecursionError) as error:
            _refuse(param, str(error))

    return Constraint(param, build)


def _from_response_format(value: dict[str, Any]) -> Constraint | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp takes a schema here too.
        schema = _object_at(value, "schema", "response_format.schema")
        return _constraint("response_format", json_schema_grammar, schema or {"type": "object"})
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
        convert = partial(json_schema_grammar, is_lenient=not strict)
        return _constraint(f"{at}.schema", convert, schema)
    if kind == "structural_tag":
        return _constraint("response_format", structural_tag_grammar, value)
    message = 'response_format.type must be "text", "json_object" or "json_schema"'
    raise InvalidRequest(message, param="response_format.type")


def _object_at(value: dict[str, Any], key: str, param: str) -> dict[str, Any] | None:
    found = value.get(key)
    if found is not None and not isinstance(found, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return found


_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def _from_structured_outputs(fields: dict[str, Any]) -> Constraint:
    """Of vLLM's field. Raises InvalidRequest."""
    present = {key: each for key, each in fields.items() if each not in (None, False)}
    for key in present:
        if key not in _KINDS:
            hint = f"use one of {', '.join(_KINDS)}"
            raise UnsupportedParameter(f"structured_outputs.{key[:64]}", hint)
    if len(present) != 1:
        message = f"structured_outputs needs exactly one of {', '.join(_KINDS)}"
        raise InvalidRequest(message, param="structured_outputs")
    ((key, value),) = present.items()
    param = f"structured_outputs.{key}"
    if key == "json":
        return _constraint(param, _schema_grammar, _typed(param, value, (dict, str), "a schema"))
    if key == "json_object":
        _typed(param, value, (bool,), "true")
        return _constraint(param, json_schema_grammar, {"type": "object"})
    if key == "choice":
        _check_choices(param, value)
        return _constraint(param, choice_grammar, value)
    if key == "structural_tag":
        typed = _typed(param, value, (dict, str), "an object")
        return _constraint(param, structural_tag_grammar, typed)
    convert = regex_grammar if key == "regex" else gbnf_grammar
    return _constraint(param, convert, _typed(param, value, (str,), "a string"))


def _schema_grammar(schema: dict[str, Any] | str) -> str:
    """schema: an object, or its JSON text. Raises ValueError."""
    if isinstance(schema, str):
        schema = _read(schema)
        if not isinstance(schema, dict):
            raise ValueError("it is not a JSON object")
    return json_schema_grammar(schema)


def _typed(param: str, value: Any, kinds: tuple[type, ...], expected: str) -> Any:
    if not isinstance(value, kinds):
        raise InvalidRequest(f"{param} must be {expected}", param=param)
    return value


def _check_choices(param: str, value: Any) -> None:
    is_valid = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    if not is_valid:
        raise InvalidRequest(f"{param} must be a list of at least one string", param=param)
