"""`/v1/embeddings`, as OpenAI has it, and Cohere's `/v2/embed`; vLLM's `/v1/score`: how alike two
texts are, and the `/rerank` of Cohere and Jina: which documents are most like a query."""

import asyncio
import base64
import math
import secrets
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import mul
from typing import Any

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
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PairFields,
    PooledFields,
    RerankRequest,
    ScoreRequest,
    check_number,
    listed,
)
from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.output.pooling import normalized
from penstock.server.prompt.limits import (
    check_could_fit,
    check_prompt,
    check_together,
    tokenized_together,
    too_long,
    truncated,
)
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.off_loop import off_loop
from penstock.server.prompt.tokenizer import SpecialTokens
from penstock.server.protocol.invalid_fields import nul

router = APIRouter()
_NO_ANSWER = SamplingParams(max_tokens=0, seed=0)

Ids = tuple[int, ...]
NamedIds = tuple[str, Ids]
Inputs = dict[str, str | list[int]]
Pairs = Sequence[tuple[int, int]]


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


@router.post("/v1/embed")
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
        embeddings = dict(zip(types, columns, strict=True))
        is_list = fields.embedding_types is None and http.url.path.endswith("/v1/embed")
        units = {"input_tokens": head["usage"]["prompt_tokens"]}
        return json_response(
            {
                "id": head["id"],
                "texts": fields.texts,
                "embeddings": embeddings["float"] if is_list else embeddings,
                "meta": {"api_version": {"version": "2"}, "billed_units": units},
                "response_type": "embeddings_floats" if is_list else "embeddings_by_type",
            }
        )

    return await unless_disconnected(http.receive, answer()) or response_to_nobody()


@router.post("/v1/classify")
@router.post("/classify")
async def classify(http: HttpRequest) -> Response:
    received = await receive(http, ClassifyRequest.parse)
    fields, classifier = received.fields, received.model.classifier

    async def answer() -> Response:
        if classifier is None:
            message = "this model is no classifier; use /v1/embeddings, /score or /rerank"
            raise InvalidRequest(message, param="model", code="model_is_no_classifier")
        requests = await _requests(received, fields.inputs)
        read = partial(classifier.values, activates=fields.use_activation is not False)
        data: list[dict[str, Any]] = []
        for values in await pooled(received.service, requests, read):
            label = classifier.labels[values.index(max(values))]
            each = {"index": len(data), "label": label, "probs": values}
            data.append(each | {"num_classes": len(values)})
        return json_response(_head("classify", received, requests) | {"data": data})

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
    """Answers what a classifier makes of each pair of inputs, or else how alike they are."""
    received = await receive(http, parse)
    fields, pooler, classifier = received.fields, received.model.pooler, received.model.classifier

    async def answer() -> Response:
        pairs = fields.pairs()
        if classifier is not None and received.model.pairs is not None:
            requests = await _requests(received, fields.inputs, pairs)
            read = partial(classifier.values, activates=fields.use_activation is not False)
            scores = [score for (score,) in await pooled(received.service, requests, read)]
        else:
            pooler.check(None)
            for name in ("use_activation", "instruction"):
                if getattr(fields, name) not in (None, True):
                    raise UnsupportedParameter(name, "this model only compares; leave it out")
            requests = await _requests(received, fields.inputs)
            vectors = await pooled(
                received.service, requests, lambda state: normalized(pooler.embedding(state))
            )
            scores = await asyncio.to_thread(_scores, vectors, pairs)
        return json_response(_head(fields.kind, received, requests) | fields.results(scores))

    return await unless_disconnected(http.receive, answer()) or response_to_nobody()


async def _requests(
    received: Received[PooledFields], inputs: Inputs, pairs: Pairs = ()
) -> list[Request]:
    """pairs: of inputs that become one prompt, by their indices. Raises InvalidRequest; `param` is
    the input that is at fault."""
    model, fields = received.model, received.fields
    # As in transformers an encoder's texts are cut at the end, as in vLLM others' at the beginning.
    side = fields.truncation_side or ("left" if model.info.generates else "right")
    fields = fields.model_copy(update={"truncation_side": side})
    _check_inputs(inputs)
    inputs, around = _in_words(fields, model, inputs, pairs)
    texts = {param: text for param, text in inputs.items() if isinstance(text, str)}
    for param, text in texts.items():
        if fields.fields_of(param).truncate_prompt_tokens is None:
            check_could_fit(model, param, num_chars=len(text))
    num_chars = sum(map(len, inputs.values()))  # many ids take their time too
    encode = partial(_encoded, fields, model, around=around, pairs=pairs)
    prompts = await off_loop(encode, inputs, num_chars)
    return [
        received.arrival.request(
            fields,
            model,
            prompt_token_ids=prompt,
            num_first=num_first,
            sampling=_NO_ANSWER,
            pooling=model.pooler.pooling,
        )
        for prompt, num_first in prompts
    ]


