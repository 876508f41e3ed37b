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
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
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
from penstock.server.protocol.invalid_fields import nul
from penstock.server.protocol.openai import PromptFields, TokenId, Wire

MAX_INPUTS = 2048  # OpenAI's own limit

router = APIRouter()
_NO_ANSWER = SamplingParams(max_tokens=0, seed=0)
_EXPECTED = {
    "input": "must be a string, a list of strings, a list of token ids, or a list of such lists",
    "texts": "must be a list of strings",
    "text_1": "must be a string or a list of strings",
    "text_2": "must be a string or a list of strings",
    "queries": "must be a string or a list of strings",
    "query": "must be a string or an object with a text",
    "documents": "must be a list of strings or of objects with a text",
}

Texts = str | Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]


class PooledFields(PromptFields):
    """The fields that all these endpoints take."""

    expected = _EXPECTED
    neutral: ClassVar = {
        "normalize": (True,),
        "use_activation": (True,),
        "mm_processor_kwargs": ({},),
    }


class EmbeddingRequest(PooledFields):
    """`POST /v1/embeddings`."""

    neutral: ClassVar = {
        **PooledFields.neutral,
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
        "chat_template": (),
    }
    hints: ClassVar = {"messages": "send texts as input"}

    input: Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)

    @property
    def inputs(self) -> dict[str, str | list[int]]:
        """Where in the body each is -> its text, or its ids."""
        given: Any = self.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return {"input": given}
        return _numbered("input", given)


class CohereEmbedRequest(PooledFields):
    """`POST /v2/embed`. Its quantized types of embeddings are not served."""

    neutral: ClassVar = {**PooledFields.neutral, "inputs": (), "images": ()}
    hints: ClassVar = dict.fromkeys(("inputs", "images"), "send texts")

    texts: Annotated[list[str], Field(fail_fast=True)]
    embedding_types: list[Literal["float", "base64"]] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = Field(None, ge=1)
    output_dimension: int | None = Field(None, ge=1)

    def _check(self) -> None:
        super()._check()
        for name in ("truncate_prompt_tokens", "truncation_side"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} is truncate or max_tokens here", param=name)

    @property
    def inputs(self) -> dict[str, str | list[int]]:
        return _numbered("texts", self.texts)

    def fields_of(self, param: str) -> PromptFields:
        """A text that is too long is cut, at its end unless the client says otherwise."""
        if self.truncate == "NONE":
            return self
        side = "left" if self.truncate == "START" else "right"
        most = {"truncate_prompt_tokens": self.max_tokens or -1, "truncation_side": side}
        return self.model_copy(update=most)


class ScoreRequest(PooledFields):
    """`POST /v1/score`: one text with each of the others, or as many pairs as there are.

    The texts have two pairs of names, both vLLM's.
    """

    kind: ClassVar = "score"

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    def _check(self) -> None:
        super()._check()
        first, second = self._names
        for name in ("text_1", "text_2", "queries", "documents"):
            given = getattr(self, name)
            if given is None and name in (first, second):
                message, code = f"{name} is missing", "missing_required_parameter"
                raise InvalidRequest(message, param=name, code=code)
            if given is not None and name not in (first, second):
                message = f"{name} cannot be combined with {first} and {second}"
                raise InvalidRequest(message, param=name)

    @property
    def _names(self) -> tuple[str, str]:
        has_texts = self.text_1 is not None or self.text_2 is not None
        is_search = self.queries is not None or self.documents is not None
        return ("queries", "documents") if is_search and not has_texts else ("text_1", "text_2")

    @property
    def inputs(self) -> dict[str, str | list[int]]:
        first, second = self._names
        return self._texts(first) | self._texts(second)

    def pairs(self) -> list[tuple[int, int]]:
        """Returns pairs of indices into the inputs. Raises InvalidRequest where counts differ."""
        first, second = self._names
        num_1, num_2 = len(self._texts(first)), len(self._texts(second))
        if num_1 not in (1, num_2):
            message = f"{first} has {num_1} texts and {second} {num_2}"
            message = f"{message}; send one, or as many as {second}"
            raise InvalidRequest(message, param=first)
        return [(0 if num_1 == 1 else i, num_1 + i) for i in range(num_2)]

    def results(self, scores: list[float]) -> dict[str, Any]:
        return _listed("score", scores)

    def _texts(self, name: str) -> dict[str, str | list[int]]:
        given = getattr(self, name)
        return {name: given} if isinstance(given, str) else _numbered(name, given)


class TextObject(Wire):
    text: str


