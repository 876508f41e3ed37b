"""`/v1/messages`: Anthropic's API, for the programs that were written for it."""

import time
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.anthropic.writer import MessageWriter
from penstock.server.api.common import (
    body_of,
    check_model,
    json_response,
    service_of,
    tenant_who_asks,
    unless_gone,
    written,
)
from penstock.server.output.generation import Generation
from penstock.server.prompt.generation_request import ask_chat
from penstock.server.protocol.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    chat_request,
    in_words_of_messages,
)
from penstock.server.protocol.openai import ChatCompletionRequest
from penstock.server.service import Service

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    service, arrival_s = service_of(request), time.monotonic()
    fields = MessagesRequest.parse(await body_of(request))
    check_model(service, fields.model)
    tenant = tenant_who_asks(request)

    async def answer() -> Response:
        with in_words_of_messages():
            chat = _chat(service, fields)
            ask = await ask_chat(chat, service.model, tenant=tenant, arrival_s=arrival_s)
            make_writer = partial(_writer, service)
            return await written(service, ask, make_writer, streams=bool(fields.stream))

    return await unless_gone(request, answer())


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    service, arrival_s = service_of(request), time.monotonic()
    fields = CountTokensRequest.parse(await body_of(request))
    check_model(service, fields.model)
    with in_words_of_messages():
        chat, tenant = _chat(service, fields), tenant_who_asks(request)
        ask = await ask_chat(chat, service.model, tenant=tenant, arrival_s=arrival_s)
    return json_response({"input_tokens": len(ask.requests[0].prompt_token_ids)})


def _chat(service: Service, fields: CountTokensRequest) -> ChatCompletionRequest:
    return chat_request(fields, thinks=service.model.chat_format.reasoning is not None)


def _writer(service: Service, generation: Generation) -> MessageWriter:
    name, usage = service.model.name, generation.usage
    return MessageWriter(name, usage, lambda: generation.choices[0].stop_string)
