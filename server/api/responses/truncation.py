"""`truncation: auto` of /v1/responses: which items of a conversation go when it is too long."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.server.errors import InvalidRequest

Item = dict[str, Any]
T = TypeVar("T")


async def asked_with_what_fits(
    past: list[Item], items: list[Item], ask: Callable[[list[Item], list[Item]], Awaitable[T]]
) -> T:
    """The result of `ask` with the fewest items gone with which the prompt fits.

    past, items: of earlier responses and of this request. ask: raises InvalidRequest with the code
    context_length_exceeded for what does not fit. So does this where the last question alone is
    too long.
    """
    whole = past + items
    units = droppable(whole)

    async def ask_without(num_gone: int) -> T:
        gone = frozenset[int]().union(*units[:num_gone])
        kept_past = [item for i, item in enumerate(past) if i not in gone]
        kept = [item for i, item in enumerate(items, len(past)) if i not in gone]
        return await ask(kept_past, kept)

    try:
        return await ask_without(0)
    except InvalidRequest as error:
        if not _is_too_long(error) or not units:
            raise
    low, high = 1, len(units)
    best = await ask_without(high)
    while low < high:
        middle = (low + high) // 2
        try:
            best = await ask_without(middle)
            high = middle
        except InvalidRequest as error:
            if not _is_too_long(error):
                raise
            low = middle + 1
    return best


def _is_too_long(error: InvalidRequest) -> bool:
    return error.code == "context_length_exceeded"


def droppable(items: list[Item]) -> list[frozenset[int]]:
    """What may go, in that order: turns before the last question, then what was done about it.

    A call and its result go together. What systems and developers say stays, as do the last
    question and the last call.
    """
    last = max((i for i, item in enumerate(items) if _is_question(item)), default=0)
    units: list[list[int]] = []
    for i, item in enumerate(items[:last]):
        if _is_question(item) or not units:
            units.append([])
        if not _is_rule(item):
            units[-1].append(i)
    steps: list[list[int]] = [[]]
    for i in range(last + 1, len(items)):
        is_next = items[i].get("type") not in _OUTPUTS and _has_result(items, steps[-1])
        if is_next:
            steps.append([])
        if not _is_rule(items[i]):
            steps[-1].append(i)
    whole = [*units, *steps[:-1]]
    return [_with_results(items, unit) for unit in whole if unit]


_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def _is_question(item: Item) -> bool:
    return item.get("type", "message") == "message" and item.get("role") == "user"


def _is_rule(item: Item) -> bool:
    return item.get("role") in ("system", "developer")


def _has_result(items: list[Item], unit: list[int]) -> bool:
    return any(items[i].get("type") in _OUTPUTS for i in unit)


def _with_results(items: list[Item], unit: list[int]) -> frozenset[int]:
    """And the results of its calls, wherever they are."""
    calls = {items[i].get("call_id") for i in unit if str(items[i].get("type")).endswith("_call")}
    results = (
        i
        for i, item in enumerate(items)
        if item.get("type") in _OUTPUTS and item.get("call_id") in calls
    )
    return frozenset((*unit, *results))
