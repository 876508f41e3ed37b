"""`/v1/completions` and `/v1/chat/completions`."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.common import Received
from penstock.server.api.openai.chat_writer import ChatWriter
from penstock.server.api.openai.completion_writer import CompletionWriter
from penstock.server.api.openai.writer import Head, OpenAIWriter
from penstock.server.api.pipeline import answer_request
from penstock.server.output.generation import Generation
from penstock.server.output.timings import timings
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.prompts import Prompts, chat_prompts, completion_prompts
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.openai import CompletionRequest, GenerationFields

router = APIRouter()
Fields = TypeVar("Fields", bound=GenerationFields)


class OpenAIApi(Generic[Fields]):
    """See `penstock.server.api.pipeline.TextApi`."""

    def __init__(
        self,
        kind: type[Fields],
        prompts: Callable[[Fields, ServedModel], Awaitable[Prompts]],
        writer: type[OpenAIWriter],
    ) -> None:
        self.parse = kind.parse
        self._prompts = prompts
        self._writer = writer

    async def render(self, received: Received[Fields]) -> tuple[Fields, Prompts]:
        return received.fields, await self._prompts(received.fields, received.model)

    def writer(self, received: Received[Fields], generation: Generation) -> OpenAIWriter:
        model = received.model
        return self._writer(
            Head(generation.request.id, model.name, model.fingerprint),
            model.encoder.vocabulary,
            received.fields,
            generation.request.prompt_token_ids,
            generation.usage,
            partial(timings, generation) if received.fields.timings_per_token else None,
        )


COMPLETIONS = OpenAIApi(CompletionRequest, completion_prompts, CompletionWriter)
CHATS = OpenAIApi(ChatCompletionRequest, chat_prompts, ChatWriter)


@router.post("/v1/completions")
@router.post("/completions", include_in_schema=False)  # llama.cpp's path
async def completions(request: Request) -> Response:
    return await answer_request(request, COMPLETIONS)


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)  # llama.cpp's path
async def chat_completions(request: Request) -> Response:
    return await answer_request(request, CHATS)
