"""`POST /completion` of llama.cpp's server on the wire, and the same request as a completion.

Source: tools/server/README.md of llama.cpp. A field that is absent has the model's own default, as
in the other APIs, and not llama.cpp's.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from penstock.server.errors import InvalidRequest
from penstock.server.protocol.openai import MAX_LOGPROBS, MAX_N, CompletionRequest, TokenId
from penstock.server.protocol.translation import SHARED_FIELDS, TranslatedRequest

_SAME = SHARED_FIELDS | {"temperature", "top_p", "grammar", "json_schema"}
# Samplers that other servers do not have: each with the values that leave it off.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "typical_p": (1, 0),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "post_sampling_probs": (False,),
    "response_fields": ([],),
    "lora": ([],),
}
_BANNED = -100.0  # `false` as a bias: the lowest that a completion takes


class LlamaCompletionRequest(TranslatedRequest):
    """`POST /completion`."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL
    hints: ClassVar[Mapping[str, str]] = {"lora": "name the adapter as the model"}
    known_extras = _SAME
    own_names: ClassVar = {"max_tokens": "n_predict"}  # others are checked under their own names

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    n_predict: int | None = Field(None, ge=-1)  # -1: as many as the context has room for
    n_cmpl: int | None = Field(None, ge=1, le=MAX_N)
    n_probs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    repeat_penalty: float | None = Field(None, gt=0, le=10)
    seed: int | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    logit_bias: dict[str, Any] | list[Any] | None = None

    _completion: CompletionRequest = PrivateAttr()

    @property
    def completion(self) -> CompletionRequest:
        """The same request as a completion."""
        return self._completion

    @property
    def num_answers(self) -> int:  # type: ignore[override]  # those of the others have one
        return self.completion.num_answers

    def _check(self) -> None:
        super()._check()
        with self.error_names():
            self._completion = CompletionRequest.of(self._values(), num_bytes=self.num_bytes)

    def _values(self) -> dict[str, Any]:
        values = {k: v for k, v in (self.model_extra or {}).items() if k in _SAME}
        return values | {
            "model": self.model,
            "prompt": self.prompt,
            "n_predict": -1 if self.n_predict is None else self.n_predict,
            "n": self.n_cmpl,
            "logprobs": self.n_probs or None,
            "repetition_penalty": self.repeat_penalty,
            "seed": None if self.seed == -1 else self.seed,
            "stream": self.stream,
            "return_token_ids": self.return_tokens or self.stream,
            "logit_bias": _bias(self.logit_bias),
        }


def _bias(given: dict[str, Any] | list[Any] | None) -> dict[str, Any] | None:
    """An object as OpenAI has it; from pairs of an id and a bias, which may be false."""
    if given is None or isinstance(given, dict):
        return given
    biases = {}
    for i, pair in enumerate(given):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], int):
            message = f"logit_bias[{i}] must be a token id and a bias, such as [15043, -1.0]"
            raise InvalidRequest(message, param="logit_bias")
        biases[str(pair[0])] = _BANNED if pair[1] is False else pair[1]
    return biases
