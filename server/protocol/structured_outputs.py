"""`structured_outputs` under its older names at vLLM (`guided_json` ...) and under SGLang's."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.server.errors import InvalidRequest
from penstock.server.structured.constraint import RENAMED, Constraint

Outputs = dict[str, Any] | None


def constraint_by_any_name(
    structured_outputs: Outputs,
    others: Mapping[str, Any],
    make: Callable[[Outputs], Constraint | None],
) -> Constraint | None:
    """What `make` returns for structured_outputs, with errors that name the field that was sent.

    others: the request's other fields, of which those that are synonyms are taken. Raises
    InvalidRequest where a synonym and another field differ.
    """
    given = {name: each for name in RENAMED if (each := others.get(name)) not in (None, False)}
    if not given:
        return make(structured_outputs)
    outputs = {k: v for k, v in (structured_outputs or {}).items() if v not in (None, False)}
    for name, value in given.items():
        meant = {_member(name): value}
        if outputs and outputs != meant:
            message = f"{name} cannot be combined with another constraint; send only one of them"
            raise InvalidRequest(message, param=name)
        outputs = meant
    name = next(iter(given))
    with _named(name):
        constraint = make(outputs)
    assert constraint, "structured_outputs was given"

    def build() -> str:
        with _named(name):
            return constraint.build()

    return Constraint(name, build)


def _member(name: str) -> str:
    return RENAMED[name].removeprefix("structured_outputs.")


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Within it, errors name the synonym."""
    try:
        yield
    except InvalidRequest as error:
        message = str(error).replace(RENAMED[name], name)
        param = (error.param or name).replace(RENAMED[name], name)
        raise InvalidRequest(message, param=param, code=error.code) from error
