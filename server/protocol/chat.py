"""`POST /v1/chat/completions`: its messages, and what they are for a chat template."""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.media.reader import ImagePart
from penstock.server.protocol.invalid_fields import EXPECTED, invalid_fields, nul
from penstock.server.protocol.openai import (
    MAX_LOGPROBS,
    NEUTRAL,
    GenerationFields,
    ReasoningEffort,
    Wire,
    num_top,
)
from penstock.server.protocol.tools import CalledFunction, ToolCall, ToolFields, call_for_template
from penstock.server.tools.rules import AnswerRules

_OLDER_TOOLS = frozenset(("functions", "function_call"))


_TEXT_ROLES = ("system", "developer", "assistant")


class ImageUrl(Wire):
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ContentPart(Wire):
    """A part of a message. Text, refusals and images are served; others are refused by their
    type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    _param: str | None = PrivateAttr(None)

    @classmethod
    def of_image(cls, param: str, url: str, detail: str | None = None) -> "ContentPart":
        """One that another API has in its field `param`."""
        part = cls.model_validate(
            {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        )
        part._param = param
        return part

    @property
    def is_image(self) -> bool:
        return self.type == "image_url"

    def image(self, param: str) -> ImagePart:
        """param: of the part."""
        given, param = self.image_url, self._param or f"{param}.image_url"
        if given is None:
            raise InvalidRequest(f"{param} is missing", param=param)
        if isinstance(given, str):
            return ImagePart(param, given)
        return ImagePart(param, given.url, given.detail)


class ChatMessage(Wire):
    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]  # templates may know others
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, in vLLM's newer word
    refusal: str | None = None

    def for_template(self, param: str) -> dict[str, Any]:
        """As chat templates know it. "developer" is OpenAI's newer word for "system", "function"
        the older one for "tool"."""
        if (self.model_extra or {}).get("audio"):
            raise UnsupportedParameter(f"{param}.audio", "send the transcript as text")
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": self._content(f"{param}.content")}
        calls = self._calls(f"{param}.tool_calls") or self._function_call(f"{param}.function_call")
        call_id = _id_of_call(self.name) if self.role == "function" else self.tool_call_id
        optional = {
            "name": self.name,
            "tool_call_id": call_id,
            "tool_calls": calls or None,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return message | {key: value for key, value in optional.items() if value is not None}

    def _calls(self, param: str) -> list[dict[str, Any]]:
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{param} requires the role assistant", param=param)
        calls = enumerate(self.tool_calls or ())
        return [call_for_template(call, f"{param}[{i}]") for i, call in calls]

    def _function_call(self, param: str) -> list[dict[str, Any]]:
        """OpenAI's older form of a call: one, without an id."""
        given = (self.model_extra or {}).get("function_call")
        if given is None:
            return []
        try:
            function = CalledFunction.model_validate(given)
        except ValidationError as error:
            raise invalid_fields(error, CalledFunction, at=param) from error
        call = ToolCall(id=_id_of_call(function.name), function=function)
        return [call_for_template(call, param)]

    def images(self, param: str) -> list[ImagePart]:
        """param: of the message."""
        parts = enumerate(self.content) if isinstance(self.content, list) else ()
        return [part.image(f"{param}.content[{i}]") for i, part in parts if part.is_image]

    def _content(self, param: str) -> str | list[dict[str, str]]:
        """A list of parts only where one of them is an image: text is one to every template."""
        parts = self.content if isinstance(self.content, list) else []
        if not any(part.is_image for part in parts):
            return self._text(param)
        if self.role in _TEXT_ROLES:
            first = next(i for i, part in enumerate(parts) if part.is_image)
            name = parts[first].image(f"{param}[{first}]").param
            message = f"{name}: a message of the role {self.role} has no images"
            raise InvalidRequest(message, param=name)
        return [
            {"type": "image"}
            if part.is_image
            else {"type": "text", "text": _without_nul(_text_of(part, f"{param}[{i}]"), param)}
            for i, part in enumerate(parts)
        ]

    def _text(self, param: str) -> str:
        if isinstance(self.content, list):
            texts = [_text_of(part, f"{param}[{i}]") for i, part in enumerate(self.content)]
        elif self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{param} is missing; it {EXPECTED['content']}", param=param)
        else:
            texts = [self.content or self.refusal or ""]
        return _without_nul("".join(texts), param)


