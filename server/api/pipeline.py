"""The trip of a request whose answer is generated text, from the socket to the last event.

Read `answer_request` and `TextResponse` first: they are the whole trip, for every API.
"""

import asyncio
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.api.common import Received, receive, response_to_nobody, unless_disconnected
from penstock.server.errors import GeneratesNothing
from penstock.server.http.middleware import DIRECT_SEND
from penstock.server.http.sse import EventStream, EventWriter
from penstock.server.output.delta import OutputDelta
from penstock.server.output.generation import Generation, GenerationRequest, SentAnswers, collected
from penstock.server.prompt.constraints import constrain
from penstock.server.prompt.off_loop import off_loop
from penstock.server.prompt.prompts import Prompts
from penstock.server.prompt.request_builder import build_generation_request
from penstock.server.protocol.anthropic import MessagesRequest
from penstock.server.protocol.llama_cpp import LlamaCompletionRequest
from penstock.server.protocol.openai import GenerationFields, ParsedRequest
from penstock.server.protocol.responses import ResponsesRequest

# The tokens whose logprobs an answer reports: more of them are written in a thread.
_MAX_LOGPROBS_ON_LOOP = 1000
_SENT_BYTES = 1 << 18


class Writer(EventWriter, Protocol):
    """One API's answer while it is generated: its events, and the body that they add up to."""

    def body(self, deltas: list[OutputDelta], generation: Generation) -> list[bytes]:
        """In pieces to be sent one after the other. deltas: each choice as a whole, in order."""
        ...


Fields = TypeVar("Fields", bound=ParsedRequest)
AnswerFields = TypeVar(
    "AnswerFields",
    bound=GenerationFields | MessagesRequest | ResponsesRequest | LlamaCompletionRequest,
)


class TextApi(Protocol[Fields]):
    """An API adds this to the trip: its wire format on the way in and on the way out."""

    def parse(self, body: bytes) -> Fields:
        """Raises InvalidRequest for what is wrong with the fields themselves."""
        ...

    async def render(self, received: Received[Fields]) -> tuple[GenerationFields, Prompts]:
        """The fields as a completion or chat completion has them, and the tokenized prompts."""
        ...

    def writer(self, received: Received[Fields], generation: Generation) -> Writer: ...


async def answer_request(http: Request, api: TextApi[AnswerFields]) -> Response:
    """Received, authenticated (by the middleware), parsed, checked; the response does the rest."""
    return TextResponse(api, await receive(http, api.parse))


async def prepare(api: TextApi[Fields], received: Received[Fields]) -> GenerationRequest:
    """Rendered, tokenized, constrained, and turned into one frozen object: the wire ends here."""
    model = received.model
    if not model.info.generates:
        raise GeneratesNothing(model.info.architecture)
    with received.fields.error_names():
        fields, prompts = await api.render(received)
        rules = fields.answer_rules
        answer = await constrain(rules, prompts.reasoning, model, received.arrival.client)
        build = partial(
            build_generation_request,
            prompts=prompts,
            answer=answer,
            model=model,
            arrival=received.arrival,
        )
        return await off_loop(build, fields, fields.num_chars_to_encode)


class TextResponse(Response):
    """Prepares, submits, and streams or collects; all of it ends when the client disconnects."""

    def __init__(
        self,
        api: TextApi[AnswerFields],
        received: Received[AnswerFields],
        sent: SentAnswers | None = None,
    ) -> None:
        """sent: of a stream that goes on here."""
        super().__init__()
        self._api = api
        self._received = received
        self._sent = sent
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._answer(scope, send))
        if not self._has_started:
            await response_to_nobody()(scope, receive, send)

    async def _answer(self, scope: Scope, send: Send) -> None:
        api, received, service = self._api, self._received, self._received.service
        service.engine.streams.check_room(received.fields.num_answers, received.arrival.client)
        request = await prepare(api, received)
        if self._sent:
            request = replace(request, sent=self._sent)
        generation = service.submit_generation(request)
        try:
            await generation.accepted()
            writer = api.writer(received, generation)
            if received.fields.stream:
                self._has_started = True
                ping_interval_s = service.config.server.sse_ping_interval_s
                direct = scope.get(DIRECT_SEND, send)
                stream = EventStream(
                    generation, writer, send, direct, ping_interval_s=ping_interval_s
                )
                await stream.run()
                return
            deltas = await collected(generation)
            pieces = await _written(writer, deltas, generation)
        finally:
            generation.close()
        self._has_started = True
        await _send_body(pieces, send)


async def _send_body(pieces: list[bytes], send: Send) -> None:
    """Bit by bit, with others' turns between, however fast the client reads."""
    length = b"%d" % sum(map(len, pieces))
    headers = [(b"content-length", length), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    unsent = deque(pieces)
    pieces.clear()  # freed as they are sent: all of 300 MB at once would take a tenth of a second
    while unsent:
        body = _some(unsent)
        await send({"type": "http.response.body", "body": body, "more_body": bool(unsent)})
        if unsent:
            await asyncio.sleep(0)


def _some(unsent: deque[bytes]) -> bytes:
    """The first pieces, which are taken out."""
    taken, size = [], 0
    while unsent and size < _SENT_BYTES:
        taken.append(unsent.popleft())
        size += len(taken[-1])
    return b"".join(taken)


async def _written(
    writer: Writer, deltas: list[OutputDelta], generation: Generation
) -> list[bytes]:
    """In a thread if logprobs of many tokens, a hundred thousand small objects, are encoded."""
    write = partial(writer.body, deltas, generation)
    num_logprobs = sum(len(delta.logprobs) + len(delta.echoed or ()) for delta in deltas)
    if generation.prompts or num_logprobs > _MAX_LOGPROBS_ON_LOOP:
        return await asyncio.to_thread(write)
    return write()
