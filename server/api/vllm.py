"""Routes that vLLM has beside those of OpenAI: the load, the tokenizer's settings, and the one path
under which SageMaker sends every request."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message

from penstock.server.api.common import body_of, json_response, service_of
from penstock.server.api.embeddings.routes import classify, embeddings, rerank, score
from penstock.server.api.openai.routes import chat_completions, completions
from penstock.server.errors import InvalidRequest

router = APIRouter()

# A member that only requests of this kind have -> their route, in vLLM's order.
_ROUTES: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "messages": chat_completions,
    "prompt": completions,
    "input": embeddings,
    "query": rerank,
    "text_1": score,
    "queries": score,
}


@router.get("/load")
async def load(request: Request) -> Response:
    """Answers that run or wait, for load balancers."""
    return json_response({"server_load": service_of(request).num_open})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """The model's tokenizer_config.json, with the chat template that is in use."""
    encoder = service_of(request).model.encoder
    info = {"tokenizer_class": "PreTrainedTokenizerFast"} | _plain(encoder.settings)
    if encoder.template_source is not None:
        info["chat_template"] = encoder.template_source
    return json_response(info)


def _plain(value: Any) -> Any:
    """Tokens are texts in vLLM's answer, not objects with settings of their own."""
    if not isinstance(value, dict):
        return value
    if "content" in value:
        return value["content"]
    return {key: _plain(item) for key, item in value.items()}


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    """As the API whose fields the body has. Raises InvalidRequest where it is none's."""
    body = await body_of(request)
    try:
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = "the body must be a JSON object"
        raise InvalidRequest(message, code="invalid_json") from error
    for name, route in _ROUTES.items():
        if name in names:
            is_classes = route is embeddings and service_of(request).model.classifier is not None
            return await (classify if is_classes else route)(_read_again(request, body))
    message = f"the body has none of {', '.join(_ROUTES)}, which tell what is asked for"
    raise InvalidRequest(message, code="missing_required_parameter")


def _read_again(request: Request, body: bytes) -> Request:
    """The request with its body still to be read."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return unread.pop() if unread else await request.receive()

    return Request(request.scope, receive)
