"""The table from exceptions to status and body, which every route uses for every error."""

import math
import random
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.engine.client import EngineFailed, QueueFull, RequestEndedEngine, RequestRefused
from penstock.scheduler.errors import PenstockError, TargetOutOfReach
from penstock.server.observability.request_log import request_entry, request_id

# Retry-After where nothing better is known: while the model loads, or while the server drains.
RETRY_SOON_S = 2

# The path where errors have Anthropic's form, and Anthropic's types; any other is a bad request.
ANTHROPIC_PATH = "/v1/messages"
# llama.cpp's path, whose clients know a prompt that is too long by the error's type.
LLAMA_PATH = "/completion"
CONTEXT_TOO_LONG = "context_length_exceeded"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class InvalidRequest(PenstockError):
    """The body is not valid; `param` names the field."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: tuple[tuple[str, object], ...] = (),
    ) -> None:
        """details: by which clients of Anthropic and llama.cpp act."""
        super().__init__(message)
        self.param = param
        self.code = code
        self.details = details


class GeneratesNothing(InvalidRequest):
    def __init__(self, architecture: str) -> None:
        super().__init__(
            f"this model ({architecture}) makes embeddings or classes of texts and continues none; "
            "send texts to /v1/embeddings, /classify or /rerank, or serve another model",
            param="model",
            code="model_generates_no_text",
        )


class UnsupportedParameter(InvalidRequest):
    """A known field that is not supported and would change the answer."""

    def __init__(self, what: str, hint: str = "leave it out") -> None:
        """what: the field, followed by a space and its value if only the value is unsupported."""
        super().__init__(
            f"{what} is not supported by this server; {hint}",
            param=what.partition(" ")[0],
            code="unsupported_parameter",
        )


class ThreadUnsupported(UnsupportedParameter):
    """Anthropic's clients then send the whole conversation, if they are configured to. Source:
    `ThreadState` of @anthropic-ai/sdk 1.12."""

    def __init__(self) -> None:
        super().__init__("thread", "leave it out and send the whole conversation as messages")
        self.details = (("error_code", "thread_unsupported_request"), ("unsupported", ("thread",)))


class GrammarFailed(InvalidRequest):
    """An answer could not be completed within its grammar, although the grammar compiled."""

    def __init__(self) -> None:
        super().__init__(
            "the answer could not follow its grammar or schema any further: the grammar became too "
            "complex, or other fields forbid every token that it allows; simplify it",
            code="grammar_failed",
        )


class InvalidLogits(PenstockError):
    """The numbers of which the engine chooses the next token are not numbers."""

    def __init__(self) -> None:
        super().__init__(
            "the model produced NaN or infinite logits, so there is no next token; start the "
            "server with another --dtype (float16 holds nothing above 65504), or check whether the "
            "files of the model are damaged"
        )


class GrammarQueueFull(PenstockError):
    """No process could compile this grammar: others took all the time, or the processes failed."""

    def __init__(self) -> None:
        super().__init__(
            "this server is compiling the grammars of other requests; try again in "
            f"{RETRY_SOON_S} s"
        )


class ImageQueueFull(PenstockError):
    """Too many images are open or wait to be decoded, or the processes that decode them failed."""

    def __init__(self) -> None:
        super().__init__(
            "this server has as many images of other requests as it takes; try again in "
            f"{RETRY_SOON_S} s"
        )


class ModelNotFound(PenstockError):
    def __init__(self, model: str, served: str) -> None:
        super().__init__(
            f"the model {model[:200]!r} does not exist on this server, which serves {served!r}"
        )


class AdaptersFixed(PenstockError):
    """Adapters cannot be loaded while the server runs."""

    def __init__(self) -> None:
        super().__init__(
            "this server loads and unloads no adapters while it runs; start it with --enable-lora, "
            "--lora-root and --admin-key-file to allow that to who has the key, or name adapters "
            "with --lora-modules"
        )


class ResponseNotFound(PenstockError):
    """The id is unknown, was not stored, was deleted or evicted, or belongs to another key. Clients
    cannot distinguish these cases."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"there is no stored response {response_id[:64]!r}; responses are stored unless store "
            "is false, until newer ones take their place or the server stops"
        )


