"""The tools of a chat request that the model may call, as they come over the wire: a function with
JSON arguments, or a custom tool, whose input is a text.

Models are trained to write JSON arguments, so to them a custom tool is a function with one string.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.structured.constraint import without_anchors
from penstock.server.tools.rules import INPUT, CallRules, Function

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
# Descriptions of custom tools often say that their input is not to be wrapped in JSON.
_HOW = f"Pass the whole text as the string {INPUT!r}."


class StrictWire(BaseModel):
    """Keeps the fields that it does not know, for chat templates."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class FunctionSpec(StrictWire):
    """parameters: a JSON schema of the arguments; None for a function without any."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputGrammar(StrictWire):
    definition: str
    syntax: Literal["lark", "regex"]


class InputFormat(StrictWire):
    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class CustomSpec(StrictWire):
    name: FunctionName
    description: str | None = None
    format: InputFormat | None = None

    def as_function(self) -> Function:
        grammar = self.format.grammar if self.format else None
        text: dict[str, Any] = {"type": "string"}
        lark, description = None, [self.description, _HOW]
        if grammar and grammar.syntax == "regex":
            text["pattern"] = f"^(?:{without_anchors(grammar.definition)})$"
        elif grammar:
            lark = grammar.definition
            description.append(f"It must match this Lark grammar:\n{lark}")
        parameters = {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        }
        return Function(
            name=self.name,
            description="\n".join(filter(None, description)),
            parameters=parameters,
            is_custom=True,
            lark=lark,
        )

    def check(self, param: str) -> None:
        """Raises InvalidRequest."""
        if self.format and self.format.type == "grammar" and self.format.grammar is None:
            param = f"{param}.format.grammar"
            message = f"{param} is missing; it holds definition and syntax"
            raise InvalidRequest(message, param=param, code="missing_required_parameter")


MAX_TOOLS = 128


class Tool(StrictWire):
    type: str
    function: FunctionSpec | None = None
    custom: CustomSpec | None = None

    @property
    def name(self) -> str:
        spec = self.custom if self.type == "custom" else self.function
        return spec.name if spec else ""

    @cached_property
    def as_function(self) -> Function | None:
        """As the model sees it."""
        if self.type == "custom":
            return self.custom.as_function() if self.custom else None
        if self.function is None:
            return None
        names = ("name", "description", "parameters")
        return Function(**{name: getattr(self.function, name) for name in names})

    def for_template(self) -> dict[str, Any]:
        """As sent by the client, or a custom one as the function that it is to the model."""
        if self.type == "custom" and (function := self.as_function):
            names = ("name", "description", "parameters")
            fields = {name: getattr(function, name) for name in names}
            return {"type": "function", "function": fields}
        return self.model_dump(exclude_unset=True)

    def check(self, param: str) -> None:
        """Raises InvalidRequest."""
        if self.type not in _TYPES:
            hint = 'this server supports tools of the types "function" and "custom"'
            raise UnsupportedParameter(f"{param}.type {self.type!r}", hint)
        if self.as_function is None:
            raise InvalidRequest(f"{param}.{self.type} is missing", param=f"{param}.{self.type}")
        if self.custom:
            self.custom.check(f"{param}.custom")


_TYPES = ("function", "custom")


class FunctionChoice(StrictWire):
    name: str


class ChosenTool(StrictWire):
    type: str = "function"  # huggingface_hub leaves it out
    function: FunctionChoice | None = None
    custom: FunctionChoice | None = None

    @property
    def name(self) -> str | None:
        choice = self.custom if self.type == "custom" else self.function
        return choice.name if choice else None


class AllowedTool(ChosenTool):
    type: Literal["function", "custom"] = "function"


class AllowedTools(StrictWire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedToolChoice(ChosenTool):
    """The tool that is to be called, or those of which the model may choose."""

    allowed_tools: AllowedTools | None = None


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
        arguments = arguments_of(called.arguments, f"{param}.function.arguments")
    function = {"name": called.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def arguments_of(text: str, field: str) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        arguments = json.loads(text or "{}")
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
        return [tool for tool in self.tools or () if tool.name in names]

    @cached_property
    def _allowed(self) -> AllowedTools | None:
        choice = self.tool_choice
        if not isinstance(choice, NamedToolChoice) or choice.type != "allowed_tools":
            return None
        return choice.allowed_tools

    @cached_property
    def call_rules(self) -> CallRules:
        """Custom tools too are functions, as the model sees them."""
        functions = tuple(tool.as_function for tool in self.usable_tools if tool.as_function)
        choice, allowed = self.tool_choice, self._allowed
        name = choice.name if isinstance(choice, NamedToolChoice) else None
        named = next((each for each in functions if each.name == name), None)
        must_choose = allowed is not None and allowed.mode == "required"
        return CallRules(
            functions=functions,
            named=named,
            must_call=choice == "required" or must_choose or named is not None,
            is_parallel=self.parallel_tool_calls is not False,
        )

    def check_tools(self) -> None:
        """Raises InvalidRequest."""
        names: dict[str, str] = {}
        for i, tool in enumerate(self.tools or ()):
            tool.check(f"tools[{i}]")
            name = tool.name
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
