"""The bodies of the routes for embeddings and scores: which texts they hold, and which fields are
served."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.server.errors import InvalidRequest
from penstock.server.protocol.openai import PromptFields, TokenId, Wire

MAX_INPUTS = 2048  # OpenAI's own limit

_EXPECTED = {
    "input": "must be a string, a list of strings, a list of token ids, or a list of such lists",
    "texts": "must be a list of strings",
    "text_1": "must be a string or a list of strings",
    "text_2": "must be a string or a list of strings",
    "queries": "must be a string or a list of strings",
    "query": "must be a string or an object with a text",
    "documents": "must be a list of strings or of objects with a text",
}
_PROMPT_NAMES = ("prompt_name", "input_type", "task")

Texts = str | Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]


class PooledFields(PromptFields):
    """The fields that all these endpoints take."""

    expected = _EXPECTED
    neutral: ClassVar = {"normalize": (True,), "mm_processor_kwargs": ({},)}
    uses: ClassVar[Mapping[str, str]] = {}  # of the texts of a field

    def use_of(self, param: str) -> tuple[str | None, str]:
        """Returns the name of a text's prompt, or of its use, and the field that says it."""
        given = ((getattr(self, name), name) for name in self._prompt_names)
        return next(given, (self.uses.get(param.partition("[")[0]), param))

    @property
    def _prompt_names(self) -> list[str]:
        names = (name for name in _PROMPT_NAMES if name in type(self).model_fields)
        return [name for name in names if getattr(self, name) is not None]


class InputFields(PooledFields):
    neutral: ClassVar = {**PooledFields.neutral, "messages": (), "chat_template": ()}
    hints: ClassVar = {"messages": "send texts as input"}

    input: Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]

    @property
    def inputs(self) -> dict[str, str | list[int]]:
        """Where in the body each is -> its text, or its ids."""
        given: Any = self.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return {"input": given}
        return numbered("input", given)


class ClassifyRequest(InputFields):
    """`POST /classify`, in vLLM's shape."""

    use_activation: bool | None = None


class EmbeddingRequest(InputFields):
    """`POST /v1/embeddings`."""

    neutral: ClassVar = {
        **InputFields.neutral,
        "use_activation": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    # One of these at most: TEI's, Cohere's and Jina's field for it.
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None

    def _check(self) -> None:
        super()._check()
        names = self._prompt_names
        if len(names) > 1:
            raise InvalidRequest(f"{names[1]} cannot be combined with {names[0]}", param=names[1])
        if names and not all(isinstance(given, str) for given in self.inputs.values()):
            message = f"{names[0]} cannot be combined with token ids; send the text as input"
            raise InvalidRequest(message, param=names[0])


class CohereEmbedRequest(PooledFields):
    """`POST /v2/embed`. Its quantized types of embeddings are not served."""

    neutral: ClassVar = {**EmbeddingRequest.neutral, "inputs": (), "images": ()}
    hints: ClassVar = dict.fromkeys(("inputs", "images"), "send texts")

    texts: Annotated[list[str], Field(fail_fast=True)]
    input_type: str | None = None
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
        return numbered("texts", self.texts)

    def fields_of(self, param: str) -> PromptFields:
        """A text that is too long is cut, at its end unless the client says otherwise."""
        if self.truncate == "NONE":
            return self
        side = "left" if self.truncate == "START" else "right"
        most = {"truncate_prompt_tokens": self.max_tokens or -1, "truncation_side": side}
        return self.model_copy(update=most)


class PairFields(PooledFields):
    """Of pairs of texts that are scored."""

    uses: ClassVar = {"query": "query", "queries": "query", "documents": "document"}

    use_activation: bool | None = None
    instruction: str | None = None


class ScoreRequest(PairFields):
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
        return listed("score", scores)

    def _texts(self, name: str) -> dict[str, str | list[int]]:
        given = getattr(self, name)
        return {name: given} if isinstance(given, str) else numbered(name, given)


class TextObject(Wire):
    text: str


class RerankRequest(PairFields):
    """`POST /rerank`, in the shape of Cohere, Jina and vLLM."""

    kind: ClassVar = "rerank"
    neutral: ClassVar = {**PooledFields.neutral, "rank_fields": (["text"],), "texts": ()}
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
        return self.document_fields if param.startswith("documents") else self

    @cached_property
    def document_fields(self) -> PromptFields:
        """Its first tokens are kept: those that fit, as at Cohere and Jina, or fewer."""
        if self.truncate_prompt_tokens is not None or self.max_tokens_per_doc == 0:
            return self
        most = {"truncate_prompt_tokens": self.max_tokens_per_doc or -1, "truncation_side": "right"}
        return self.model_copy(update=most)

    @property
    def texts(self) -> list[str]:
        return [_text_of(document) for document in self.documents]

    @property
    def inputs(self) -> dict[str, str | list[int]]:
        return {"query": _text_of(self.query)} | numbered("documents", self.texts)

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


def numbered(name: str, items: Sequence[Any]) -> dict[str, Any]:
    if not items:
        raise InvalidRequest(f"{name} is empty; send at least one text", param=name)
    check_number(len(items), name)
    return {f"{name}[{i}]": item for i, item in enumerate(items)}


def check_number(num_inputs: int, param: str) -> None:
    if num_inputs > MAX_INPUTS:
        message = f"{num_inputs} texts exceed the limit of {MAX_INPUTS} per request"
        raise InvalidRequest(f"{message}; send several requests", param=param)


def listed(kind: str, values: Sequence[Any]) -> dict[str, Any]:
    return {"data": [{"object": kind, "index": i, kind: value} for i, value in enumerate(values)]}
