"""`/v1/completions` and `/v1/chat/completions`."""

import contextlib
from contextlib import AbstractContextManager

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.common import Received
from penstock.server.api.openai.chat_writer import ChatWriter
from penstock.server.api.openai.completion_writer import CompletionWriter
from penstock.server.api.openai.writer import AnswerOptions, Head
from penstock.server.api.pipeline import answer_request
from penstock.server.output.generation import Generation
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.prompts import Prompts, chat_prompts, completion_prompts
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.openai import CompletionRequest, GenerationFields

router = APIRouter()


@router.post("/v1/completions")
@router.post("/completions", include_in_schema=False)  # llama.cpp's path
async def completions(request: Request) -> Response:
    return await answer_request(request, Completions())


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)  # llama.cpp's path
async def chat_completions(request: Request) -> Response:
    return await answer_request(request, ChatCompletions())


class Completions:
    """See `penstock.server.api.pipeline.TextApi`."""

    parse = staticmethod(CompletionRequest.parse)

    async def render(
        self, received: Received[CompletionRequest]
    ) -> tuple[CompletionRequest, Prompts]:
        fields = received.fields
        return fields, await completion_prompts(fields, received.model)

    def error_names(self, _: Received[CompletionRequest]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def writer(
        self,
        received: Received[CompletionRequest],
        generation: Generation,
    ) -> CompletionWriter:
        return CompletionWriter(
            _head(received.model, generation),
            received.model.encoder.vocabulary,
            _options(received.fields, generation),
            generation.usage,
        )


class ChatCompletions:
    """See `penstock.server.api.pipeline.TextApi`."""

    parse = staticmethod(ChatCompletionRequest.parse)

    async def render(
        self, received: Received[ChatCompletionRequest]
    ) -> tuple[ChatCompletionRequest, Prompts]:
        fields = received.fields
        return fields, await chat_prompts(fields, received.model)

    def error_names(self, _: Received[ChatCompletionRequest]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def writer(
        self,
        received: Received[ChatCompletionRequest],
        generation: Generation,
    ) -> ChatWriter:
        return ChatWriter(
            _head(received.model, generation),
            received.model.encoder.vocabulary,
            _options(received.fields, generation),
            generation.usage,
        )


def _head(model: ServedModel, generation: Generation) -> Head:
    return Head(generation.request.id, model.name, model.fingerprint)


def _options(fields: GenerationFields, generation: Generation) -> AnswerOptions:
    each_prompt = generation.request.prompt_token_ids
    prompt_ids = tuple(ids for ids in each_prompt for _ in range(fields.n or 1))
    return AnswerOptions(
        num_logprobs=fields.num_logprobs,
        prompt_logprobs=fields.wanted_prompt_logprobs,
        names_ids=bool(fields.return_tokens_as_token_ids),
        n=fields.n or 1,
        num_sampled=fields.num_sampled,
        speaks_functions=isinstance(fields, ChatCompletionRequest) and fields.speaks_functions,
        hides_reasoning=isinstance(fields, ChatCompletionRequest)
        and fields.include_reasoning is False,
        prompt_ids=prompt_ids if fields.return_token_ids else None,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        wants_usage=fields.wants_usage,
        has_running_usage=fields.wants_running_usage,
    )
