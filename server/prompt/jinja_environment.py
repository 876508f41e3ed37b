"""Jinja as chat templates mean it: under the rules of `transformers.apply_chat_template`."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Errors that rendering raises over messages or variables that a template did not expect.
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
)

# Bounds on the result of one operation: characters or items of a sequence, bits of a number.
_MAX_SIZE = 1 << 24
_MAX_BITS = 1 << 16


class _Environment(ImmutableSandboxedEnvironment):
    """Operators whose result can be of any size are bounded: Python computes it in one piece."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises OverflowError."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_BITS:
                raise OverflowError(f"the power has more than {_MAX_BITS} bits")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                is_repeated = isinstance(many, str | list | tuple) and isinstance(times, int)
                if is_repeated and len(many) * times > _MAX_SIZE:
                    raise OverflowError(f"the repetition has more than {_MAX_SIZE} items")
        return super().call_binop(context, operator, left, right)


def environment() -> ImmutableSandboxedEnvironment:
    rules = _Environment(
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
