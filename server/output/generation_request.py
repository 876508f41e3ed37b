"""`GenerationRequest`: all that a request asks for once its wire format no longer matters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.scheduler.types import Request
from penstock.server.output.detokenizer import StopStrings
from penstock.server.output.parts import AnswerReader


class SentAnswers(NamedTuple):
    """The answers to a prompt that another server has begun to send, by index.

    token_ids: of each, as far as the client has them. ended: why, of those that have.
    """

    token_ids: Mapping[int, tuple[int, ...]]
    ended: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One HTTP request to the engine: a `Request` for each prompt, `n` answers to each.

    are_whole: for each prompt, whether its answers are texts of their own (see `TextDecoder`).
    echoes: for each prompt, the text that its answers begin with; empty for none.
    echoes_logprobs: their logprobs begin with the prompt's too.
    tpot_target_s: what the TPOT of its answers is held against.
    min_tokens: a stop string is looked for only after this many. shows_special: special tokens
    appear in the text, by name.
    make_reader: makes a reader for each answer; None if all of it is plain text. markup: the
    special tokens that the reader must see, id -> text.
    sent: of a request with one prompt that goes on here; None for one that starts here.
    Choices are numbered prompt by prompt: choice = prompt * n + sample.
    """

    id: str
    requests: tuple[Request, ...]
    are_whole: tuple[bool, ...]
    n: int
    stops: StopStrings | None
    includes_stop: bool
    arrival_s: float
    tpot_target_s: float | None = None
    echoes: tuple[str, ...] = ()
    echoes_logprobs: bool = False
    min_tokens: int = 0
    shows_special: bool = False
    wants_token_ids: bool = False
    make_reader: Callable[[], AnswerReader] | None = None
    markup: Mapping[int, str] = field(default_factory=dict)
    sent: SentAnswers | None = None

    @property
    def prompt_token_ids(self) -> list[tuple[int, ...]]:
        return [request.prompt_token_ids for request in self.requests]
