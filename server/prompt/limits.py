"""Limits of a prompt: it is long enough, short enough, and of ids that the model has."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.scheduler.errors import ContextTooLong, PenstockError, PromptTooLong
from penstock.server.errors import CONTEXT_TOO_LONG, InvalidRequest
from penstock.server.prompt.model import ServedModel
from penstock.server.protocol.invalid_fields import listed
from penstock.server.protocol.openai import GenerationFields, PromptFields

Text = TypeVar("Text", str, list[int], str | list[int])

# A space before a word ends the word before it in every tokenizer: it belongs to what follows.
_BETWEEN_WORDS = re.compile(r"(?<=[^\W_]) (?=[^\W_])")
# A long text is tokenized in such pieces to see how much of it the context can hold.
_PIECE_CHARS = 1 << 16
# Not more than that of English: so a text that fits is seldom tokenized twice.
_USUAL_TOKEN_CHARS = 4
# All prompts of a request have no more: the engine reads so many ids in 30 ms.
# Of a text that a client only counts. It takes a hundred times its memory meanwhile.
MAX_COUNTED_CHARS = 2**20
MAX_TOKENS_TOGETHER = 1 << 20
# OpenAI's default for completions; a chat's is what the context has left.
_COMPLETION_MAX_TOKENS = 16


def check_could_fit(
    model: ServedModel, param: str, *, num_chars: int = 0, num_messages: int = 0
) -> None:
    """Raises InvalidRequest before a text is tokenized that cannot fit. A token is a few characters
    at most, a message at least one token; a megabyte of text takes a second to tokenize."""
    counted = {
        "characters": (num_chars, model.max_prompt_chars),
        "messages": (num_messages, model.max_model_len),
    }
    for what, (num, limit) in counted.items():
        if num > limit:
            raise _too_many(what, num, model, param)


def _too_many(what: str, num: int, model: ServedModel, param: str) -> InvalidRequest:
    message = (
        f"{param} has {num} {what}, more than this model's context of {model.max_model_len} tokens "
        "can hold; shorten it"
    )
    return InvalidRequest(message, param=param, code=CONTEXT_TOO_LONG)


def tokenized(
    text: str | list[int],
    encode: Callable[[str | list[int]], tuple[int, ...]],
    fields: PromptFields,
    model: ServedModel,
    param: str,
) -> tuple[int, ...]:
    """The ids of a text, or of as much of it as can matter if it may be truncated. Blocks. Raises
    InvalidRequest for what cannot fit. encode: ids are as they are."""
    if fields.truncate_prompt_tokens is None:
        check_does_not_overflow(text, model, param)
        return encode(text)
    part = part_that_fits(text, model, param, fields.truncation_side)
    ids = encode(part)
    check_cut(ids, model, param, num_chars=len(text), num_kept=len(part))
    return ids


def check_together(num_tokens: int, num_prompts: int, param: str) -> None:
    """Raises InvalidRequest for prompts of one request that hold up the others: they become one
    message to the engine."""
    if num_prompts > 1 and num_tokens > MAX_TOKENS_TOGETHER:
        message = (
            f"{param} has more than {MAX_TOKENS_TOGETHER} tokens in all of its texts together; "
            "send several requests"
        )
        raise InvalidRequest(message, param=param, code=CONTEXT_TOO_LONG)


def tokenized_together(
    prompts: Iterable[tuple[str, str | list[int]]],
    encode: Callable[[str | list[int]], tuple[int, ...]],
    fields: PromptFields,
    model: ServedModel,
) -> list[tuple[int, ...]]:
    """As `tokenized`, for each param and its text. Also raises what `check_together` does."""
    together, num_tokens = [], 0
    for param, text in prompts:
        own = fields.fields_of(param)
        ids, most = tokenized(text, encode, own, model, param), own.truncate_prompt_tokens or -1
        together.append(ids)
        num_tokens += min(len(ids), model.max_model_len if most < 0 else most)
        check_together(num_tokens, len(together), param.partition("[")[0])
    return together


def is_counted(text: str) -> bool:
    """Whether a text is tokenized for a client that only counts, also where the context could not
    hold it: not so long that it holds up others."""
    return len(text) <= MAX_COUNTED_CHARS


def check_does_not_overflow(text: str | list[int], model: ServedModel, param: str) -> None:
    """Raises InvalidRequest for a long text that has too many tokens, before it is tokenized as a
    whole: that would take a hundred times its memory, and then all threads would wait until a list
    of millions of ids is made. Blocks."""
    if not isinstance(text, str):
        return
    could_fit = len(text) <= _USUAL_TOKEN_CHARS * model.max_model_len
    if not could_fit and _num_chars_beyond(text, model) < len(text):
        raise _too_many("characters", len(text), model, param)


def part_that_fits(text: Text, model: ServedModel, param: str, side: str | None) -> Text:
    """The end of a text that is truncated to some of its last tokens: all that can matter of it.

    side: where tokens are dropped; "right" keeps the beginning. What is not text, or is short, is
    returned as it is. The rest of a long text is cut off between two words, where no token spans,
    and so far from the kept tokens that the context holds no more tokens than remain: so their ids
    are those that the whole text has. Raises InvalidRequest for a long text without such a place.
    See also `check_cut`. Blocks.
    """
    if not isinstance(text, str) or len(text) <= 2 * _piece_chars(model):
        return text
    is_right = side == "right"
    num_kept = _num_chars_beyond(text, model, from_end=not is_right)
    first = num_kept if is_right else max(0, len(text) - num_kept - _piece_chars(model))
    end = len(text) - num_kept if not is_right else first + _piece_chars(model)
    between = _BETWEEN_WORDS.search(text, first, end)
    if between is None or num_kept == len(text):
        if len(text) > 2 * model.max_prompt_chars:
            check_could_fit(model, param, num_chars=len(text))
        return text
    return text[: between.start()] if is_right else text[between.start() :]


def _num_chars_beyond(text: str, model: ServedModel, *, from_end: bool = False) -> int:
    """How many characters from one end certainly have more tokens than the context; all if none
    do. Counted in pieces, each of which may have ends that are one token in the whole text."""
    encoder, size, piece_chars = model.encoder, len(text), _piece_chars(model)
    num_left, num_chars = model.max_model_len, 0
    while num_left >= 0 and num_chars < size:
        end = min(num_chars + piece_chars, size)
        piece = text[size - end : size - num_chars] if from_end else text[num_chars:end]
        num_left -= max(0, encoder.count(piece) - encoder.max_token_chars)
        num_chars = end
    return num_chars if num_left < 0 else size


def _piece_chars(model: ServedModel) -> int:
    return min(_PIECE_CHARS, model.max_prompt_chars)


def check_cut(
    ids: tuple[int, ...], model: ServedModel, param: str, *, num_chars: int, num_kept: int
) -> None:
    """Raises InvalidRequest if a text that `part_that_fits` cut has fewer tokens than expected.

    A tokenizer may make one token of any number of characters that it does not know. num_chars,
    num_kept: of the text, before and after.
    """
    if num_kept < num_chars and len(ids) <= model.max_model_len:
        check_could_fit(model, param, num_chars=num_chars)


def fit(
    prompts: list[tuple[int, ...]], fields: GenerationFields, model: ServedModel, param: str
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The prompts, truncated where the client wants that, and max_tokens for each. param: the field
    that they come from. Raises InvalidRequest."""
    check_fields(fields, model)
    limit, vocab_size, wanted = model.max_model_len, model.info.vocab_size, fields.wanted_max_tokens
    # `truncate_prompt_tokens: -1` stands for it: room is left for max_tokens.
    max_kept = max(1, limit - (1 if wanted is None else wanted))
    num_kept, side = fields.truncate_prompt_tokens, fields.truncation_side
    kept = [truncated(prompt, num_kept, max_kept, side) for prompt in prompts]
    # A prompt that is too long is not looked at any closer; an empty prompt is never too long.
    cuts = fields.cuts_max_tokens
    max_tokens = tuple(_max_tokens(wanted, len(prompt), limit, param, cuts) for prompt in kept)
    for prompt in kept:
        check_prompt(prompt, vocab_size, param)
    return tuple(kept), max_tokens


