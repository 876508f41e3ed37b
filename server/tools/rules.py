"""The rules that a request sets for its answers, once its wire format no longer matters."""

from dataclasses import dataclass, field
from typing import Any

from penstock.server.structured.constraint import Constraint
from penstock.server.structured.grammar import NO_TEXTS, BannedTexts

# The one argument of a custom tool.
INPUT = "input"
# A model that never stops calling would call until its context is full.
MAX_REQUIRED_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that the model may call, or a custom tool as the model sees it.

    parameters: a JSON schema of the arguments; None for a function without any. lark: the grammar
    of a custom tool's input, if Lark is its syntax: unlike a regex, it is in no schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    is_custom: bool = False
    lark: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """functions: those that the answer may call. named: the one that it must call, where the client
    names one. must_call: it must call at least one."""

    functions: tuple[Function, ...] = ()
    named: Function | None = None
    must_call: bool = False
    is_parallel: bool = True

    @property
    def to_call(self) -> tuple[Function, ...]:
        """If the answer must have a call: the functions of which at least one must be called."""
        return (self.named,) if self.named else self.functions

    @property
    def max_required_calls(self) -> int:
        """The most calls of an answer that must have one; a named function is called once."""
        return MAX_REQUIRED_CALLS if self.is_parallel and self.named is None else 1

    @property
    def raw_call(self) -> Function | None:
        """The tool whose input is the whole answer: the only one that can be called, if its input
        has a Lark grammar, which could not be enforced within a string of JSON."""
        only = self.to_call[0] if self.must_call and len(self.to_call) == 1 else None
        return only if only and only.lark is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """constraint: what the answer must look like; None for any text. thinking_budget: the most
    tokens of reasoning; None for any number. banned: what it must not contain."""

    constraint: Constraint | None = None
    calls: CallRules = field(default_factory=CallRules)
    thinking_budget: int | None = None
    banned: BannedTexts = NO_TEXTS
