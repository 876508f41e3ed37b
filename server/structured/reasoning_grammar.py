"""Reasoning before an answer that a grammar constrains, and the budget of reasoning tokens.

In reasoning models the markers are or begin with special tokens, which text cannot imitate: the
reasoning is any text up to the closing marker. Where a model's markers do not, neither is possible.
"""

from collections.abc import Mapping

from penstock.server.errors import UnsupportedParameter
from penstock.server.output.reasoning import ReasoningState
from penstock.server.structured.lark import ANY_TEXT, literal, nested, preceded

BUDGET_FIELD = "thinking_token_budget"


def has_marker_tokens(reasoning: ReasoningState | None, token_ids: Mapping[str, int]) -> bool:
    """Whether a grammar can describe the reasoning. token_ids: of the tokens in its markers."""
    if reasoning is None:
        return False
    markers = reasoning.markers.opening, reasoning.markers.closing
    return all(marker.startswith(tuple(token_ids)) for marker in markers)


def in_final_message(
    grammar: str, reasoning: ReasoningState | None, token_ids: Mapping[str, int]
) -> str:
    """The grammar of an answer, with what stands before one where answers are messages."""
    if reasoning is None or reasoning.is_closed or not reasoning.markers.answer:
        return grammar
    if not has_marker_tokens(reasoning, token_ids):
        return grammar
    before = literal(reasoning.markers.answer, token_ids)
    return nested(f"start: {before} @answer", {"answer": grammar})


def with_reasoning(
    grammar: str | None,
    reasoning: ReasoningState,
    token_ids: Mapping[str, int],
    markup_ids: tuple[int, ...],
    max_tokens: int | None,
) -> str | None:
    """Reasoning, followed by an answer in `grammar`, or by any text with `markup_ids` if None.

    max_tokens: of the reasoning. It makes a model that may reason do so, since only then can the
    tokens be counted.
    """
    markers = reasoning.markers
    opening, closing = literal(markers.opening, token_ids), literal(markers.closing, token_ids)
    if reasoning.is_closed:
        return grammar
    limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
    begin = "" if reasoning.is_open else opening
    block = f"{begin} reasoning {closing}"
    rules = [f"reasoning{limit}: {ANY_TEXT}"]
    if grammar is None:
        rules.append(f"answer: ({' | '.join([ANY_TEXT, *(f'<[{i}]>' for i in markup_ids)])})*")
        return nested("\n".join([f"start: {block} answer", *rules]), {})
    is_certain = reasoning.is_open or max_tokens is not None
    if markers.answer:  # it begins as the reasoning does
        return preceded(grammar, block if is_certain else f"({block})?", rules)
    space = r"/\n{0,2}/"
    before = f"{block} {space}" if is_certain else f"({block} {space})?"
    return nested("\n".join([f"start: {before} @answer", *rules]), {"answer": grammar})


def check_budget(
    reasoning: ReasoningState | None, token_ids: Mapping[str, int], budget: int | None
) -> None:
    """Raises UnsupportedParameter if the budget cannot be enforced."""
    if budget is None:
        return
    if reasoning is None:
        hint = "this model's answers have no reasoning that the server can separate; leave it out"
        raise UnsupportedParameter(BUDGET_FIELD, hint)
    if not has_marker_tokens(reasoning, token_ids):
        hint = "this model's reasoning markers are not special tokens; leave it out"
        raise UnsupportedParameter(BUDGET_FIELD, hint)
