"""`/v1/embeddings`, as OpenAI has it, and Cohere's `/v2/embed`; vLLM's `/v1/score`: how alike two
texts are, and the `/rerank` of Cohere and Jina: which documents are most like a query."""

import asyncio
import base64
import math
import secrets
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from operator import mul
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from penstock.scheduler.errors import PromptTooLong
from penstock.scheduler.types import Request, SamplingParams
from penstock.server.api.common import (
    Received,
    json_response,
    receive,
    response_to_nobody,
    unless_disconnected,
)
from penstock.server.api.embeddings.batch import pooled
from penstock.server.api.embeddings.fields import (
    CohereEmbedRequest,
    EmbeddingRequest,
    PooledFields,
    RerankRequest,
    ScoreRequest,
    check_number,
    listed,
)
from penstock.server.errors import InvalidRequest
from penstock.server.output.pooling import normalized
from penstock.server.prompt.limits import (
    check_could_fit,
    check_prompt,
    tokenized_together,
    too_long,
    truncated,
)
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.off_loop import off_loop
from penstock.server.prompt.special_tokens import Ids, SpecialTokens
from penstock.server.protocol.invalid_fields import nul
from penstock.server.protocol.openai import PromptFields

router = APIRouter()
_NO_ANSWER = SamplingParams(max_tokens=0, seed=0)
_NOTHING = SpecialTokens()

Fields = TypeVar("Fields", bound=PooledFields)


@router.post("/v1/embeddings")
@router.post("/embeddings", include_in_schema=False)  # llama.cpp's path
async def embeddings(http: HttpRequest) -> Response:
    received = await receive(http, EmbeddingRequest.parse)
    fields, model = received.fields, received.model

    def written(state: bytes) -> msgspec.Raw:
        return _as_json(model.pooler.embedding(state, fields.dimensions), fields.encoding_format)

    async def answer() -> Response:
        model.pooler.check(fields.dimensions)
        requests = await _requests(received, fields.inputs)
        values = await pooled(received.service, requests, written)
        return json_response(_head("embd", received, requests) | listed("embedding", values))

    return await unless_disconnected(http.receive, answer()) or response_to_nobody()


@router.post("/v2/embed")
async def cohere_embed(http: HttpRequest) -> Response:
    received = await receive(http, CohereEmbedRequest.parse)
    fields, pooler = received.fields, received.model.pooler
    types = dict.fromkeys(fields.embedding_types or ["float"])

    def written(state: bytes) -> list[msgspec.Raw]:
        dimensions = fields.output_dimension
        return [_as_json(pooler.embedding(state, dimensions), kind) for kind in types]

    async def answer() -> Response:
        pooler.check(fields.output_dimension, "output_dimension")
        requests = await _requests(received, fields.inputs)
        columns = zip(*await pooled(received.service, requests, written), strict=True)
        head = _head("embd", received, requests)
        units = {"input_tokens": head["usage"]["prompt_tokens"]}
        return json_response(
            {
                "id": head["id"],
                "texts": fields.texts,
                "embeddings": dict(zip(types, columns, strict=True)),
                "meta": {"api_version": {"version": "2"}, "billed_units": units},
                "response_type": "embeddings_by_type",
            }
        )

    return await unless_disconnected(http.receive, answer()) or response_to_nobody()


@router.post("/v1/score")
@router.post("/score")
async def score(http: HttpRequest) -> Response:
    return await _compare(http, ScoreRequest.parse)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(http: HttpRequest) -> Response:
    return await _compare(http, RerankRequest.parse)


async def _compare(
    http: HttpRequest, parse: Callable[[bytes], ScoreRequest | RerankRequest]
) -> Response:
    """Answers how alike the inputs of each pair are."""
    received = await receive(http, parse)
    fields, pooler = received.fields, received.model.pooler

    async def answer() -> Response:
        pairs = fields.pairs()
        pooler.check(None)
        requests = await _requests(received, fields.inputs)
        vectors = await pooled(
            received.service, requests, lambda state: normalized(pooler.embedding(state))
        )
        scores = await asyncio.to_thread(_scores, vectors, pairs)
        return json_response(_head(fields.kind, received, requests) | fields.results(scores))

    return await unless_disconnected(http.receive, answer()) or response_to_nobody()