def _without_nul(text: str, param: str) -> str:
    if "\0" in text:
        raise nul(param)
    return text


def _id_of_call(name: str | None) -> str:
    """Makes the id of a call in the older form; its result has the function's name too."""
    return f"call_{name}"


def _text_of(part: ContentPart, param: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type != "text":
        raise UnsupportedParameter(
            f"{param}.type {part.type!r}",
            "this server supports parts of text and, in messages, of images (image_url)",
        )
    if part.text is None:
        raise InvalidRequest(f"{param}.text is missing", param=f"{param}.text")
    return part.text


class Prediction(Wire):
    """What a client expects of the answer, such as the file that it is to edit."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ChatCompletionRequest(ToolFields, GenerationFields):
    """`POST /v1/chat/completions`."""

    # But for those of `take_functions`.
    neutral: ClassVar = {k: v for k, v in NEUTRAL.items() if k not in _OLDER_TOOLS}
    known_extras = GenerationFields.known_extras | _OLDER_TOOLS

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1, le=MAX_LOGPROBS)
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)  # vLLM's; -1: no limit
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=1024)] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # vLLM's: how large images become
    documents: list[dict[str, Any]] | None = None  # for templates that know them
    echo: bool | None = None
    prediction: Prediction | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def predicted(self) -> str:
        """The text of `prediction`. Raises UnsupportedParameter for parts that are none."""
        content = self.prediction.content if self.prediction else ""
        if isinstance(content, str):
            return content
        parts = enumerate(content)
        return "".join([_text_of(part, f"prediction.content[{i}]") for i, part in parts])

    @property
    def answer_rules(self) -> AnswerRules:
        budget = self.thinking_token_budget
        return AnswerRules(
            constraint=self.constraint,
            calls=self.call_rules,
            banned=self.banned,
            thinking_budget=None if budget is None or budget < 0 else budget,
        )

    @cached_property
    def num_content_chars(self) -> int:
        contents = (m.content or "" for m in self.messages)
        texts = (c if isinstance(c, str) else "".join(p.text or "" for p in c) for c in contents)
        return sum(map(len, texts))

    @cached_property
    def adds_generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message

    @cached_property
    def echoed(self) -> str:
        """The last message, if the answer is to begin with it: as at vLLM, one of its own role."""
        last = self.for_template[-1]
        is_own = last["role"] == "assistant" or not self.adds_generation_prompt
        content = last["content"]
        return content if self.echo and is_own and isinstance(content, str) else ""

    @cached_property
    def images(self) -> list[ImagePart]:
        """In the order in which they stand in the prompt."""
        each = (m.images(f"messages[{i}]") for i, m in enumerate(self.messages))
        return [image for images in each for image in images]

    @property
    def num_bytes(self) -> int:
        """Without images, of which the prompt is not made."""
        return max(0, self._num_bytes - sum(len(image.url) for image in self.images))

    @cached_property
    def for_template(self) -> list[dict[str, Any]]:
        return [m.for_template(f"messages[{i}]") for i, m in enumerate(self.messages)]

    @cached_property
    def num_logprobs(self) -> int | None:
        return (num_top(self.top_logprobs) or 0) if self.logprobs else None

    @cached_property
    def wanted_max_tokens(self) -> int | None:
        return self.max_completion_tokens or super().wanted_max_tokens or None

    def _check(self) -> None:
        super()._check()
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs requires logprobs: true"
            raise InvalidRequest(message, param="top_logprobs")
        self.take_functions(self.model_extra or {})
        self.check_tools()
        if self.continue_final_message:
            self._check_continued()

    def _check_continued(self) -> None:
        if self.add_generation_prompt:
            message = "continue_final_message cannot be combined with add_generation_prompt: true"
            raise InvalidRequest(message, param="add_generation_prompt")
        last = self.messages[-1]
        if last.role != "assistant" or not last.content or last.tool_calls:
            message = "continue_final_message needs a last message of the assistant with some text"
            raise InvalidRequest(message, param="continue_final_message")
