"""Jinja as chat templates mean it: under the rules of `transformers.apply_chat_template`, and with
a bound on the time that a template takes in this process.

The sandbox of Jinja bounds no time: two loops within each other are enough to stop the event loop
for minutes. So templates are compiled with a look at the clock in each round of a loop and in each
call of a macro. What a single expression does is not interrupted; `environment` bounds the
operators that can take long, and a template in which a filter does is found when the server starts,
by `ChatTemplate.try_out`.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes, pass_context
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


# The clock of the whole machine, which is cheap to read, is asked first; after so much of it, the
# clock of this thread, since only the time that the template itself has taken counts.
_LOOK_EVERY_S = 0.005
_LOOK = "look_at_the_clock"


class TemplateTooSlow(Exception):
    """It has taken more time than `at_most` allows; nothing is wrong with it otherwise."""


class _Limit:
    def __init__(self, max_cpu_s: float) -> None:
        self.next_look_s = time.monotonic() + min(_LOOK_EVERY_S, max_cpu_s)
        self._end_cpu_s = time.thread_time() + max_cpu_s

    def check(self) -> None:
        """Raises TemplateTooSlow."""
        if time.thread_time() > self._end_cpu_s:
            raise TemplateTooSlow
        self.next_look_s = time.monotonic() + _LOOK_EVERY_S


_limit: ContextVar[_Limit | None] = ContextVar("template_limit", default=None)


@contextmanager
def at_most(max_cpu_s: float) -> Iterator[None]:
    """Rendering within it in this thread raises TemplateTooSlow beyond max_cpu_s."""
    token = _limit.set(_Limit(max_cpu_s) if max_cpu_s < math.inf else None)
    try:
        yield
    finally:
        _limit.reset(token)


def timed(rules: Environment, source: str) -> Template:
    """The template, compiled so that `at_most` applies to it. Raises TemplateSyntaxError."""
    rules.filters[_LOOK] = _look_at_the_clock
    tree = rules.parse(source)
    bodies = [node.body for node in tree.find_all(nodes.For)]
    bodies += [node.body for node in tree.find_all(nodes.Macro)]
    bodies += [node.body for node in tree.find_all(nodes.CallBlock)]
    for body in bodies:
        look = nodes.Filter(nodes.Const(None), _LOOK, [], [], None, None)
        body.insert(0, nodes.ExprStmt(look))
    tree.set_lineno(1)  # of the new nodes, which have none
    tree.set_environment(rules)
    return rules.from_string(tree)


@pass_context  # else Jinja would compute it once, when it compiles the template
def _look_at_the_clock(_context: Context, _value: None) -> None:
    limit = _limit.get()
    if limit and time.monotonic() > limit.next_look_s:
        limit.check()
