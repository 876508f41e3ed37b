"""From the text of one answer to its parts: reasoning, plain text and calls."""

from collections.abc import Callable
from functools import partial

from penstock.server.output.channels import ChannelSplitter
from penstock.server.output.parts import AnswerReader, Part, TextPart
from penstock.server.output.reasoning import ReasoningSplitter, ReasoningState, make_splitter
from penstock.server.structured.grammar import Calls, Content
from penstock.server.tools.custom_input import CustomInputs
from penstock.server.tools.parsers import ToolFormat
from penstock.server.tools.parsers.base import ToolParser
from penstock.server.tools.parsers.json_calls import JsonParser, NamedCallParser
from penstock.server.tools.rules import CallRules


class ChatAnswerReader:
    """The `AnswerReader` of a chat answer. Without a call parser all but reasoning is text.
    custom_inputs: if there are custom tools, and their inputs are written as JSON."""

    def __init__(
        self,
        splitter: ReasoningSplitter | ChannelSplitter | None,
        calls: ToolParser | NamedCallParser | None,
        custom_inputs: CustomInputs | None = None,
    ) -> None:
        self._splitter = splitter
        self._calls = calls
        self._custom_inputs = custom_inputs

    @property
    def is_thinking(self) -> bool:
        return self._splitter is not None and self._splitter.is_thinking

    @property
    def is_over(self) -> bool:
        """Whether all calls that are allowed are complete."""
        return self._calls is not None and self._calls.is_over

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = self._splitter.feed(text) if self._splitter else [TextPart(text)]
        return self._with_calls(parts)

    def end(self) -> list[Part]:
        parts = self._with_calls(self._splitter.end() if self._splitter else [])
        parts += self._with_inputs(self._calls.end()) if self._calls else []
        return parts + (self._custom_inputs.end() if self._custom_inputs else [])

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        with_calls: list[Part] = []
        for part in parts:
            with_calls += self._calls.feed(part.text) if isinstance(part, TextPart) else [part]
        return self._with_inputs(with_calls)

    def _with_inputs(self, parts: list[Part]) -> list[Part]:
        return self._custom_inputs.rewritten(parts) if self._custom_inputs else parts


def reader_factory(
    rules: CallRules,
    enforced: Calls | Content | None,
    form: ToolFormat | None,
    reasoning: ReasoningState | None,
) -> Callable[[], AnswerReader] | None:
    """Makes a reader for each answer; None if all of it is plain text. enforced: the syntax of
    calls, where a grammar enforces one. form: the model's own."""
    make_calls = _call_parser(rules, enforced, form)
    if make_calls is None and reasoning is None:
        return None
    custom = frozenset(each.name for each in rules.functions if each.is_custom)
    has_inputs = custom and not rules.raw_call

    def make() -> AnswerReader:
        calls = make_calls() if make_calls else None
        inputs = CustomInputs(custom) if has_inputs else None
        return ChatAnswerReader(make_splitter(reasoning), calls, inputs)

    return make


def _call_parser(
    rules: CallRules, enforced: Calls | Content | None, form: ToolFormat | None
) -> Callable[[], ToolParser | NamedCallParser] | None:
    if rules.raw_call:
        return partial(NamedCallParser, rules.raw_call.name, is_custom=True)
    is_native = isinstance(enforced, Calls)
    if enforced and not is_native:
        if rules.named:
            return partial(NamedCallParser, rules.named.name)
        return partial(JsonParser, frozenset(function.name for function in rules.functions))
    if not form or not rules.functions:
        return None
    functions = rules.to_call if is_native else rules.functions
    # From the parameters as the client sent them parsers take the types of values.
    schemas = {function.name: function.parameters or {} for function in functions}
    max_calls = None if is_native or rules.is_parallel else 1
    return partial(form.parser, frozenset(schemas), schemas=schemas, max_calls=max_calls)