class RerankRequest(PooledFields):
    """`POST /rerank`, in the shape of Cohere, Jina and vLLM."""

    kind: ClassVar = "rerank"
    neutral: ClassVar = {
        **PooledFields.neutral,
        "rank_fields": (["text"],),
        "texts": (),
    }
    hints: ClassVar = {"texts": "send documents"}

    query: str | TextObject
    documents: Annotated[list[str | TextObject], Field(fail_fast=True)]
    top_n: int | None = Field(None, ge=0)  # 0: all, as at vLLM
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=0)  # 0: all, as at vLLM

    def _check(self) -> None:
        super()._check()
        if self.max_tokens_per_doc and self.truncate_prompt_tokens is not None:
            message = "max_tokens_per_doc cannot be combined with truncate_prompt_tokens"
            raise InvalidRequest(message, param="max_tokens_per_doc")

    def fields_of(self, param: str) -> PromptFields:
        """Only the first tokens of a document are kept."""
        if not self.max_tokens_per_doc or not param.startswith("documents"):
            return self
        most = {"truncate_prompt_tokens": self.max_tokens_per_doc, "truncation_side": "right"}
        return self.model_copy(update=most)

    @property
    def texts(self) -> list[str]:
        return [_text_of(document) for document in self.documents]

    @property
    def inputs(self) -> dict[str, str | list[int]]:
        return {"query": _text_of(self.query)} | _numbered("documents", self.texts)

    def pairs(self) -> list[tuple[int, int]]:
        return [(0, index) for index in range(1, len(self.inputs))]

    def results(self, scores: list[float]) -> dict[str, Any]:
        """The best first; of equal ones the first."""
        texts = self.texts
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = [
            {"index": i, "relevance_score": scores[i]} for i in best[: self.top_n or None]
        ]
        if self.return_documents is not False:
            results = [each | {"document": {"text": texts[each["index"]]}} for each in results]
        return {"results": results}


def _text_of(value: str | TextObject) -> str:
    return value if isinstance(value, str) else value.text


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
        return json_response(_head("embd", received, requests) | _listed("embedding", values))

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


def _numbered(name: str, items: Sequence[Any]) -> dict[str, Any]:
    if not items:
        raise InvalidRequest(f"{name} is empty; send at least one text", param=name)
    _check_number(len(items), name)
    return {f"{name}[{i}]": item for i, item in enumerate(items)}


async def _requests(
    received: Received[PooledFields], inputs: dict[str, str | list[int]]
) -> list[Request]:
    """Raises InvalidRequest; `param` is the input that is at fault."""
    fields, model = received.fields, received.model
    _check_inputs(inputs)
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
    adds_special = fields.add_special_tokens is not False
    encode = partial(model.encoder.encode_prompt, add_special_tokens=adds_special)
    prompts = tokenized_together(inputs.items(), encode, fields, model)
    return [
        _fitted(prompt, fields.fields_of(param), model, param)
        for param, prompt in zip(inputs, prompts, strict=True)
    ]


def _check_inputs(inputs: dict[str, str | list[int]]) -> None:
    _check_number(len(inputs), list(inputs)[-1].partition("[")[0])  # the field of the last
    for param, given in inputs.items():
        if not given:
            raise InvalidRequest(
                f"{param} is empty; send a text or at least one token", param=param
            )
        if isinstance(given, str) and "\0" in given:
            raise nul(param)


def _check_number(num_inputs: int, param: str) -> None:
    if num_inputs > MAX_INPUTS:
        message = f"{num_inputs} texts exceed the limit of {MAX_INPUTS} per request"
        raise InvalidRequest(f"{message}; send several requests", param=param)


def _fitted(
    prompt: tuple[int, ...], fields: PromptFields, model: ServedModel, param: str
) -> tuple[int, ...]:
    limit = model.info.max_model_len
    hint = "send the text (LangChain: check_embedding_ctx_length=False)"
    check_prompt(prompt, model.info.vocab_size, param, hint)
    prompt = truncated(prompt, fields.truncate_prompt_tokens, limit, fields.truncation_side)
    if len(prompt) > limit:
        raise too_long(PromptTooLong(len(prompt), limit, has_answer=False), param)
    return prompt


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


def _listed(kind: str, values: Sequence[Any]) -> dict[str, Any]:
    return {"data": [{"object": kind, "index": i, kind: value} for i, value in enumerate(values)]}


def _head(kind: str, received: Received[PooledFields], requests: list[Request]) -> dict[str, Any]:
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    return {
        "id": f"{kind}-{received.fields.request_id or secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": received.model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
