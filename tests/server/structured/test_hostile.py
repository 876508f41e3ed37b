"""Grammars made to take all memory, to overflow the stack or to fill a cache: each is refused, the
memory of server, engine and checkers stays bounded, and ordinary schemas are served."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.memory import resident_bytes
from tests.support.serving import RunningServer, running_server
from tests.support.structured import SCHEMAS, ask_all, json_schema

# Two checkers may take 256 MiB each for a grammar, for 2.5 s.
MAX_GROWTH = 700 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        assert running.chat(json_schema=SCHEMAS["flat"]).status_code == 200
        yield running


@contextlib.contextmanager
def growth(server: RunningServer) -> Iterator[list[int]]:
    """The bytes by which server and children grew at most, once the block has ended."""
    before = resident_bytes(server.process.pid)
    peak: list[int] = [0]
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.02):
            peak[0] = max(peak[0], resident_bytes(server.process.pid) - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        has_ended.set()
        watching.join()


def chained_refs(num: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{num}": {"type": "integer"}}}


def chained_properties(num: int) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(num)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{num}": {"type": "integer"}}}


def chained_rules(num: int) -> str:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(num))
    return f'start: r0\n{rules}\nr{num}: "a"'


def names(num: int) -> list[str]:
    return [f"n{i}" for i in range(num)]


def regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": text}}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


# The last of each kind passes the limits of limits.py, and ends the process that compiles it.
HOSTILE = {
    "regex": regex("a{4000000000}"),
    "regex, in groups": regex("(" * 32 + "a" + "{2})" * 32),
    "regex, twice in a row": regex("a" + "{2}" * 32),
    "regex, beside others": regex("(x|b{3})" + "a{99999}" * 9),
    "pattern": {"json_schema": {"type": "string", "pattern": "^a{4000000000}$"}},
    "pattern of names": {"json_schema": {"patternProperties": {"^a{4000000000}$": True}}},
    "pattern, by reference": {
        "json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"pattern": "^a{900000000}$"}}}
    },
    "pattern of a tool": tool({"properties": {"x": {"type": "string", "pattern": "a{900000000}"}}}),
    "lengths": {"json_schema": {"type": "string", "pattern": "^a*$", "minLength": 4 * 10**9}},
    "nested arrays": {
        "json_schema": {
            "type": "array",
            "minItems": 99999,
            "items": {"type": "array", "minItems": 99999, "items": {"const": 1}},
        }
    },
    "Lark": {"grammar": 'start: A{4000000000}\nA: "a"'},
    "Lark, a terminal": {"grammar": 'start: A\nA: "a"{4000000000}'},
    "Lark, a regex": {"grammar": "start: /a{4000000000}/"},
    "Lark, by reference": {
        "grammar": "start: A\n"
        + "\n".join(f"{'A' * i}: {'A' * (i + 1)}{{999}}" for i in range(1, 5))
        + '\nAAAAA: "a"'
    },
    "GBNF": {"grammar": 'root ::= "a"{4000000000}'},
    "references": {"json_schema": chained_refs(1000)},
    "references between properties": {"json_schema": chained_properties(1000)},
    "required": {"json_schema": {"type": "object", "required": names(30_000)}},
    "properties": {
        "json_schema": {"properties": {name: {} for name in names(16_000)}, "maxProperties": 2}
    },
    "chained rules": {"grammar": chained_rules(3500)},
    "chained terminals": {"grammar": chained_rules(3500).upper().replace("START", "start")},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_is_refused_in_bounded_memory(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    with growth(server) as peak:
        refused = server.chat(**fields)
        answer = server.chat(json_schema=SCHEMAS["enum"])
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == "invalid_grammar"
    assert answer.status_code == 200, answer.text
    assert peak[0] < MAX_GROWTH
    with growth(server) as peak:
        time.sleep(0.3)  # nothing goes on after the answer
    assert peak[0] < 20 << 20
    assert server.process.poll() is None


def test_neighbours_of_hostile_grammars_are_answered(server: RunningServer) -> None:
    hostile = [*HOSTILE.values()]
    ordinary = [{"json_schema": schema} for schema in SCHEMAS.values()]
    bodies = [body for pair in zip(hostile, ordinary, strict=False) for body in pair]
    with growth(server) as peak:
        answers = ask_all(server, bodies, 16)
    assert [answer.status_code for answer in answers] == [400, 200] * (len(bodies) // 2)
    assert peak[0] < MAX_GROWTH


@pytest.mark.slow
def test_a_hundred_schemas_at_once_are_all_compiled(server: RunningServer) -> None:
    def schema(i: int) -> dict[str, Any]:
        properties = {f"property {j} of {i}": {"type": "integer"} for j in range(300)}
        return {"type": "object", "properties": properties, "required": list(properties)}

    bodies = [{"response_format": json_schema(schema(i)), "max_tokens": 2} for i in range(100)]
    for answer in ask_all(server, bodies, 100):
        assert answer.status_code in (200, 429), answer.text
        if answer.status_code == 429:
            assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.slow
def test_large_grammars_do_not_add_up(server: RunningServer) -> None:
    """Each takes 36 MB in the engine, whose cache has room for 7 of them."""
    with growth(server) as peak:
        for i in range(24):
            answer = server.chat(**regex(f"{chr(ord('a') + i)}{{90000}}"), max_tokens=1)
            assert answer.status_code == 200, answer.text
    assert peak[0] < MAX_GROWTH


def test_a_grammar_that_takes_too_much_once_compiled_is_refused(server: RunningServer) -> None:
    answer = server.chat(**regex("|".join(f"{c}{{90000}}" for c in "abc")), max_tokens=1)
    assert answer.status_code == 200, "only one of them is followed at once"
    lark = 'start: A\nA: B{400}\nB: "a"{400}'
    answer = server.chat(grammar=lark)
    assert answer.status_code == 400, answer.text
    assert "too large" in answer.json()["error"]["message"]
