"""Tools on the wire: a function with JSON arguments, or a custom tool, whose
input is a text.

Models are trained to write JSON arguments, so to them a custom tool is a function with one string.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.server.errors import InvalidRequest
from penstock.server.structured.constraint import without_anchors
from penstock.server.tools.rules import INPUT, Function

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
