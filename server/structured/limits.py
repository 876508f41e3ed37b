"""Limits on regexes, Lark and JSON schemas that are checked before anything is compiled.

They refuse at once what is certain to be too large, and name the limit. What else takes too much
time or memory ends in the process that compiles it: see grammar_checker.py. All of it takes time in
proportion to the text, and none recurs, so no text is too deep to be measured.

Why these sizes, measured with llguidance 1.9:
- A text that the grammar forces is followed to its end before the first token: `a{100000}` takes
  40 MB and 0.1 s, `a{1000000}` 360 MB and 2 s. An upper bound such as `[a-z]{1,10000000}` or a
  maxLength costs nothing, so there is no limit on it.
- The parser of JSON refuses what is nested more than 127 deep; of that, 7 is for our wrapping.
- The compiler recurs once for each property and each chained rule, and compares properties with
  each other: 3,000 optional ones take half a second, 10,000 overflow a stack of 1 MiB.
"""

import re
from typing import Any

MAX_EXPANDED = 100_000  # characters, or rules
MAX_MIN_VALUES = 1_000_000
MAX_SCHEMA_DEPTH = 120
MAX_GROUP_DEPTH = 250
MAX_NAMES = 2_000
MAX_REFS = 5_000
MAX_RULES = 5_000

_MAX_DIGITS = 10  # of a bound; more is as large as makes no difference

_MINIMA = ("minItems", "minLength", "minProperties")
_SCHEMAS_BY_NAME = frozenset(
    (
        "properties",
        "patternProperties",
        "$defs",
        "definitions",
        "dependentSchemas",
        "dependencies",
        "dependentRequired",
    )
)
_DATA_KEYWORDS = frozenset(("enum", "const", "default", "example", "examples"))

_REGEX_TOKEN = re.compile(
    r"(?P<escape>\\.?)|\{(?P<least>[0-9]+)(?:,[0-9]*)?\}|(?P<mark>[\[\]()|{])"
    r"|(?P<plain>[^\\\[\](){|]+)",
    re.DOTALL,
)
# An unclosed string or regex ends with its line, so that each character is looked at once.
_LARK_TOKEN = re.compile(
    r"(?P<skip>[^\S\n]+|//[^\n]*|\#[^\n]*)"
    r'|"(?P<string>(?:\\.|[^"\\\n])*+)"?'
    r"|/(?P<regex>(?:\\.|[^/\\\n])*+)/?"
    r"|\{\s*(?P<least>[0-9]+)\s*(?:,\s*[0-9]*\s*)?\}|~\s*(?P<times>[0-9]+)(?:\.\.[0-9]+)?"
    r"|(?P<colon>:)|(?P<mark>[()|\n])|(?P<name>[\w-]+)|(?P<other>.)"
)


class _Expansion:
    """The length of the longest alternative, once each repetition is written as often as it must
    occur. Raises ValueError as soon as it exceeds `MAX_EXPANDED`."""

    def __init__(self) -> None:
        # For each open group: its longest alternative, the current one but its last item, and that.
        self._groups = [(0, 0, 0)]

    def add(self, length: int) -> None:
        longest, before, last = self._groups[-1]
        self._set(longest, before + last, length)

    def repeat(self, digits: str) -> None:
        longest, before, last = self._groups[-1]
        least = 10**_MAX_DIGITS if len(digits) > _MAX_DIGITS else int(digits)
        self._set(longest, before, last * max(least, 1))

    def mark(self, sign: str) -> None:
        """A parenthesis, or the sign between alternatives."""
        if sign == "(":
            self._groups.append((0, 0, 0))
            if len(self._groups) > MAX_GROUP_DEPTH:
                raise ValueError(f"its groups are nested more than {MAX_GROUP_DEPTH} deep")
            return
        self._end_alternative()
        if sign == ")":
            self.add(self._groups.pop()[0] if len(self._groups) > 1 else 0)

    def _end_alternative(self) -> None:
        longest, before, last = self._groups[-1]
        self._groups[-1] = (max(longest, before + last), 0, 0)

    def end_rule(self) -> None:
        """Unless a group is open, which may go on in the next line."""
        if len(self._groups) == 1:
            self._groups = [(0, 0, 0)]

    @property
    def length(self) -> int:
        longest, before, last = self._groups[0]
        return max(longest, before + last)

    def _set(self, longest: int, before: int, last: int) -> None:
        if before + last > MAX_EXPANDED:
            raise ValueError(
                f"its repetitions expand to more than {MAX_EXPANDED} characters; lower them"
            )
        self._groups[-1] = (longest, before, last)


