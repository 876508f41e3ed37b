"""Pieces of llguidance's Lark: literals with special tokens in them, and grammars within grammars.

A grammar is a string: Lark, or JSON that has a list of grammars of which the first is the start.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

# Any text, over several lines too.
ANY_TEXT = "/(?s:.*)/"


def literal(text: str, special: Mapping[str, int]) -> str:
    """Just this text, where a special token is what it spells. special: its text -> its id."""
    if not text:
        return '""'
    if not special:
        return _quoted(text)
    marks = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({marks})", text)
    return " ".join(f"<[{special[p]}]>" if p in special else _quoted(p) for p in pieces if p)


def nested(lark: str, grammars: Mapping[str, str | dict[str, Any]]) -> str:
    """A grammar in which `@name` stands for another one: a grammar, or a JSON schema."""
    parts: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, grammar in grammars.items():
        first, *others = _parts_of(grammar)
        parts += [first | {"name": name}, *others]
    return json.dumps({"grammars": parts})


def _parts_of(grammar: str | dict[str, Any]) -> list[dict[str, Any]]:
    if isinstance(grammar, dict):
        return [{"json_schema": grammar}]
    if grammar.lstrip().startswith("{"):
        parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
        return parts
    return [{"lark_grammar": grammar}]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