class InvalidApiKey(PenstockError):
    def __init__(self, *, is_given: bool, header: str = "Authorization: Bearer KEY") -> None:
        # OpenAI's words, by which LiteLLM recognizes it.
        what = "Incorrect API key provided" if is_given else "You didn't provide an API key"
        super().__init__(f"{what}; send the header '{header}' with the key of this server")


class RequestTimedOut(PenstockError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the answer took longer than {timeout_s:g} s, the limit of this server; "
            "request a shorter answer, or try again later"
        )


class BodyTooLarge(PenstockError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body is larger than {limit} bytes, the most that this server accepts"
        )


class BodyTooSlow(PenstockError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the body did not arrive within {timeout_s:g} s; send it without a pause")


class TooManyLargeBodies(PenstockError):
    def __init__(self) -> None:
        super().__init__("too many large bodies are on their way at once; send this one again")


class UnsupportedContentType(PenstockError):
    def __init__(self, content_type: str) -> None:
        super().__init__(
            f"the content-type {content_type[:64]!r} is not JSON; send a body of JSON with the "
            "header 'Content-Type: application/json', in curl with -H 'Content-Type: "
            "application/json'"
        )


class UnknownHost(PenstockError):
    """The name by which the client called the server is not one of its own."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"this server is not known by the name in the Host header, {host[:200]!r}; use "
            "localhost, or start the server with --allowed-hosts and that name"
        )


class CrossSiteRequest(PenstockError):
    """A browser sent it for a page of another site."""

    def __init__(self, origin: str | None) -> None:
        super().__init__(
            f"this server does not answer pages of the origin {(origin or 'null')[:200]!r}; start "
            "it with --allowed-origins to allow them"
        )


class UnsupportedEncoding(PenstockError):
    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"the content-encoding {encoding[:64]!r} is not supported; send the body uncompressed"
        )


class NotServing(PenstockError):
    """The model is loading, the engine restarts, or the server is shutting down."""

    def __init__(
        self, message: str, *, is_ending: bool, retry_after_s: float = RETRY_SOON_S
    ) -> None:
        super().__init__(message)
        self.is_ending = is_ending
        self.retry_after_s = retry_after_s


class ErrorReply(NamedTuple):
    """OpenAI's error object, with its status and headers."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    details: tuple[tuple[str, object], ...] = ()  # not in OpenAI's form

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self._fields_of_openai})

    @property
    def _fields_of_openai(self) -> dict[str, object]:
        return {k: getattr(self, k) for k in ("message", "type", "param", "code")}

    @property
    def llama_body(self) -> bytes:
        """Of a prompt that is too long, as llama.cpp's clients know it."""
        fields = self._fields_of_openai | {"type": "exceed_context_size_error"}
        return msgspec.json.encode({"error": fields | dict(self.details)})

    @property
    def anthropic_body(self) -> bytes:
        """The same error in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        error: dict[str, object] = {"type": kind, "message": self.message}
        if self.details:
            error["details"] = dict(self.details)
        fields = {"type": "error", "error": error, "request_id": request_id.get()}
        return msgspec.json.encode(fields)

    def response(self, path: str) -> Response:
        """In the form of the API to which the path belongs."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        if path == LLAMA_PATH and self.code == CONTEXT_TOO_LONG:
            body = self.llama_body
        # Whether the same request would get the same error again.
        is_final = 400 <= self.status < 500 and self.status not in (408, 429)
        headers = dict(_NO_RETRY if is_final else ()) | dict(self.headers)
        return Response(body, self.status, headers, media_type="application/json")

    @property
    def name(self) -> str:
        """The word that clients can act on."""
        return self.code or self.type


