"""`/tokenize` and `/detokenize`, in vLLM's shapes: what a prompt is to the model, and back."""

import asyncio
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from penstock.server.api.common import (
    body_of,
    json_response,
    service_of,
    without_collection,
)
from penstock.server.errors import InvalidRequest
from penstock.server.prompt.limits import check_could_fit, check_does_not_overflow, is_counted
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.off_loop import off_loop
from penstock.server.prompt.prompts import chat_prompt, check_servable
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.openai import ParsedRequest, TokenId

router = APIRouter()


class _Fields(ParsedRequest):
    model_config = ConfigDict(extra="ignore")


class TokenizeRequest(_Fields):
    """A text, with the special tokens (BOS) around it unless they are not wanted."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest):
    """A conversation, as `/v1/chat/completions` would read the same fields."""

    return_token_strs: bool | None = None


class DetokenizeRequest(_Fields):
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class _Peek(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


Fields = TypeVar("Fields", TokenizeRequest, TokenizeChatRequest, DetokenizeRequest)


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The ids of a prompt, or of a conversation under the chat template, and how many they are."""
    model, body = service_of(request).model, await body_of(request)
    fields: TokenizeRequest | TokenizeChatRequest
    if _has_messages(body):
        fields = chat = _checked(TokenizeChatRequest, body, request)
        check_servable(chat, model.chat_format)
        ids = (await chat_prompt(chat, model, only_counts=True)).token_ids
    else:
        fields = text = _checked(TokenizeRequest, body, request)
        num_chars = len(text.prompt)
        if not is_counted(text.prompt):
            check_could_fit(model, "prompt", num_chars=num_chars)
        ids = await off_loop(partial(_encode, model=model), text, num_chars)
    names_tokens = bool(fields.return_token_strs)
    content = await asyncio.to_thread(_body, ids, model, names_tokens)
    return Response(content, media_type="application/json")


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens by name."""
    model, body = service_of(request).model, await body_of(request)
    fields = _checked(DetokenizeRequest, body, request)
    highest = max(fields.tokens, default=0)
    if highest >= model.info.vocab_size:
        message = (
            f"tokens has {highest}; this model's ids range from 0 to {model.info.vocab_size - 1}"
        )
        raise InvalidRequest(message, param="tokens")
    text = await asyncio.to_thread(_decode, fields, model)
    return json_response({"prompt": text})


def _has_messages(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=_Peek).messages is not msgspec.UNSET
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # the other shape's parser reports what is wrong


def _checked(kind: type[Fields], body: bytes, request: Request) -> Fields:
    fields = without_collection(kind.parse, body)
    service_of(request).model_named(fields.model)  # adapters change no tokens
    return fields


def _encode(fields: TokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    if not is_counted(fields.prompt):
        check_does_not_overflow(fields.prompt, model, "prompt")
    return model.encoder.encode(fields.prompt, add_special_tokens=fields.add_special_tokens)


def _body(ids: tuple[int, ...], model: ServedModel, names_tokens: bool) -> bytes:
    """The body of the answer, which for a long text is large."""
    return msgspec.json.encode(
        {
            "count": len(ids),
            "max_model_len": model.info.max_model_len,
            "tokens": ids,
            "token_strs": model.encoder.token_names(ids) if names_tokens else None,
        }
    )


def _decode(fields: DetokenizeRequest, model: ServedModel) -> str:
    return model.encoder.vocabulary.text_of(fields.tokens, shows_special=True)
