"""`/internal/resume`: a stream that another server began goes on here.

Who calls it is a router that holds the client's stream, has lost the server that wrote it or takes
load from it, and knows the request and the token ids that it has passed on. The answer is the rest
of the same stream. A sampled id depends on the ids before it, the seed and the position alone, and
text, stop strings, tools and reasoning on the ids, so the ids are run through all that anew, and
nothing of them is sent.

The route is there with --handover-key-file alone.
"""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.engine.client import ModelInfo
from penstock.server.api.common import check_own_key, receive, service_of
from penstock.server.api.openai.routes import CHATS, COMPLETIONS
from penstock.server.api.pipeline import TextResponse
from penstock.server.errors import InvalidRequest
from penstock.server.output.generation import SentAnswers
from penstock.server.protocol.openai import GenerationFields

router = APIRouter()

KEY_HEADER = "x-penstock-handover-key"
_APIS: dict[str, Any] = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHATS}


class Answer(msgspec.Struct):
    """token_ids: those that the client has, with `return_token_ids`. finish_reason: of one that has
    ended."""

    index: int
    token_ids: list[int] = []
    finish_reason: str | None = None


class HandedOver(msgspec.Struct):
    """path, body: of the request, as it was sent to the first server."""

    path: str
    body: dict[str, Any]
    answers: list[Answer]


@router.post("/internal/resume", include_in_schema=False)
async def resume(http: Request) -> Response:
    key = service_of(http).config.server.handover_key
    if key is None:
        raise HTTPException(404)
    check_own_key(http, KEY_HEADER, key)
    handed: list[HandedOver] = []

    def parse(data: bytes) -> Any:
        """The fields of the request that is in there."""
        try:
            handed.append(msgspec.json.decode(data, type=HandedOver))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"this is not a request with its answers: {error}") from None
        if handed[0].path not in _APIS:
            paths = " and ".join(_APIS)
            raise InvalidRequest(f"path must be one of {paths}", param="path")
        fields = _APIS[handed[0].path].parse(msgspec.json.encode(handed[0].body))
        _check_resumable(fields)
        return fields

    received = await receive(http, parse)
    sent = _sent_answers(handed[0].answers, received.fields, received.model.info)
    return TextResponse(_APIS[handed[0].path], received, sent)


def _check_resumable(fields: GenerationFields) -> None:
    if not fields.stream:
        raise InvalidRequest(
            "only a stream has a rest; send what is not one to its own path again", param="stream"
        )
    if fields.seed is None and fields.temperature != 0:
        raise InvalidRequest(
            "the seed that the first server drew is not known; give every request a seed, or "
            "temperature 0, before it is sent to any server",
            param="seed",
        )
    if fields.num_prompt_logprobs is not None:
        raise InvalidRequest(
            "logprobs of the prompt come first, and cannot be resumed; send the request to its own "
            "path again",
            param="prompt_logprobs",
        )


def _sent_answers(answers: list[Answer], fields: GenerationFields, model: ModelInfo) -> SentAnswers:
    """Raises InvalidRequest."""
    if sorted(answer.index for answer in answers) != list(range(fields.num_answers)):
        raise InvalidRequest(
            f"answers must have each index from 0 to {fields.num_answers - 1} once",
            param="answers",
        )
    # One that has ended need not fit: it is run through all that makes text of ids.
    if any(len(answer.token_ids) > model.max_model_len for answer in answers):
        raise InvalidRequest(
            f"an answer has at most {model.max_model_len} token_ids, as of this model",
            param="answers",
        )
    if not all(0 <= each < model.vocab_size for answer in answers for each in answer.token_ids):
        raise InvalidRequest(
            f"token_ids must be at least 0 and below {model.vocab_size}, as of this model",
            param="answers",
        )
    if all(answer.finish_reason for answer in answers):
        raise InvalidRequest("all answers have ended", param="answers")
    if fields.num_answers != fields.num_sampled:
        raise InvalidRequest("only a request with one prompt can be resumed", param="prompt")
    return SentAnswers(
        {answer.index: tuple(answer.token_ids) for answer in answers},
        {answer.index: answer.finish_reason for answer in answers if answer.finish_reason},
    )
