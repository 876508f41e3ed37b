"""`/v1/responses`: OpenAI's newer API, where the server may remember the conversation."""

import secrets
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.common import Received, json_response, receive, tenant_of_request
from penstock.server.api.pipeline import answer_request, prepare
from penstock.server.api.responses.store import ResponseStore, StoredResponse, items_of
from penstock.server.api.responses.truncation import MAX_ITEMS, with_what_fits
from penstock.server.api.responses.writer import ResponseWriter, response_head
from penstock.server.errors import InvalidRequest, ResponseNotFound, UnsupportedParameter
from penstock.server.numbers import integer
from penstock.server.output.generation import Generation
from penstock.server.prompt.off_loop import off_loop
from penstock.server.prompt.prompts import Prompts, chat_prompts
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.responses import Item, ResponsesRequest, chat_request

router = APIRouter()

_MAX_LISTED_ITEMS = 100
_DEFAULT_LISTED_ITEMS = 20


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    return await answer_request(request, Responses(_store(request)))


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    received = await receive(request, ResponsesRequest.parse)
    prepared = await prepare(Responses(_store(request)), received)
    num_tokens = len(prepared.prompt_token_ids[0])
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


class Responses:
    """See `penstock.server.api.pipeline.TextApi`."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._history: tuple[bytes, ...] = ()  # the turns before this one, once it is rendered

    parse = staticmethod(ResponsesRequest.parse)

    async def render(
        self, received: Received[ResponsesRequest]
    ) -> tuple[ChatCompletionRequest, Prompts]:
        fields, model = received.fields, received.model
        self._history = self._conversation_before(received)
        history_bytes = sum(map(len, self._history))
        num_bytes = fields.num_bytes + history_bytes
        past, items = await off_loop(items_of, self._history, history_bytes), fields.input_items

        async def render(
            past: list[Item], items: list[Item]
        ) -> tuple[ChatCompletionRequest, Prompts]:
            _check_num_items(past, items)
            make = partial(chat_request, fields, past, history_bytes=history_bytes)
            chat = await off_loop(make, items, num_bytes)
            return chat, await chat_prompts(chat, model)

        if fields.truncation == "auto":
            max_messages = model.max_model_len
            return await with_what_fits(past, items, render, max_messages=max_messages)
        return await render(past, items)

    def writer(
        self, received: Received[ResponsesRequest], generation: Generation
    ) -> ResponseWriter:
        fields, model = received.fields, received.model
        response_id = f"resp_{fields.request_id or secrets.token_hex(24)}"

        def keep(response: Item) -> None:
            if fields.store is not False:
                stored = StoredResponse(
                    body=msgspec.json.encode(response),
                    input_items=msgspec.json.encode(list(map(_as_listed, fields.input_items))),
                    output_items=msgspec.json.encode(response["output"]),
                    history=self._history,
                )
                arrival = received.arrival
                self._store.put(arrival.client, arrival.tenant, response_id, stored)

        sampling = generation.request.requests[0].sampling
        head = response_head(fields, response_id, model.name, sampling)
        return ResponseWriter(head, model.encoder.vocabulary, fields.num_logprobs, keep)

    def _conversation_before(self, received: Received[ResponsesRequest]) -> tuple[bytes, ...]:
        """Raises InvalidRequest."""
        previous_id = received.fields.previous_response_id
        if previous_id is None:
            return ()
        try:
            return self._store.get(received.arrival.tenant, previous_id).conversation
        except ResponseNotFound as error:
            code = "previous_response_not_found"
            raise InvalidRequest(str(error), param="previous_response_id", code=code) from error


@router.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream") == "true":
        raise UnsupportedParameter("stream", "stored responses cannot be streamed; leave it out")
    stored = _store(request).get(tenant_of_request(request), response_id)
    return Response(stored.body, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    _store(request).delete(tenant_of_request(request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Raises in any case: what is stored is over, and what runs ends with its connection."""
    _store(request).get(tenant_of_request(request), response_id)
    raise InvalidRequest(
        "only background responses can be cancelled, and this server does not support them; "
        "to end a response that still runs, close its connection",
        param="response_id",
    )


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    stored = _store(request).get(tenant_of_request(request), response_id)
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
            raise InvalidRequest("after is not the id of an item of this response", param="after")
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
    """Raises InvalidRequest."""
    limit = 0
    with suppress(ValueError):
        limit = integer(text)
    if not 1 <= limit <= _MAX_LISTED_ITEMS:
        message = f"limit must be a number from 1 to {_MAX_LISTED_ITEMS}, such as 20"
        raise InvalidRequest(message, param="limit")
    return limit


def _as_listed(item: Item) -> Item:
    """As OpenAI gives it back: with an id, a type, a status, and a message's text in parts."""
    kind = item.get("type", "message")
    prefix = {
        "message": "msg",
        "function_call": "fc",
        "function_call_output": "fco",
        "custom_tool_call": "ctc",
        "custom_tool_call_output": "ctco",
    }
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


def _check_num_items(past: list[Item], items: list[Item]) -> None:
    if (num_items := len(past) + len(items)) > MAX_ITEMS:
        message = f"input has {num_items} items with those before it, more than {MAX_ITEMS}"
        raise InvalidRequest(
            f"{message}; shorten the conversation", param="input", code="context_length_exceeded"
        )


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store
