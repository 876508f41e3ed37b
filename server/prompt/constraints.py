"""What an answer must follow, and how it is read: a grammar, and the reader of its parts."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.server.output.parts import AnswerReader
from penstock.server.output.reasoning import ReasoningState, make_splitter
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.prompts import Prompts
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.openai import GenerationFields
from penstock.server.structured.constraint import check_grammar
from penstock.server.structured.reasoning_grammar import (
    BUDGET_FIELD,
    check_budget,
    has_marker_tokens,
    in_final_message,
    with_reasoning,
)
from penstock.server.tools.answer_reader import make_reader
from penstock.server.tools.call_grammar import call_grammar, calls_or_answer, uses_native_format


class Grammar(NamedTuple):
    """In llguidance's notation. param: the field of the request that it comes from."""

    text: str
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """grammar None: any text. grammar_bytes: what it takes in memory once it is compiled.
    make_reader, markup: see `GenerationRequest`."""

    grammar: Grammar | None = None
    grammar_bytes: int = 0
    make_reader: Callable[[], AnswerReader] | None = None
    markup: Mapping[int, str] = field(default_factory=dict)


async def constrain(
    fields: GenerationFields, prompts: Prompts, model: ServedModel, client: str = ""
) -> AnswerFormat:
    """Compiles the grammar, if there is one, when it is this client's turn.

    Raises InvalidRequest, whose `param` is its field, and GrammarQueueFull.
    """
    grammar = await _answer_grammar(fields)
    if not isinstance(fields, ChatCompletionRequest):
        return AnswerFormat(grammar=grammar, grammar_bytes=await _check(grammar, model, client))
    grammar = await _with_calls(grammar, fields, model)
    grammar, reasoning = _with_reasoning(grammar, fields, prompts.reasoning, model)
    num_bytes = await _check(grammar, model, client)
    if make_reader(fields, model.chat_format, make_splitter(reasoning)) is None:
        return AnswerFormat(grammar=grammar, grammar_bytes=num_bytes)

    def make_answer_reader() -> AnswerReader:
        reader = make_reader(fields, model.chat_format, make_splitter(reasoning))
        assert reader, "the answer has parts"
        return reader

    markup = model.encoder.vocabulary.special_among(model.chat_format.markup)
    return AnswerFormat(
        grammar=grammar, grammar_bytes=num_bytes, make_reader=make_answer_reader, markup=markup
    )


async def _answer_grammar(fields: GenerationFields) -> Grammar | None:
    """From response_format, structured_outputs and the like."""
    constraint = fields.constraint
    if constraint is None:
        return None
    return Grammar(await asyncio.to_thread(constraint.build), constraint.param)


async def _with_calls(
    grammar: Grammar | None, fields: ChatCompletionRequest, model: ServedModel
) -> Grammar | None:
    """A call where one is required; a call or the answer's format where one is allowed."""
    if not fields.functions or not (fields.must_call or grammar):
        return grammar
    marks = model.encoder.vocabulary.special_among(model.chat_format.call_markup)
    special = {text: token_id for token_id, text in marks.items()}
    calls = await asyncio.to_thread(call_grammar, fields, model.chat_format.tools, special)
    if grammar is None or fields.must_call:
        return Grammar(calls, "tools")
    return Grammar(calls_or_answer(calls, grammar.text), grammar.param)


def _with_reasoning(
    grammar: Grammar | None,
    fields: ChatCompletionRequest,
    reasoning: ReasoningState | None,
    model: ServedModel,
) -> tuple[Grammar | None, ReasoningState | None]:
    """Lets reasoning precede what the grammar allows, and ends it where its budget is spent.

    Also returns the reasoning that the answer then may have. Raises UnsupportedParameter.
    """
    budget = fields.thinking_budget
    if grammar is None and budget is None:
        return None, reasoning
    special = model.encoder.vocabulary.special_among(model.chat_format.markup)
    token_ids = {text: token_id for token_id, text in special.items()}
    if reasoning:
        token_ids |= model.encoder.ids_of_tokens(filter(None, reasoning.markers))
    check_budget(reasoning, token_ids, budget)
    is_native_call = fields.must_call and not fields.raw_call
    if grammar and not (is_native_call and uses_native_format(model.chat_format.tools, fields)):
        grammar = grammar._replace(text=in_final_message(grammar.text, reasoning, token_ids))
    if not reasoning or reasoning.is_closed or not has_marker_tokens(reasoning, token_ids):
        return grammar, reasoning if grammar is None else None
    markup_ids = tuple(model.encoder.vocabulary.special_among(model.chat_format.call_markup))
    answer = grammar.text if grammar else None
    text = with_reasoning(answer, reasoning, token_ids, markup_ids, budget)
    assert text is not None, "reasoning that is not closed has a grammar"
    return Grammar(text, grammar.param if grammar else BUDGET_FIELD), reasoning


async def _check(grammar: Grammar | None, model: ServedModel, client: str) -> int:
    """The bytes of the compiled grammar."""
    if not grammar or not model.grammars:
        return 0
    return await check_grammar(model.grammars, grammar.text, grammar.param, client)
