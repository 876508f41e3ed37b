"""Thoughts before an answer that a grammar holds, and an end for those that cost too much.

The markers are tokens of their own in models that think, so text cannot be mistaken for them: the
thoughts are any text up to the closing one. Where a model's markers are no tokens, neither can be
done.
"""

from collections.abc import Mapping

from penstock.server.errors import UnsupportedParameter
from penstock.server.output.reasoning import Thoughts
from penstock.server.structured.lark import ANY_TEXT, nested

BUDGET_FIELD = "thinking_token_budget"


def leaves_room(thoughts: Thoughts | None, token_ids: Mapping[str, int]) -> bool:
    """Whether a grammar can have these thoughts before it. token_ids: of those markers that are
    tokens."""
    return thoughts is not None and all(marker in token_ids for marker in thoughts.markers)


def with_thoughts(
    grammar: str | None,
    thoughts: Thoughts,
    token_ids: Mapping[str, int],
    markup_ids: tuple[int, ...],
    max_tokens: int | None,
) -> str | None:
    """What comes behind the thoughts, held to `grammar`, or any text and `markup_ids` without one.

    max_tokens: of the thoughts. With it a model that may think does, so that it can be counted.
    Raises UnsupportedParameter.
    """
    opening, closing = (f"<[{token_ids[marker]}]>" for marker in thoughts.markers)
    if thoughts.is_closed:
        return grammar
    limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
    begins = "" if thoughts.is_open else opening
    thinks = f"{begins} thoughts {closing}"
    rules = [f"thoughts{limit}: {ANY_TEXT}"]
    if grammar is None:
        rules.append(f"answer: ({' | '.join([ANY_TEXT, *(f'<[{i}]>' for i in markup_ids)])})*")
        return nested("\n".join([f"start: {thinks} answer", *rules]), {})
    space = r"/\n{0,2}/"
    is_sure = thoughts.is_open or max_tokens is not None
    before = f"{thinks} {space}" if is_sure else f"({thinks} {space})?"
    return nested("\n".join([f"start: {before} @answer", *rules]), {"answer": grammar})


def check_budget(
    thoughts: Thoughts | None, token_ids: Mapping[str, int], budget: int | None
) -> None:
    """Raises UnsupportedParameter where a budget could not be kept."""
    if budget is None:
        return
    if thoughts is None:
        hint = "this model's answers have no thoughts that the server could tell; leave it out"
        raise UnsupportedParameter(BUDGET_FIELD, hint)
    if not leaves_room(thoughts, token_ids):
        hint = "the marks of this model's thoughts are no tokens of its own; leave it out"
        raise UnsupportedParameter(BUDGET_FIELD, hint)
