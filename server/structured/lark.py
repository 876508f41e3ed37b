"""Parts of grammars in llguidance's Lark: literals with special tokens, and nested grammars.

A grammar is a string: Lark, or JSON with a list of grammars, the first of which is the start.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Any text, line breaks included.
ANY_TEXT = "/(?s:.*)/"


def literal(text: str, special: Mapping[str, int]) -> str:
    """Exactly this text, in which special tokens are themselves. special: text -> id."""
    if not text:
        return '""'
    if not special:
        return _quoted(text)
    markers = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({markers})", text)
    return " ".join(f"<[{special[p]}]>" if p in special else _quoted(p) for p in pieces if p)


def nested(lark: str, grammars: Mapping[str, str | dict[str, Any]]) -> str:
    """A grammar in which `@name` refers to one of `grammars`: a grammar or a JSON schema."""
    parts: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, grammar in grammars.items():
        first, *others = _parts_of(grammar)
        parts += [first | {"name": name}, *others]
    return json.dumps({"grammars": parts})


def preceded(grammar: str, before: str, rules: Iterable[str]) -> str:
    """The grammar, which must be Lark, after what `before` and its rules say.

    In the same Lark: what precedes may begin as the grammar does, or be absent.
    """
    first, *others = _parts_of(grammar)
    rest: str = first["lark_grammar"]
    assert rest.startswith("start:"), rest
    lines = [f"start: {before} rest", *rules, rest.replace("start:", "rest:", 1)]
    return json.dumps({"grammars": [first | {"lark_grammar": "\n".join(lines)}, *others]})


def _parts_of(grammar: str | dict[str, Any]) -> list[dict[str, Any]]:
    if isinstance(grammar, dict):
        return [{"json_schema": grammar}]
    if grammar.lstrip().startswith("{"):
        parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
        return parts
    return [{"lark_grammar": grammar}]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
