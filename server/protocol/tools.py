"""What a chat request says of tools that the model may call, as it comes over the wire."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, TypeAdapter, ValidationError

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.protocol.tool_specs import (
    INPUT,
    CustomFunction,
    CustomSpec,
    FunctionSpec,
    StrictWire,
)

MAX_TOOLS = 128
# A model that never stops calling would call until its context is full.
MAX_REQUIRED_CALLS = 16


class Tool(StrictWire):
    type: str
    function: FunctionSpec | None = None
    custom: CustomSpec | None = None

    @cached_property
    def spec(self) -> FunctionSpec | None:
        """As the model sees it."""
        if self.type == "custom":
            return self.custom.as_function() if self.custom else None
        return self.function

    def checked(self, param: str) -> FunctionSpec:
        if self.type not in _TYPES:
            hint = 'this server supports tools of the types "function" and "custom"'
            raise UnsupportedParameter(f"{param}.type {self.type!r}", hint)
        if self.spec is None:
            raise InvalidRequest(f"{param}.{self.type} is missing", param=f"{param}.{self.type}")
        if self.custom:
            self.custom.check(f"{param}.custom")
        return self.spec


_TYPES = ("function", "custom")


class FunctionChoice(StrictWire):
    name: str


class AllowedTool(StrictWire):
    type: Literal["function", "custom"] = "function"
    function: FunctionChoice | None = None
    custom: FunctionChoice | None = None

    @property
    def name(self) -> str | None:
        choice = self.custom if self.type == "custom" else self.function
        return choice.name if choice else None


class AllowedTools(StrictWire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedToolChoice(StrictWire):
    """The tool that is to be called, or those of which the model may choose."""

    type: str
    function: FunctionChoice | None = None
    custom: FunctionChoice | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def name(self) -> str | None:
        choice = self.custom if self.type == "custom" else self.function
        return choice.name if choice else None


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(StrictWire):
    name: str
    arguments: str


class CalledCustom(StrictWire):
    name: str
    input: str


class ToolCall(StrictWire):
    """A call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


def call_for_template(call: ToolCall, param: str) -> dict[str, Any]:
    """With the arguments as an object, as Hugging Face's templates want them."""
    called = call.custom if call.type == "custom" else call.function
    if called is None:
        field = f"{param}.{call.type}"
        code = "missing_required_parameter"
        raise InvalidRequest(f"{field} is missing", param=field, code=code)
    if isinstance(called, CalledCustom):
        arguments: dict[str, Any] = {INPUT: called.input}
    else:
        arguments = _arguments_of(called, f"{param}.function.arguments")
    function = {"name": called.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _arguments_of(called: CalledFunction, field: str) -> dict[str, Any]:
    try:
        arguments = json.loads(called.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", param=field) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{field} must contain a JSON object", param=field)
    return arguments


_TOOLS = TypeAdapter(Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)])


def _choice_of(choice: object, names: list[str]) -> ToolChoice | None:
    """The `tool_choice` that a `function_call` means. Raises InvalidRequest."""
    if choice is None or choice == "auto":
        return None
    if choice == "none":
        return "none"
    name = choice.get("name") if isinstance(choice, dict) else None
    if name not in names:
        message = 'function_call must be "none", "auto", or an object with the name of a function'
        raise InvalidRequest(message, param="function_call")
    return NamedToolChoice(type="function", function=FunctionChoice(name=str(name)))


