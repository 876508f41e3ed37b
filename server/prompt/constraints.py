"""The form of an answer: the grammar that it follows, and the reader of its parts."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.output.parts import AnswerReader
from penstock.server.output.reasoning import ReasoningState
from penstock.server.prompt.model import ServedModel
from penstock.server.structured.constraint import check_grammar
from penstock.server.structured.grammar import (
    NO_TEXTS,
    Calls,
    Content,
    FreeText,
    ReasoningBlock,
    grammar_text,
)
from penstock.server.tools.answer_reader import reader_factory
from penstock.server.tools.call_syntax import call_syntax, check_alternative
from penstock.server.tools.rules import AnswerRules

_BUDGET = "thinking_token_budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """grammar: in llguidance's notation; None for any text. grammar_bytes: what it takes in memory
    once it is compiled. bans_texts: it forbids what the rules ban. make_reader, markup: see
    `GenerationRequest`."""

    grammar: str | None = None
    grammar_bytes: int = 0
    bans_texts: bool = False
    make_reader: Callable[[], AnswerReader] | None = None
    markup: Mapping[int, str] = field(default_factory=dict)


async def constrain(
    rules: AnswerRules, reasoning: ReasoningState | None, model: ServedModel, client: str = ""
) -> AnswerFormat:
    """Compiles the grammar, if there is one, when it is this client's turn.

    reasoning: how the answer's reasoning is marked, if it may have any. Raises InvalidRequest,
    whose `param` is its field, and GrammarQueueFull.
    """
    content, calls, param = None, None, _BUDGET
    if rules.constraint or rules.calls.must_call:
        content, calls = await asyncio.to_thread(_content_and_calls, rules, model)
        param = rules.constraint.param if rules.constraint and content else "tools"
    is_free = content is None and calls is None
    if rules.banned.any_case and not is_free:
        message = f"banned_strings cannot be combined with {param}, which sets the answer's form"
        raise InvalidRequest(message, param="banned_strings")
    block = None
    if rules.thinking_budget is not None or not is_free:
        block = _reasoning_block(rules.thinking_budget, reasoning, model)
        reasoning = reasoning if block or is_free else None
    form = model.chat_format
    make_reader = reader_factory(rules.calls, calls, form.tools, reasoning)
    markup = model.encoder.vocabulary.special_among(form.markup) if make_reader else {}
    # A reader sees that texts end there; to others they are nothing, and the text goes on.
    bans_texts = is_free and any(rules.banned)
    seen = model.encoder.vocabulary.special_among(form.call_markup) if block else markup
    free = FreeText(rules.banned if bans_texts else NO_TEXTS, tuple(seen))
    grammar = grammar_text(content, calls, block, free)
    param = "bad_words" if bans_texts and block is None else param
    num_bytes = 0
    if grammar is not None and model.grammars:
        num_bytes = await check_grammar(model.grammars, grammar, param, client)
    return AnswerFormat(
        grammar=grammar,
        grammar_bytes=num_bytes,
        bans_texts=bans_texts,
        make_reader=make_reader,
        markup=markup,
    )


def _content_and_calls(
    rules: AnswerRules, model: ServedModel
) -> tuple[Content | None, Calls | Content | None]:
    """Reads what the answer must be, and the calls that must, or may, stand in its place."""
    content = rules.constraint.build() if rules.constraint else None
    if not rules.calls.functions:
        return content, None
    form = model.chat_format
    special = model.encoder.vocabulary.special_among(form.call_markup)
    token_ids = {text: token_id for token_id, text in special.items()}
    calls = call_syntax(rules.calls, form.tools, token_ids)
    if rules.calls.must_call:
        return None, calls
    if content:
        check_alternative(content)
    return content, calls


def _reasoning_block(
    budget: int | None, reasoning: ReasoningState | None, model: ServedModel
) -> ReasoningBlock | None:
    """None where no reasoning can precede the answer, or no grammar can describe it: where a
    model's markers neither are nor begin with special tokens.

    Raises UnsupportedParameter if the budget cannot be enforced.
    """
    vocabulary, form = model.encoder.vocabulary, model.chat_format
    token_ids: dict[str, int] = {}
    if reasoning:
        token_ids = {text: i for i, text in vocabulary.special_among(form.markup).items()}
        token_ids |= model.encoder.ids_of_tokens(filter(None, reasoning.markers))
    has_markers = reasoning is not None and all(
        marker.startswith(tuple(token_ids))
        for marker in (reasoning.markers.opening, reasoning.markers.closing)
    )
    if budget is not None and reasoning is None:
        hint = "this model's answers have no reasoning that the server can separate; leave it out"
        raise UnsupportedParameter(_BUDGET, hint)
    if budget is not None and not has_markers:
        hint = "this model's reasoning markers are not special tokens; leave it out"
        raise UnsupportedParameter(_BUDGET, hint)
    if reasoning is None or reasoning.is_closed or not has_markers:
        return None
    return ReasoningBlock(state=reasoning, token_ids=token_ids, max_tokens=budget)
