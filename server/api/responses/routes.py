"""`/v1/responses`: OpenAI's newer API, where the server may remember the conversation."""

import secrets
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.common import (
    body_of,
    check_model,
    json_response,
    service_of,
    tenant_who_asks,
    unless_gone,
    written,
)
from penstock.server.api.openai.writer import ChatReply
from penstock.server.api.responses.store import ResponseStore, StoredResponse, items_of
from penstock.server.api.responses.truncation import asked_with_what_fits
from penstock.server.api.responses.writer import ResponseWriter, response_head
from penstock.server.errors import InvalidRequest, ResponseNotFound, UnsupportedParameter
from penstock.server.prompt.generation_request import Ask, ask_chat
from penstock.server.protocol.responses import (
    Item,
    ResponsesRequest,
    chat_request,
    in_words_of_responses,
)
from penstock.server.service import Service

router = APIRouter()

_MAX_LISTED_ITEMS = 100
_DEFAULT_LISTED_ITEMS = 20


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    service, arrival_s = service_of(request), time.monotonic()
    fields = ResponsesRequest.parse(await body_of(request))
    check_model(service, fields.model)
    tenant = tenant_who_asks(request)
    history = _history(service, fields, tenant)

    async def answer() -> Response:
        with in_words_of_responses(fields):
            ask = await _ask(service, fields, history, tenant, arrival_s)
            writer = _writer(service, fields, ask, history, tenant)
            return await written(service, ask, lambda _: writer, streams=bool(fields.stream))

    return await unless_gone(request, answer())


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    service, arrival_s = service_of(request), time.monotonic()
    fields = ResponsesRequest.parse(await body_of(request))
    check_model(service, fields.model)
    tenant = tenant_who_asks(request)
    history = _history(service, fields, tenant)
    with in_words_of_responses(fields):
        ask = await _ask(service, fields, history, tenant, arrival_s)
    num_tokens = len(ask.requests[0].prompt_token_ids)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


@router.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream") == "true":
        raise UnsupportedParameter("stream", "a stored response comes whole; leave it out")
    stored = _store(request).get(tenant_who_asks(request), response_id)
    return Response(stored.body, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    _store(request).delete(tenant_who_asks(request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Raises in any case: what is stored is over, and what runs ends with its connection."""
    _store(request).get(tenant_who_asks(request), response_id)
    raise InvalidRequest(
        "only a background response can be cancelled, and this server makes none; "
        "to end a response that still runs, close its connection",
        param="response_id",
    )


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    stored = _store(request).get(tenant_who_asks(request), response_id)
    items = items_of((*stored.history, stored.input_items))
    return json_response(_page(items, dict(request.query_params)))


def _page(items: list[Item], query: dict[str, str]) -> dict[str, Any]:
    """Some of the items, the newest first unless `order` is asc."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    if order == "desc":
        items = items[::-1]
    limit = _limit(query.get("limit", str(_DEFAULT_LISTED_ITEMS)))
    ids = [item["id"] for item in items]
    start = 0
    if after := query.get("after"):
        if after not in ids:
            raise InvalidRequest("after names no item of this response", param="after")
        start = ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": start + len(page) < len(items),
    }


def _limit(text: str) -> int:
    """Raises InvalidRequest. Digits without end are not even read."""
    limit = int(text) if text.isdecimal() and len(text) < 9 else 0
    if not 1 <= limit <= _MAX_LISTED_ITEMS:
        message = f"limit must be a number from 1 to {_MAX_LISTED_ITEMS}"
        raise InvalidRequest(message, param="limit")
    return limit


async def _ask(
    service: Service,
    fields: ResponsesRequest,
    history: tuple[bytes, ...],
    tenant: str,
    arrival_s: float,
) -> Ask:
    past, items = items_of(history), fields.input_items

    async def ask(past: list[Item], items: list[Item]) -> Ask:
        chat = chat_request(fields, past, items)
        return await ask_chat(chat, service.model, tenant=tenant, arrival_s=arrival_s)

    if fields.truncation == "auto":
        return await asked_with_what_fits(past, items, ask)
    return await ask(past, items)


def _history(service: Service, fields: ResponsesRequest, tenant: str) -> tuple[bytes, ...]:
    """The turns before this one. Raises InvalidRequest."""
    if fields.previous_response_id is None:
        return ()
    try:
        return service.responses.get(tenant, fields.previous_response_id).conversation
    except ResponseNotFound as error:
        code = "previous_response_not_found"
        raise InvalidRequest(str(error), param="previous_response_id", code=code) from error


def _writer(
    service: Service,
    fields: ResponsesRequest,
    ask: Ask,
    history: tuple[bytes, ...],
    tenant: str,
) -> ResponseWriter:
    response_id = f"resp_{secrets.token_hex(24)}"

    def keep(response: Item) -> None:
        if fields.store is not False:
            stored = StoredResponse(
                body=msgspec.json.encode(response),
                input_items=msgspec.json.encode(_with_ids(fields.input_items)),
                output_items=msgspec.json.encode(response["output"]),
                history=history,
            )
            service.responses.put(tenant, response_id, stored)

    head = response_head(fields, response_id, service.model.name, ask.requests[0].sampling)
    logprobs = ChatReply(service.model.encoder.vocabulary, fields.num_logprobs)
    return ResponseWriter(head, logprobs, keep)


def _with_ids(items: list[Item]) -> list[Item]:
    return [_as_listed(item) for item in items]


def _as_listed(item: Item) -> Item:
    """As OpenAI gives it back: with an id, a type, a status, and a message's text in parts."""
    kind = item.get("type", "message")
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
    listed = item | {"type": kind}
    if not isinstance(item.get("id"), str):
        listed["id"] = f"{prefix.get(kind, kind)}_{secrets.token_hex(12)}"
    if kind != "reasoning":
        listed["status"] = "completed"
    if kind == "message" and isinstance(item["content"], str):
        is_output = item["role"] == "assistant"
        part: Item = {"type": "output_text" if is_output else "input_text", "text": item["content"]}
        listed["content"] = [part | ({"annotations": []} if is_output else {})]
    return listed


def _store(request: Request) -> ResponseStore:
    return service_of(request).responses
