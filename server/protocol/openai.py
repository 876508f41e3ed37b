"""OpenAI's wire types: which fields are served, and what they mean in our terms.

Three kinds of field: those we serve are declared; those that we know, do not serve, and that would
change the answer are refused by name (`NEUTRAL`); all others are ignored.
"""

import contextlib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.output.loops import LoopRule
from penstock.server.protocol.invalid_fields import (
    EXPECTED,
    HINTS,
    NOT_SERVED,
    UNUSED,
    invalid_fields,
    json_of,
    nul,
    report_unused,
)
from penstock.server.structured.constraint import SYNONYMS, Constraint, constraint_of
from penstock.server.structured.grammar import BannedTexts
from penstock.server.tools.rules import AnswerRules

MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # each one costs memory for a table and time for every character
MAX_N = 128
MAX_PROMPTS = 2048
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
_VOCABULARY_CHARS = 1 << 15
MAX_REQUEST_ID_CHARS = 128
_UNLIMITED = 2**31 - 1  # tokens; cut to what the context has room for

# Known but not supported: field -> the values that change nothing. OpenAI's first, then those that
# users of other servers send.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **NOT_SERVED,
    "tools": ([],),  # of a chat, as are the next
    "tool_choice": ("none", "auto"),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),  # of a chat
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "prompt_embeds": (),
    "logits_processors": ([],),
}

# For a provider's bills, caches and moderation: no answer depends on them anywhere.
ACCOUNTING = frozenset(
    (
        *("metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options"),
    )
)