def truncated(
    prompt: tuple[int, ...], num_kept: int | None, max_kept: int, side: str | None = None
) -> tuple[int, ...]:
    """The last tokens of a prompt whose client prefers truncation to an error.

    num_kept: its `truncate_prompt_tokens`; -1 stands for max_kept, None for the whole prompt.
    side: where tokens are dropped; "right" keeps the first ones.
    """
    if num_kept is None:
        return prompt
    num_kept = max_kept if num_kept < 0 else num_kept
    return prompt[:num_kept] if side == "right" else prompt[-num_kept:]


def check_prompt(
    prompt: tuple[int, ...], vocab_size: int, param: str, hint: str = "send the text"
) -> None:
    """hint: what a client does whose ids are those of another model's tokenizer."""
    if not prompt:
        message = f"{param} is empty; the model needs at least one token to continue"
        raise InvalidRequest(message, param=param)
    if (highest := max(prompt)) >= vocab_size:
        raise unknown_id(param, [highest], vocab_size, f"; if they are another model's, {hint}")


def check_fields(fields: GenerationFields, model: ServedModel) -> None:
    """Checks the fields against this model, as far as that needs no prompt."""
    for param in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        vocab_size = model.info.vocab_size
        if unknown := [i for i in getattr(fields, param) or () if not 0 <= i < vocab_size]:
            raise unknown_id(param, unknown, vocab_size)


def unknown_id(param: str, token_ids: list[int], vocab_size: int, hint: str = "") -> InvalidRequest:
    message = (
        f"{param} has {listed('token id', token_ids)}; this model's ids range from 0 to "
        f"{vocab_size - 1}{hint}"
    )
    return InvalidRequest(message, param=param)


def _max_tokens(wanted: int | None, num_prompt: int, limit: int, param: str, cuts: bool) -> int:
    """A default is reduced to what fits; a value that the client set must fit, unless `cuts`."""
    room = limit - num_prompt
    has_answer = wanted != 0
    if room < has_answer:
        error = PromptTooLong(num_prompt, limit, has_answer=has_answer)
        raise too_long(error, param, n_prompt_tokens=num_prompt, n_ctx=limit)
    if wanted is None:
        return min(room, _COMPLETION_MAX_TOKENS) if param == "prompt" else room
    if wanted > room and cuts:
        return room
    if wanted > room:
        context_error = ContextTooLong(num_prompt, wanted, limit)
        raise too_long(context_error, param, n_prompt_tokens=num_prompt, n_ctx=limit)
    return wanted


def too_long(error: PenstockError, param: str, **counts: int) -> InvalidRequest:
    """counts: under llama.cpp's names."""
    details = tuple(counts.items())
    return InvalidRequest(str(error), param=param, code=CONTEXT_TOO_LONG, details=details)
