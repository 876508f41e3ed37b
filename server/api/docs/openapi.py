"""`/openapi.json`: the routes as they are, with the bodies that they parse themselves.

Routes read raw bytes, because a refusal has to be OpenAI's error object with a sentence; so FastAPI
knows nothing of their fields, and what it would guess of answers and errors is not true. This
table is. `/docs` (Swagger UI) and `/redoc` (ReDoc) show it without any other server: their scripts
come with the package fastapi-offline. The pages' headers forbid the browser to load anything from
elsewhere and to run inline scripts.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.server.api.common import json_response
from penstock.server.api.embeddings.fields import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from penstock.server.api.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from penstock.server.errors import ANTHROPIC_PATH
from penstock.server.protocol.anthropic import CountTokensRequest, MessagesRequest
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.llama_cpp import LlamaCompletionRequest
from penstock.server.protocol.openai import CompletionRequest
from penstock.server.protocol.responses import ResponsesRequest
from penstock.server.service import Service

router = APIRouter(include_in_schema=False)

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class _Operation:
    """required: members of its answer. bodies: any of these. streams: with `stream: true`."""

    required: str = ""
    bodies: tuple[type[BaseModel], ...] = ()
    streams: bool = False


_CHOICES = "id object created model choices usage"
_SCORES = _Operation("id object model data usage", (ScoreRequest,))
_COHERE = _Operation("id embeddings texts meta response_type", (CohereEmbedRequest,))
_CLASSES = _Operation("id object model data usage", (ClassifyRequest,))
_RANKING = _Operation("id model results usage", (RerankRequest,))
_STATUS = _Operation("status")
_OPERATIONS = {
    "/v1/completions": _Operation(_CHOICES, (CompletionRequest,), streams=True),
    "/v1/chat/completions": _Operation(_CHOICES, (ChatCompletionRequest,), streams=True),
    "/v1/responses": _Operation(
        "id object created_at model status output", (ResponsesRequest,), streams=True
    ),
    "/v1/responses/input_tokens": _Operation("input_tokens", (ResponsesRequest,)),
    "/v1/messages": _Operation(
        "id type role content model stop_reason usage", (MessagesRequest,), streams=True
    ),
    "/v1/messages/count_tokens": _Operation("input_tokens", (CountTokensRequest,)),
    "/v1/embeddings": _Operation("object model data usage", (EmbeddingRequest,)),
    **dict.fromkeys(("/v1/embed", "/v2/embed"), _COHERE),
    "/completion": _Operation(
        "index content stop tokens_predicted", (LlamaCompletionRequest,), streams=True
    ),
    "/props": _Operation("default_generation_settings total_slots model_alias"),
    **dict.fromkeys(("/v1/score", "/score"), _SCORES),
    **dict.fromkeys(("/v1/classify", "/classify"), _CLASSES),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RANKING),
    "/tokenize": _Operation(
        "count max_model_len tokens token_strs", (TokenizeRequest, TokenizeChatRequest)
    ),
    "/detokenize": _Operation("prompt", (DetokenizeRequest,)),
    "/v1/models": _Operation("object data"),
    "/v1/models/{name}": _Operation("id object created owned_by"),
    **dict.fromkeys(("/health", "/ping", "/ready"), _STATUS),
    "/load": _Operation("server_load"),
    "/tokenizer_info": _Operation("tokenizer_class"),
    "/invocations": _Operation(
        bodies=(
            *(ChatCompletionRequest, CompletionRequest, EmbeddingRequest),
            *(RerankRequest, ScoreRequest),
        ),
        streams=True,
    ),
    "/version": _Operation(
        "version computed_by tensor_parallel_size pipeline_parallel_size gpu_way failed_gpu_ways"
    ),
    "/steps": _Operation(
        "version model scheduler prediction_error num_steps front_end_cpu_s steps"
    ),
}
_NOT_JSON = {"/metrics": "text/plain"}

_ERRORS = {
    400: "A field is invalid or not supported; `param` names it",
    401: "The key is missing or wrong",
    403: "A browser sent it for a page of another site, which --allowed-origins does not name",
    404: "There is no such model, path or object",
    413: "The body is larger than --max-body-bytes",
    415: "The body is compressed, or its content-type is not JSON",
    421: "The Host header has a name that is not this server's; see --allowed-hosts",
    429: "Too many requests wait; Retry-After says when to come back",
    500: "The server's mistake, or the engine has ended",
    503: "The model is loading, or the server is about to end; Retry-After says when to come back",
    504: "It took longer than --request-timeout",
}
_ERRORS_OF_GET = (400, 401, 404, 421, 500, 503)


def _object(**properties: Any) -> dict[str, Any]:
    """A schema of which all members are required."""
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))
_ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))
_ANTHROPIC_ERROR["properties"]["request_id"] = _TEXT_OR_NULL


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return json_response(schema_of(request.app))


def schema_of(app: FastAPI) -> dict[str, Any]:
    """Made once for each app."""
    if app.openapi_schema is None:
        app.openapi_schema = _schema_of(app)
    return app.openapi_schema


def _schema_of(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    if app.root_path:
        schema["servers"] = [{"url": app.root_path}]
    bodies = {body for operation in _OPERATIONS.values() for body in operation.bodies}
    ordered = sorted(bodies, key=lambda body: body.__name__)
    _, models = models_json_schema([(b, "validation") for b in ordered], ref_template=_REF)
    for body in ordered:
        _name_models(models["$defs"][body.__name__], app.state.service)
    errors = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    schema["components"] = {"schemas": models["$defs"] | errors}
    has_keys = bool(app.state.service.config.server.api_keys)
    if has_keys:
        scheme = {"key": {"type": "http", "scheme": "bearer"}}
        schema["components"]["securitySchemes"] = scheme
    for path, methods in schema["paths"].items():
        for method, described in methods.items():
            _describe(described, path, method)
            if not has_keys:
                described.pop("security", None)
    return schema


def _name_models(body: dict[str, Any], service: Service) -> None:
    """Only these are not a 404."""
    if "model" in body["properties"]:
        names = list(service.config.server.served_model_names)
        body["properties"]["model"] = {"type": "string", "enum": names}


def _describe(described: dict[str, Any], path: str, method: str) -> None:
    operation = _OPERATIONS.get(path, _Operation()) if _is_ours(path, method) else _Operation()
    if operation.bodies:
        refs = [{"$ref": _REF.format(model=body.__name__)} for body in operation.bodies]
        body = refs[0] if len(refs) == 1 else {"anyOf": refs}
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    if path.startswith("/v1") or operation.bodies:
        described["security"] = [{"key": []}]
    answer: dict[str, Any] = {"type": "object", "required": operation.required.split()}
    content = {_NOT_JSON.get(path, "application/json"): {"schema": answer}}
    if path in _NOT_JSON:
        content = {_NOT_JSON[path]: {"schema": {"type": "string"}}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    described["responses"] = {"200": {"description": "The answer", "content": content}} | {
        str(status): {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=error)}}},
        }
        for status, text in _ERRORS.items()
        if method == "post" or status in _ERRORS_OF_GET
    }


def _is_ours(path: str, method: str) -> bool:
    """The table is of POST where there is a body, else of GET."""
    operation = _OPERATIONS.get(path)
    return operation is not None and method == ("post" if operation.bodies else "get")


_STARTS = ("start-swagger.js", "start-redoc.js")
_PACKAGED = ("swagger-ui.css", "swagger-ui-bundle.js", "redoc.standalone.js")
_MEDIA_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
# As of the page at `/`, but for trusted types, and for what one of the two needs: both insert
# pictures of their own; ReDoc inserts styles too, and searches in a worker.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'{styles}; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'{workers}"
)
_POLICIES = {
    "docs": _POLICY.format(styles="", workers=""),
    "redoc": _POLICY.format(styles=" 'unsafe-inline'", workers="; worker-src blob:"),
}
_HEADERS = {
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@router.get("/docs")
async def swagger() -> Response:
    return _page("docs")


@router.get("/redoc")
async def redoc() -> Response:
    return _page("redoc")


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    """Raises HTTPException for unknown names."""
    if name not in (*_PACKAGED, *_STARTS):
        raise HTTPException(404)
    headers = {**_HEADERS, "cache-control": "no-cache"}
    return Response(_content(name), headers=headers, media_type=_MEDIA_TYPES[name.split(".")[-1]])


def _page(name: str) -> Response:
    """Its URLs are relative, so that a --root-path need not be known."""
    headers = {**_HEADERS, "content-security-policy": _POLICIES[name]}
    page = _content(f"{name}.html")
    return Response(page, headers=headers, media_type="text/html; charset=utf-8")


@cache
def _content(name: str) -> bytes:
    directory = files("fastapi_offline") / "static" if name in _PACKAGED else files(__package__)
    return (directory / name).read_bytes()