_BAD_REQUEST = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"
# OpenAI's clients retry after a 504 unless this header is present: a second try would be as slow,
# and would add load to a server that is overloaded.
_NO_RETRY = (("x-should-retry", "false"),)
_CLOSE = (("Connection", "close"),)


def _retry_after(seconds: float) -> tuple[tuple[str, str], ...]:
    return (("Retry-After", str(math.ceil(seconds))),)


def _fixed(
    status: int, kind: str, code: str | None = None, *headers: tuple[str, str], param: str = ""
) -> ErrorReply:
    """The reply to every error of a class, which gives its message."""
    return ErrorReply(status, kind, "", param or None, code, headers)


_SOON = _retry_after(RETRY_SOON_S)
# By the nearest class of an error; `reply_to` knows those whose replies differ.
_REPLIES: dict[type[BaseException], ErrorReply] = {
    RequestRefused: _fixed(400, _BAD_REQUEST),
    InvalidApiKey: _fixed(401, _BAD_REQUEST, "invalid_api_key", ("WWW-Authenticate", "Bearer")),
    ModelNotFound: _fixed(404, _BAD_REQUEST, "model_not_found", param="model"),
    AdaptersFixed: _fixed(403, _BAD_REQUEST, "adapters_fixed"),
    ResponseNotFound: _fixed(404, _BAD_REQUEST, "response_not_found", param="response_id"),
    BodyTooLarge: _fixed(413, _BAD_REQUEST, "body_too_large", *_CLOSE),
    BodyTooSlow: _fixed(408, _BAD_REQUEST, "request_timeout", *_CLOSE),
    TooManyLargeBodies: _fixed(503, _UNAVAILABLE, "too_many_large_bodies", *_SOON, *_CLOSE),
    UnsupportedContentType: _fixed(
        415, _BAD_REQUEST, "unsupported_content_type", ("Accept", "application/json")
    ),
    UnknownHost: _fixed(421, _BAD_REQUEST, "unknown_host"),
    CrossSiteRequest: _fixed(403, _BAD_REQUEST, "cross_site_request"),
    UnsupportedEncoding: _fixed(
        415, _BAD_REQUEST, "unsupported_content_encoding", ("Accept-Encoding", "identity")
    ),
    RequestTimedOut: _fixed(504, "timeout_error", "request_timeout", *_NO_RETRY),
    QueueFull: _fixed(429, "rate_limit_error", "queue_full"),
    TargetOutOfReach: _fixed(429, "rate_limit_error", "target_out_of_reach"),
    GrammarQueueFull: _fixed(429, "rate_limit_error", "grammar_queue_full", *_SOON),
    ImageQueueFull: _fixed(429, "rate_limit_error", "image_queue_full", *_SOON),
    NotServing: _fixed(503, _UNAVAILABLE),
    InvalidLogits: _fixed(500, "server_error", "invalid_logits"),
    RequestEndedEngine: _fixed(500, "server_error", "request_ended_engine", *_NO_RETRY),
    EngineFailed: _fixed(500, "server_error", "engine_failed"),
}


def reply_to(error: BaseException) -> ErrorReply:
    """Returns the status and the body for an exception."""
    message = str(error)
    headers: tuple[tuple[str, str], ...] = ()
    match error:
        case InvalidRequest():
            fields = (message, error.param, error.code)
            return ErrorReply(400, _BAD_REQUEST, *fields, details=error.details)
        case HTTPException():
            return _reply_to_http(error)
        case QueueFull():
            headers = _retry_after(error.retry_after_s)
        case TargetOutOfReach():
            # Those that were refused together do not all come again at the same time.
            headers = _retry_after(max(1.0, error.retry_after_s * random.uniform(1.0, 1.25)))
        case NotServing():
            headers = _retry_after(error.retry_after_s) + (_CLOSE if error.is_ending else ())
    for kind in type(error).__mro__:
        if reply := _REPLIES.get(kind):
            return reply._replace(message=message, headers=headers or reply.headers)
    text = "internal error of the server; its log has the details under this x-request-id"
    return ErrorReply(500, "server_error", text, None, "internal_error")


