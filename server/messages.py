"""`/v1/messages`: Anthropic's API, for the programs that were written for it."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.ask import ask_chat
from server.endpoint import (
    body_of,
    check_model,
    json_response,
    service_of,
    tenant_who_asks,
    unless_gone,
    whole_answer,
)
from server.generation import Generation
from server.messages_protocol import (
    CountTokensRequest,
    MessagesRequest,
    chat_request,
    in_words_of_messages,
)
from server.messages_replies import MessageWriter
from server.service import Service
from server.sse import EventStream

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    service, arrival_s = service_of(request), time.monotonic()
    fields = MessagesRequest.parse(await body_of(request))
    check_model(service, fields.model)
    tenant = tenant_who_asks(request)

    async def answer() -> Response:
        with in_words_of_messages():
            chat = chat_request(fields)
            ask = await ask_chat(chat, service.model, tenant=tenant, arrival_s=arrival_s)
            if fields.stream:
                generation = service.generate(ask)
                writer = _writer(service, generation)
                interval_s = service.config.server.sse_ping_interval_s
                return EventStream(generation, writer, ping_interval_s=interval_s)
            generation, pieces = await whole_answer(service, ask)
        writer = _writer(service, generation)
        writer.piece(pieces[0])
        writer.end(generation.usage)
        return json_response(writer.message)

    return await unless_gone(request, answer())


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    service, arrival_s = service_of(request), time.monotonic()
    fields = CountTokensRequest.parse(await body_of(request))
    check_model(service, fields.model)
    with in_words_of_messages():
        chat, tenant = chat_request(fields), tenant_who_asks(request)
        ask = await ask_chat(chat, service.model, tenant=tenant, arrival_s=arrival_s)
    return json_response({"input_tokens": len(ask.requests[0].prompt_token_ids)})


def _writer(service: Service, generation: Generation) -> MessageWriter:
    name, usage = service.model.name, generation.usage
    return MessageWriter(name, usage, lambda: generation.choices[0].stop_string)