def check_regex(regex: str) -> int:
    """The length of what it expands to, at least. Raises ValueError."""
    expansion = _Expansion()
    is_in_class = False
    for token in _REGEX_TOKEN.finditer(regex):
        mark = token["mark"]
        if is_in_class:
            is_in_class = mark != "]"
        elif token["least"]:
            expansion.repeat(token["least"])
        elif mark and mark in "()|":
            expansion.mark(mark)
        elif token["plain"]:
            # Only the last of them is what a repetition after them repeats.
            expansion.add(len(token["plain"]) - 1)
            expansion.add(1)
        else:
            expansion.add(1)
            is_in_class = mark == "["
    return expansion.length


def check_lark(text: str) -> None:
    """Raises ValueError."""
    expansion = _Expansion()
    num_rules = 0
    for token in _LARK_TOKEN.finditer(text):
        mark = token["mark"]
        if token["least"] or token["times"]:
            expansion.repeat(token["least"] or token["times"])
        elif token["string"] is not None:
            expansion.add(len(token["string"]))
        elif token["regex"] is not None:
            expansion.add(check_regex(token["regex"]))
        elif mark == "\n":
            expansion.end_rule()
        elif mark:
            expansion.mark(mark)
        elif token["colon"]:
            num_rules += 1
        elif token["name"]:
            expansion.add(1)
    if num_rules > MAX_RULES:
        raise ValueError(f"it has more than {MAX_RULES} rules")


def check_schema(schema: Any) -> None:
    """Raises ValueError. What is no schema is left to those who read it as one."""
    num_refs = 0
    # The rest to look at: a value, how deep it is, how many values its parents demand at least,
    # and the keyword that it belongs to, which says what its names are.
    rest: list[tuple[Any, int, int, str]] = [(schema, 1, 1, "")]
    while rest:
        value, depth, least, of = rest.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep")
        if isinstance(value, list):
            rest += [(each, depth + 1, least, of) for each in value]
        if not isinstance(value, dict):
            continue
        if of in _DATA_KEYWORDS:
            rest += [(each, depth + 1, least, of) for each in value.values()]
        elif of in _SCHEMAS_BY_NAME:
            _check_names(of, value)
            rest += [(each, depth + 1, least, "") for each in value.values()]
        else:
            num_refs += isinstance(value.get("$ref"), str)
            least *= _least(value)
            if least > MAX_MIN_VALUES:
                raise ValueError(
                    f"{', '.join(_MINIMA)} demand more than {MAX_MIN_VALUES} values or characters, "
                    "multiplied where they are nested; lower them"
                )
            if isinstance(pattern := value.get("pattern"), str):
                check_regex(pattern)
            _check_names("required", value.get("required"))
            rest += [(each, depth + 1, least, key) for key, each in value.items()]
    if num_refs > MAX_REFS:
        raise ValueError(f"it has more than {MAX_REFS} $ref")


def _least(schema: dict[str, Any]) -> int:
    """Values or characters that it demands, by whichever keyword demands most."""
    found = [schema[key] for key in _MINIMA if isinstance(schema.get(key), int | float)]
    # Infinity and NaN are refused where the text of the schema is written.
    return max([1, *(int(min(each, MAX_MIN_VALUES + 1)) for each in found if each == each)])


def _check_names(keyword: str, names: Any) -> None:
    if isinstance(names, dict | list) and len(names) > MAX_NAMES:
        raise ValueError(f"{keyword} has more than {MAX_NAMES} names")
    if keyword == "patternProperties":
        for name in names:
            check_regex(name)