Probability = Annotated[float, Field(ge=0, le=1)]  # 0 keeps the best token alone
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasKey = Annotated[int, Field(strict=False)]  # JSON has only strings as keys
TokenId = Annotated[int, Field(ge=0)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
RequestName = Annotated[str, Field(max_length=MAX_REQUEST_ID_CHARS, pattern=r"^[!-~]+$")]
Breaker = Annotated[str, Field(min_length=1, max_length=40)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


def num_top(wanted: int | None) -> int | None:
    """How many of the likeliest tokens a field asks for: -1 stands for the most, as in vLLM."""
    return MAX_LOGPROBS if wanted == -1 else wanted


class Wire(BaseModel):
    """Strict, as at OpenAI: "1" is not a number, 1 not a boolean, NaN and infinity not numbers."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ParsedRequest(Wire):
    """A request that is read from a body."""

    model_config = ConfigDict(extra="allow")  # kept to be looked through
    expected: ClassVar[Mapping[str, str]] = EXPECTED  # see `invalid_fields`
    # Known but not supported: field -> the values that change nothing; and what to do instead.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    hints: ClassVar[Mapping[str, str]] = {}
    # What else it looks for in `model_extra`.
    known_extras: ClassVar[frozenset[str]] = frozenset()
    _num_bytes: int = PrivateAttr(0)

    model: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises InvalidRequest or UnsupportedParameter; `param` names the field."""
        return cls.of(json_of(body), num_bytes=len(body))

    @classmethod
    def of(cls, values: Any, *, num_bytes: int) -> Self:
        """From the values of a body of num_bytes, or of one of another API that it is served as.
        Raises as `parse` does."""
        if isinstance(values, dict):  # before what is missing: it may be there by another name
            cls._check_supported(values)
        try:
            fields = cls.model_validate(values)
        except ValidationError as error:
            raise invalid_fields(error, cls, expected=cls.expected) from error
        fields._num_bytes = num_bytes
        fields._check()
        return fields

    @property
    def num_bytes(self) -> int:
        """The length of the body: whatever the prompt is made of, it cannot be much longer."""
        return self._num_bytes

    def error_names(self) -> contextlib.AbstractContextManager[None]:
        """Within it, errors name the fields of this API, whatever it is served as."""
        return contextlib.nullcontext()

    @property
    def ignored_fields(self) -> list[str]:
        """Names the fields of the body that have no effect, in their order: misspelt ones, and
        those of other servers."""
        known = self.known_extras | self.neutral.keys() | ACCOUNTING
        return [
            name
            for name, value in (self.model_extra or {}).items()
            if name not in known and value is not None and value is not False
        ]

    def check_no_field_is_ignored(self) -> None:
        """Raises InvalidRequest, with the name that may have been meant."""
        if not (ignored := self.ignored_fields):
            return
        name = ignored[0][:64]
        known = [*type(self).model_fields, *self.known_extras, *self.neutral]
        meant = get_close_matches(name, known, n=1)
        message = f"{name!r} is no field that has an effect here, and this server was started with "
        message += "--strict-fields; " + (
            f"did you mean {meant[0]!r}?" if meant else "leave it out"
        )
        raise InvalidRequest(message, param=name, code="unknown_parameter")

    @classmethod
    def _check_supported(cls, values: dict[str, Any]) -> None:
        """Raises UnsupportedParameter."""
        # Not one by one: a body may have ten thousands of unknown fields.
        for name in sorted(values.keys() & cls.neutral.keys() - cls.model_fields.keys()):
            if values[name] is not None and values[name] not in cls.neutral[name]:
                raise UnsupportedParameter(name, cls.hints.get(name, "leave it out"))

    def _check(self) -> None:
        """Checks what pydantic does not. Raises InvalidRequest or UnsupportedParameter."""


class PromptFields(ParsedRequest):
    """How texts become prompts, and how these are served; beyond OpenAI, under vLLM's names."""

    user: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestName | None = None

    def _check(self) -> None:
        super()._check()
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1 for the most that fit"
            raise InvalidRequest(message, param="truncate_prompt_tokens")

    def fields_of(self, param: str) -> "PromptFields":
        """Returns those that hold for the input that stands there."""
        return self


class RepetitionDetection(Wire):
    """vLLM's: blocks of these sizes, so many copies."""

    max_pattern_size: int = Field(0, ge=0, le=4096)
    min_pattern_size: int = Field(0, ge=0, le=4096)
    min_count: int = Field(0, ge=0)


class GenerationFields(PromptFields):
    """The fields that both endpoints take."""

    neutral = NEUTRAL
    hints = HINTS
    known_extras = frozenset(SYNONYMS)
    _cuts_max_tokens: bool = PrivateAttr(False)

    n: int | None = Field(None, ge=1, le=MAX_N)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=1024)] | None = None
    # Beyond OpenAI, under vLLM's names.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    repetition_detection: RepetitionDetection | None = None
    # Penstock's own: a number of copies, or true for four; strings that an answer never contains.
    stop_on_loop: bool | Annotated[int, Field(ge=2, le=1000)] | None = None
    banned_strings: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=1 << 18, fail_fast=True)] | None
    ) = None
    skip_special_tokens: bool | None = None
    # Nothing to act on: the decoders that we serve never put spaces between tokens.
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=MAX_LOGPROBS)  # -1: the most
    # As the key of --speculative-config, whose number it can lower.
    num_speculative_tokens: int | None = Field(None, ge=0, lt=2**31)
    # llama.cpp's.
    dry_multiplier: float | None = Field(None, ge=0, le=100)
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=1, lt=2**31)
    dry_penalty_last_n: int | None = Field(None, ge=-1, lt=2**31)
    dry_sequence_breakers: Annotated[list[Breaker], Field(max_length=64)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    n_predict: int | None = Field(None, ge=-1)
    timings_per_token: bool | None = None
    # One of these at most: see server/structured/constraint.py. The last two are llama.cpp's.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @cached_property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @cached_property
    def num_sampled(self) -> int:
        """Answers to make of each prompt; more than `n` where the best are to be kept."""
        return self.best_of or self.n or 1

    @cached_property
    def num_answers(self) -> int:
        """To all prompts of the request together."""
        return self.num_sampled

    @cached_property
    def num_chars_to_encode(self) -> int:
        """What its sampling parameters take to make, in characters to tokenize."""
        vocabulary = _VOCABULARY_CHARS if self.dry_multiplier else 0  # to look breakers up in
        return sum(map(len, self.bad_words or ())) + vocabulary

    @property
    def loop_rule(self) -> LoopRule | None:
        """When the answer ends since it repeats itself; None: never. The longest block of
        `stop_on_loop` is 256 tokens, and so are the copies at least 32: a rule of dashes, or a row
        of empty cells, is no loop."""
        given = self.repetition_detection
        if given and given.max_pattern_size:
            return LoopRule(given.min_pattern_size or 1, given.max_pattern_size, given.min_count)
        if not self.stop_on_loop:
            return None
        return LoopRule(1, 256, 4 if self.stop_on_loop is True else self.stop_on_loop, 32)

    @cached_property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @cached_property
    def wants_running_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far: only with include_usage, as in
        vLLM."""
        options = self.stream_options
        return self.wants_usage and bool(options and options.continuous_usage_stats)

    @cached_property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams.num_logprobs`."""
        raise NotImplementedError

    @cached_property
    def wanted_prompt_logprobs(self) -> int | None:
        """How many of the best tokens `prompt_logprobs` is to have."""
        return num_top(self.prompt_logprobs)

    @cached_property
    def num_prompt_logprobs(self) -> int | None:
        """As `SamplingParams.num_prompt_logprobs`."""
        return self.wanted_prompt_logprobs

    @cached_property
    def num_logprobs_to_sample(self) -> int | None:
        """Those that the client wants to see, or those that tell which answers are the best."""
        if self.num_logprobs is None and self.num_sampled > (self.n or 1):
            return 0
        return self.num_logprobs

    @cached_property
    def wanted_max_tokens(self) -> int | None:
        """The limit that the client set, if it did."""
        if self.max_tokens is None and self.n_predict is not None:
            return _UNLIMITED if self.n_predict == -1 else self.n_predict
        return self.max_tokens

    @property
    def cuts_max_tokens(self) -> bool:
        """Whether a limit that is more than the context has room for is cut, and not refused:
        `n_predict` is, as at llama.cpp."""
        return self._cuts_max_tokens or self.n_predict is not None

    def cut_max_tokens(self) -> None:
        self._cuts_max_tokens = True

    @cached_property
    def constraint(self) -> Constraint | None:
        """The form that the answer must have; None for any text. Raises InvalidRequest."""
        return constraint_of(
            self.response_format,
            self.structured_outputs,
            self.grammar,
            self.json_schema,
            self.model_extra,
        )

    @property
    def answer_rules(self) -> AnswerRules:
        return AnswerRules(constraint=self.constraint, banned=self.banned)

    @property
    def banned(self) -> BannedTexts:
        return BannedTexts(tuple(self.bad_words or ()), tuple(self.banned_strings or ()))

    def _check(self) -> None:
        super()._check()
        for name in UNUSED:
            if (self.model_extra or {}).get(name):
                report_unused(name, "this server has no use for it")
        _ = self.constraint  # raises if there is more than one
        if self.stream_options and not self.stream:
            message = "stream_options requires stream: true"
            raise InvalidRequest(message, param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs cannot be combined with stream: true"
            raise InvalidRequest(message, param="prompt_logprobs")
        if self.wanted_max_tokens is not None and (self.min_tokens or 0) > self.wanted_max_tokens:
            message = f"min_tokens must be at most max_tokens, {self.wanted_max_tokens}"
            raise InvalidRequest(message, param="min_tokens")
        if self.repetition_detection:
            self._check_repetition(self.repetition_detection)
        self._check_best_of()

    def _check_repetition(self, given: RepetitionDetection) -> None:
        if given.min_pattern_size > given.max_pattern_size:
            message = "min_pattern_size must be at most max_pattern_size"
        elif given.max_pattern_size and given.min_count < 2:
            message = "min_count must be at least 2"
        elif self.stop_on_loop:
            message = "it cannot be combined with stop_on_loop"
        else:
            return
        raise InvalidRequest(f"repetition_detection: {message}", param="repetition_detection")

    def _check_best_of(self) -> None:
        if self.num_sampled < (self.n or 1):
            message = f"best_of must be at least n, {self.n}"
            raise InvalidRequest(message, param="best_of")
        if self.num_sampled > (self.n or 1) and self.stream:
            message = "best_of cannot be combined with stream: true: the best is known at the end"
            raise InvalidRequest(message, param="best_of")


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`."""

    # One complaint is enough: a million of them would stop the server for a while.
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=-1, le=MAX_LOGPROBS)
    echo: bool | None = None
    max_tokens: int | None = Field(None, ge=0)  # 0: only what is reported of the prompt
    suffix: str | None = None

    @cached_property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt: its text, or its ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)

    @cached_property
    def num_logprobs(self) -> int | None:
        return num_top(self.logprobs)

    @cached_property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_sampled

    @cached_property
    def echoes_logprobs(self) -> bool:
        """Whether the logprobs begin with the prompt's."""
        return bool(self.echo) and self.logprobs is not None

    @cached_property
    def num_prompt_logprobs(self) -> int | None:
        if self.echoes_logprobs:
            return max(self.num_logprobs or 0, self.wanted_prompt_logprobs or 0)
        return self.wanted_prompt_logprobs

    def _check(self) -> None:
        super()._check()
        if len(self.prompts) > MAX_PROMPTS:
            message = f"prompt has {len(self.prompts)} prompts, more than the {MAX_PROMPTS} allowed"
            raise InvalidRequest(message, param="prompt")
        if not self.prompts or any(prompt == [] for prompt in self.prompts):
            raise InvalidRequest("prompt is empty; it needs at least one token", param="prompt")
        if any(isinstance(prompt, str) and "\0" in prompt for prompt in self.prompts):
            raise nul("prompt")
        if self.suffix:
            self._check_suffix(self.suffix)

    def _check_suffix(self, suffix: str) -> None:
        """Whether the model can fill in at all is known to server/prompt/infill.py."""
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            message = "suffix needs a prompt of text; among token ids, place the markers yourself"
            raise InvalidRequest(message, param="suffix")
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} cannot be combined with suffix", param=name)
        if "\0" in suffix:
            raise nul("suffix")
