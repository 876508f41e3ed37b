"""From the text of one answer to its parts: reasoning, plain text and calls."""

from typing import Any

from penstock.server.output.channels import ChannelSplitter
from penstock.server.output.parts import AnswerReader, Part, TextPart
from penstock.server.output.reasoning import ReasoningSplitter
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.tool_specs import FunctionSpec
from penstock.server.protocol.tools import ToolFields
from penstock.server.tools.call_grammar import uses_native_format
from penstock.server.tools.chat_format import ChatFormat
from penstock.server.tools.custom_input import CustomInputs
from penstock.server.tools.parsers import (
    JsonParser,
    NamedCallParser,
    ToolFormat,
    ToolParser,
    make_tool_parser,
)


class ChatAnswerReader:
    """The `AnswerReader` of a chat answer. Without a call parser all but reasoning is text.

    custom_inputs: if there are custom tools, and their inputs are written as JSON.
    """

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
        return self._custom_inputs.of(parts) if self._custom_inputs else parts


def make_reader(
    fields: ChatCompletionRequest,
    form: ChatFormat,
    splitter: ReasoningSplitter | ChannelSplitter | None,
) -> AnswerReader | None:
    """The reader of one answer; None if all of it is plain text."""
    if fields.raw_call:
        return ChatAnswerReader(splitter, NamedCallParser(fields.raw_call.name, is_custom=True))
    inputs = CustomInputs(fields.custom_names) if fields.custom_names else None
    if fields.must_call or (fields.functions and fields.constraint):
        return ChatAnswerReader(splitter, _enforced_parser(fields, form.tools), inputs)
    calls = None
    if fields.functions and form.tools:
        calls = _parser(form.tools, fields.functions, fields.parallel_tool_calls)
    return ChatAnswerReader(splitter, calls, inputs) if splitter or calls else None


def _enforced_parser(fields: ToolFields, form: ToolFormat | None) -> ToolParser | NamedCallParser:
    if form and uses_native_format(form, fields):
        return _parser(form, fields.to_call, True)
    if fields.named_function:
        return NamedCallParser(fields.named_function.name)
    return JsonParser(frozenset(function.name for function in fields.functions))


def _parser(form: ToolFormat, functions: list[FunctionSpec], parallel: bool | None) -> ToolParser:
    names = frozenset(function.name for function in functions)
    max_calls = 1 if parallel is False else None
    return make_tool_parser(form, names, schemas=_schemas_of(functions), max_calls=max_calls)


def _schemas_of(functions: list[FunctionSpec]) -> dict[str, dict[str, Any]]:
    """Name -> parameters as sent by the client; parsers take the types of values from them."""
    return {function.name: function.parameters or {} for function in functions}