def note_error(error: BaseException) -> None:
    """For the line of the current task's request in the log."""
    if entry := request_entry.get():
        entry.error = reply_to(error).name


def malformed_http(status: int, message: str, code: str) -> ErrorReply:
    """For bytes that never become a request."""
    return ErrorReply(status, _BAD_REQUEST, message, None, code)


def too_many_connections(max_files: int) -> ErrorReply:
    """For a connection that cannot be served."""
    message = f"this server has too many connections for its limit of {max_files} files; try again"
    headers = _retry_after(RETRY_SOON_S)
    return ErrorReply(503, _UNAVAILABLE, message, None, "too_many_connections", headers)


# Parts of OpenAI's API that clients look for here.
_APIS_NOT_SERVED = frozenset(
    (
        *("files", "uploads", "batches", "images", "audio", "videos", "realtime", "moderations"),
        *("fine_tuning", "vector_stores", "assistants", "threads", "conversations", "containers"),
        *("evals", "skills", "chatkit", "organization"),
    )
)


# The beginnings of paths that clients of OpenAI's, Anthropic's and vLLM's APIs ask for beside
# served ones, and what they are told. The first that fits holds.
_PATHS_NOT_SERVED = {
    "/v1/chat/completions/batch": "this server takes no batches of chats; send each to "
    "/v1/chat/completions",
    **dict.fromkeys(
        ("/v1/chat/completions/render", "/v1/completions/render"),
        "prompts are not rendered apart from their answers; POST /tokenize gives a prompt's ids",
    ),
    "/inference/v1/generate": "token ids are answered by /v1/completions: send them as the prompt, "
    "with return_token_ids: true",
    "/pooling": "this server returns no states; use /v1/embeddings, /classify, /score or /rerank",
    "/v1/chat/completions/": "chats are not stored here, so none can be retrieved, changed or "
    "deleted; responses are, under /v1/responses",
    "/v1/messages/batches": "this server takes no batches of messages; send each to /v1/messages",
    "/v1/responses/compact": "this server does not compact conversations; use truncation: auto, or "
    "leave out the oldest items",
}


def reply_to_unrouted(error: HTTPException, path: str, *, is_preflight: bool) -> ErrorReply:
    """For what the router refuses, where the path says more than the error."""
    reply = _reply_to_http(error)
    version, _, rest = path.removeprefix("/").partition("/")
    name = rest.partition("/")[0]
    if not is_preflight:
        for beginning, text in _PATHS_NOT_SERVED.items():
            if path.startswith(beginning):
                return reply._replace(status=404, message=text, code="unknown_url", headers=())
    if error.status_code == 404 and version == "v1":
        text = "there is no such path; GET /docs lists what this server serves"
        if name in _APIS_NOT_SERVED:
            text = f"this server does not serve the API under /v1/{name}; GET /docs lists what it "
            text += "serves"
        return reply._replace(message=text)
    if error.status_code == 405 and is_preflight:
        text = (
            "this server does not answer pages of other origins (CORS); "
            "start it with --allowed-origins to allow them"
        )
        return reply._replace(message=text)
    return reply


def _reply_to_http(error: HTTPException) -> ErrorReply:
    """Errors of the router: no such path, or not with this method."""
    headers = tuple((error.headers or {}).items())
    if error.status_code == 404:
        text = "there is no such path; the API is under /v1, for example /v1/chat/completions"
        return ErrorReply(404, _BAD_REQUEST, text, None, "unknown_url", headers)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        text = f"this path does not support the method; use {allowed}"
        return ErrorReply(405, _BAD_REQUEST, text, None, "method_not_supported", headers)
    phrase = HTTPStatus(error.status_code).phrase
    return ErrorReply(error.status_code, _BAD_REQUEST, phrase, None, None, headers)
