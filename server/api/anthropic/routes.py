"""`/v1/messages`: Anthropic's API."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.anthropic.writer import MessageWriter
from penstock.server.api.common import Received, json_response, receive
from penstock.server.api.pipeline import answer_request, prepare
from penstock.server.output.generation import Generation
from penstock.server.prompt.limits import check_could_fit
from penstock.server.prompt.off_loop import off_loop
from penstock.server.prompt.prompts import Prompts, chat_prompts
from penstock.server.protocol.anthropic import CountTokensRequest, MessagesRequest, chat_request
from penstock.server.protocol.chat import ChatCompletionRequest

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    return await answer_request(request, Messages())


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    prepared = await prepare(Messages(), await receive(request, CountTokensRequest.parse))
    return json_response({"input_tokens": len(prepared.prompt_token_ids[0])})


class Messages:
    """See `penstock.server.api.pipeline.TextApi`."""

    parse = staticmethod(MessagesRequest.parse)

    async def render(
        self, received: Received[CountTokensRequest]
    ) -> tuple[ChatCompletionRequest, Prompts]:
        model = received.model
        sent = received.fields
        check_could_fit(model, "messages", num_messages=len(sent.messages))
        make = partial(chat_request, thinks=model.chat_format.reasoning is not None)
        fields = await off_loop(make, sent, sent.num_bytes)
        # Its clients must send max_tokens, and have defaults that are longer than many a context.
        fields.cut_max_tokens()
        prompts = await chat_prompts(fields, model)
        if (wanted := fields.wanted_max_tokens) and prompts.max_tokens[0] < wanted:
            received.headers["x-max-tokens"] = str(prompts.max_tokens[0])
        return fields, prompts

    def writer(
        self, received: Received[CountTokensRequest], generation: Generation
    ) -> MessageWriter:
        name = received.model.name
        return MessageWriter(name, generation.usage, lambda: generation.choices[0].stop_string)