def _in_words(
    fields: PooledFields, model: ServedModel, inputs: Inputs, pairs: Pairs
) -> tuple[Inputs, SpecialTokens]:
    """The inputs with the model's words around them, and the special tokens around these."""
    is_plain = fields.add_special_tokens is False
    if isinstance(fields, PairFields) and model.pairs and pairs:
        (before, after, second), around = model.pairs.around(fields.instruction)
        is_plain &= model.pairs.template is None
        seconds = {index for _, index in pairs}
        words = [(second, "") if i in seconds else (before, after) for i in range(len(inputs))]
    else:
        around = model.encoder.special_tokens()
        words = [(model.prompts.named(*fields.use_of(param)), "") for param in inputs]
    texts = {
        param: f"{words[i][0]}{given}{words[i][1]}" if isinstance(given, str) else given
        for i, (param, given) in enumerate(inputs.items())
    }
    return texts, SpecialTokens() if is_plain else around


def _encoded(
    fields: PooledFields, model: ServedModel, inputs: Inputs, *, around: SpecialTokens, pairs: Pairs
) -> list[tuple[Ids, int]]:
    """Also returns how many tokens are of the first text's segment, where there are two."""
    encode = partial(model.encoder.encode_prompt, add_special_tokens=False)
    prompts = tokenized_together(inputs.items(), encode, fields, model)
    texts = list(zip(inputs, prompts, strict=True))
    if pairs:
        joined = [_fitted(texts[a], texts[b], fields, model, around) for a, b in pairs]
        check_together(sum(len(ids) for ids, _ in joined), len(pairs), texts[-1][0].split("[")[0])
        return joined
    arounds = [around if isinstance(given, str) else SpecialTokens() for given in inputs.values()]
    alone = zip(texts, arounds, strict=True)
    return [_fitted((text[0], ()), text, fields, model, around) for text, around in alone]


def _fitted(
    one: NamedIds, other: NamedIds, fields: PooledFields, model: ServedModel, around: SpecialTokens
) -> tuple[Ids, int]:
    """As `_encoded`, of two texts, or of the other alone. Special tokens stay where texts are cut,
    as in transformers, and of two that both may be cut the longer is first."""
    (first_param, first), (param, second) = one, other
    limit, most, side = model.max_model_len, fields.truncate_prompt_tokens, fields.truncation_side
    limit = limit if most in (None, -1) else min(limit, most)
    room = limit - len(around.before + around.between + around.after)
    own = fields.fields_of(param)
    if most is not None:
        half = (room + (len(second) >= len(first))) // 2
        second = truncated(second, max(1, half, room - len(first)), limit, side)
        first = truncated(first, max(1, room - len(second)), limit, side)
    elif own.truncate_prompt_tokens is not None:
        for num_kept in (own.truncate_prompt_tokens, max(1, room - len(first))):
            second = truncated(second, num_kept, limit, own.truncation_side)
        param = first_param
    ids = (*around.before, *first, *around.between, *second, *around.after)
    hint = "send the text (LangChain: check_embedding_ctx_length=False)"
    check_prompt(ids, model.info.vocab_size, param, hint)
    if len(ids) > limit:
        raise too_long(PromptTooLong(len(ids), limit, has_answer=False), param)
    num_first = around.num_first
    return ids, 0 if num_first is None else len(around.before) + len(first) + num_first


def _check_inputs(inputs: dict[str, str | list[int]]) -> None:
    check_number(len(inputs), list(inputs)[-1].partition("[")[0])  # the field of the last
    for param, given in inputs.items():
        if not given:
            raise InvalidRequest(
                f"{param} is empty; send a text or at least one token", param=param
            )
        if isinstance(given, str) and "\0" in given:
            raise nul(param)


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