async def _requests(
    received: Received[PooledFields], inputs: dict[str, str | list[int]]
) -> list[Request]:
    """Raises InvalidRequest; `param` is the input that is at fault."""
    fields, model = received.fields, received.model
    _check_inputs(inputs)
    inputs = {
        param: model.prompts.named(*fields.use_of(param)) + given
        if isinstance(given, str)
        else given
        for param, given in inputs.items()
    }
    texts = {param: text for param, text in inputs.items() if isinstance(text, str)}
    for param, text in texts.items():
        if fields.fields_of(param).truncate_prompt_tokens is None:
            check_could_fit(model, param, num_chars=len(text))
    num_chars = sum(map(len, inputs.values()))  # many ids take their time too
    prompts = await off_loop(partial(_encoded, fields, model), inputs, num_chars)
    return [
        received.arrival.request(
            fields,
            model,
            prompt_token_ids=prompt,
            sampling=_NO_ANSWER,
            pooling=model.pooler.pooling,
        )
        for prompt in prompts
    ]


def _encoded(
    fields: PooledFields, model: ServedModel, inputs: dict[str, str | list[int]]
) -> list[tuple[int, ...]]:
    fields = _with_side(fields, model)
    around = model.encoder.around_text if fields.add_special_tokens is not False else _NOTHING
    encode = partial(model.encoder.encode_prompt, add_special_tokens=False)
    prompts = tokenized_together(inputs.items(), encode, fields, model)
    arounds = [around if isinstance(given, str) else _NOTHING for given in inputs.values()]
    return [
        _fitted(prompt, fields.fields_of(param), model, param, around)
        for param, prompt, around in zip(inputs, prompts, arounds, strict=True)
    ]


def _with_side(fields: Fields, model: ServedModel) -> Fields:
    """With the side where texts are cut: as in transformers the end, as in vLLM a decoder's
    beginning."""
    side = fields.truncation_side or ("left" if model.info.generates else "right")
    return fields.model_copy(update={"truncation_side": side})


def _check_inputs(inputs: dict[str, str | list[int]]) -> None:
    check_number(len(inputs), list(inputs)[-1].partition("[")[0])  # the field of the last
    for param, given in inputs.items():
        if not given:
            raise InvalidRequest(
                f"{param} is empty; send a text or at least one token", param=param
            )
        if isinstance(given, str) and "\0" in given:
            raise nul(param)


def _fitted(
    prompt: Ids, fields: PromptFields, model: ServedModel, param: str, around: SpecialTokens
) -> Ids:
    """The special tokens around a text stay where it is cut, since one of them may be pooled."""
    limit, most = model.info.max_model_len, fields.truncate_prompt_tokens
    whole = (*around.before, *prompt, *around.after)
    hint = "send the text (LangChain: check_embedding_ctx_length=False)"
    check_prompt(whole, model.info.vocab_size, param, hint)
    if most is not None and len(whole) > (most := limit if most < 0 else most):
        part = truncated(prompt, max(1, most - around.num), limit, fields.truncation_side)
        whole = (*around.before, *part, *around.after)[:most]
    if len(whole) > limit:
        raise too_long(PromptTooLong(len(whole), limit, has_answer=False), param)
    return whole


def _as_json(values: "array[float]", encoding_format: str | None) -> msgspec.Raw:
    """Encoded one by one, since all of a large answer at once would hold up every stream."""
    if encoding_format == "base64":
        if sys.byteorder == "big":  # the clients read little-endian
            values.byteswap()
        return msgspec.Raw(b'"%b"' % base64.b64encode(values.tobytes()))
    return msgspec.Raw(msgspec.json.encode(values.tolist()))


def _scores(vectors: list["array[float]"], pairs: list[tuple[int, int]]) -> list[float]:
    """Computes the scores; two thousand pairs take half a second."""
    return [_cosine(vectors[a], vectors[b]) for a, b in pairs]


def _cosine(a: "array[float]", b: "array[float]") -> float:
    """Returns the cosine of two vectors, which have length 1 but for rounding."""
    return max(-1.0, min(1.0, math.fsum(map(mul, a, b))))


def _head(kind: str, received: Received[PooledFields], requests: list[Request]) -> dict[str, Any]:
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    return {
        "id": f"{kind}-{received.fields.request_id or secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": received.model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
