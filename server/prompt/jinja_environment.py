"""Jinja as chat templates mean it: under the rules of `transformers.apply_chat_template`."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What rendering raises over messages or variables that a template did not expect.
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
)


def environment() -> ImmutableSandboxedEnvironment:
    rules = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    rules.filters["tojson"] = _to_json
    rules.globals["raise_exception"] = _raise_exception
    rules.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return rules


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers; Jinja's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