class ToolFields(BaseModel):
    """A chat request's fields about tools, and what they come to."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    _speaks_functions: bool = PrivateAttr(False)

    @property
    def speaks_functions(self) -> bool:
        """Whether the client knows only OpenAI's older form, a `function_call`."""
        return self._speaks_functions

    def take_functions(self, extra: Mapping[str, Any]) -> None:
        """OpenAI's older `functions` and `function_call`, as tools. Raises InvalidRequest."""
        given, choice = extra.get("functions"), extra.get("function_call")
        if not given:
            if choice not in (None, "none", "auto"):
                raise InvalidRequest("function_call requires functions", param="function_call")
            return
        if self.tools:
            raise InvalidRequest("functions cannot be combined with tools", param="functions")
        try:
            tools = [{"type": "function", "function": function} for function in given]
            self.tools = _TOOLS.validate_python(tools)
        except (ValidationError, TypeError) as error:
            message = "functions must be a list of functions, each with a name, as in tools"
            raise InvalidRequest(message, param="functions") from error
        names = [tool.function.name for tool in self.tools if tool.function]
        if len(set(names)) < len(names):
            message = "functions has two of one name; give each its own"
            raise InvalidRequest(message, param="functions")
        self.tool_choice = _choice_of(choice, names)
        self.parallel_tool_calls = False
        self._speaks_functions = True

    @cached_property
    def usable_tools(self) -> list[Tool]:
        """Those that the prompt shows to the model: only tools that it may call."""
        if self.tool_choice == "none":
            return []
        if not self._allowed:
            return self.tools or []
        names = {tool.name for tool in self._allowed.tools}
        return [t for t in self.tools or () if t.spec and t.spec.name in names]

    @cached_property
    def _allowed(self) -> AllowedTools | None:
        choice = self.tool_choice
        if not isinstance(choice, NamedToolChoice) or choice.type != "allowed_tools":
            return None
        return choice.allowed_tools

    @cached_property
    def functions(self) -> list[FunctionSpec]:
        """Custom tools too, as the model sees them."""
        return [tool.spec for tool in self.usable_tools if tool.spec]

    @cached_property
    def custom_names(self) -> frozenset[str]:
        return frozenset(f.name for f in self.functions if isinstance(f, CustomFunction))

    @cached_property
    def raw_call(self) -> CustomFunction | None:
        """The tool whose input is the whole answer: the only one that can be called, if its input
        has a Lark grammar, which could not be enforced within a string of JSON."""
        only = self.to_call[0] if self.must_call and len(self.to_call) == 1 else None
        return only if isinstance(only, CustomFunction) and only.lark is not None else None

    @cached_property
    def named_function(self) -> FunctionSpec | None:
        """The one that must be called, where the client names one."""
        if not isinstance(self.tool_choice, NamedToolChoice) or not self.tool_choice.name:
            return None
        name = self.tool_choice.name
        return next((f for f in self.functions if f.name == name), None)

    @cached_property
    def to_call(self) -> list[FunctionSpec]:
        """If the answer must have a call: the functions of which at least one must be called."""
        return [self.named_function] if self.named_function else self.functions

    @cached_property
    def max_required_calls(self) -> int:
        """The most calls of an answer that must have one; a named function is called once."""
        is_one = self.parallel_tool_calls is False or self.named_function is not None
        return 1 if is_one else MAX_REQUIRED_CALLS

    @cached_property
    def must_call(self) -> bool:
        must_choose = self._allowed is not None and self._allowed.mode == "required"
        return self.tool_choice == "required" or must_choose or self.named_function is not None

    def check_tools(self) -> None:
        """Raises InvalidRequest."""
        names: dict[str, str] = {}
        for i, tool in enumerate(self.tools or ()):
            name = tool.checked(f"tools[{i}]").name
            if name in names:
                message = f"tools has two functions with the name {name!r}; give each its own"
                raise InvalidRequest(message, param=f"tools[{i}].{tool.type}.name")
            names[name] = tool.type
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice requires tools", param="tool_choice")
        if isinstance(self.tool_choice, NamedToolChoice):
            self._check_named(self.tool_choice, names)

    @staticmethod
    def _check_named(choice: NamedToolChoice, names: Mapping[str, str]) -> None:
        """names: of the tools, and the type of each."""
        if choice.type == "allowed_tools":
            ToolFields._check_allowed(choice.allowed_tools, names)
            return
        if choice.type not in _TYPES:
            hint = 'name one tool, or use "none", "auto" or "required"'
            raise UnsupportedParameter(f"tool_choice.type {choice.type!r}", hint)
        name, what = choice.name, "function" if choice.type == "function" else "custom tool"
        if name is None or names.get(name) != choice.type:
            message = f"tool_choice names the {what} {name!r}, which is not among tools"
            raise InvalidRequest(message, param=f"tool_choice.{choice.type}.name")

    @staticmethod
    def _check_allowed(allowed: AllowedTools | None, names: Mapping[str, str]) -> None:
        at = "tool_choice.allowed_tools"
        if allowed is None:
            raise InvalidRequest(f"{at} is missing; it holds mode and tools", param=at)
        for i, tool in enumerate(allowed.tools):
            if tool.name is None or names.get(tool.name) != tool.type:
                param = f"{at}.tools[{i}].{tool.type}.name"
                message = f"{param} is {tool.name!r}, which is not among tools"
                raise InvalidRequest(message, param=param)
