"""`truncation: auto` of /v1/responses: which items of a long conversation are dropped."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.server.errors import InvalidRequest

Item = dict[str, Any]
T = TypeVar("T")


async def with_what_fits(
    past: list[Item], items: list[Item], render: Callable[[list[Item], list[Item]], Awaitable[T]]
) -> T:
    """The result of `render` for the conversation with the fewest items dropped that fits.

    past, items: of earlier responses and of this request. render: raises InvalidRequest with the
    code context_length_exceeded for what does not fit. So does this if the last question alone is
    too long.
    """
    whole = past + items
    units = droppable(whole)

    async def render_without(num_dropped: int) -> T:
        dropped = frozenset[int]().union(*units[:num_dropped])
        kept_past = [item for i, item in enumerate(past) if i not in dropped]
        kept = [item for i, item in enumerate(items, len(past)) if i not in dropped]
        return await render(kept_past, kept)

    try:
        return await render_without(0)
    except InvalidRequest as error:
        if not _is_too_long(error) or not units:
            raise
    low, high = 1, len(units)
    best = await render_without(high)
    while low < high:
        middle = (low + high) // 2
        try:
            best = await render_without(middle)
            high = middle
        except InvalidRequest as error:
            if not _is_too_long(error):
                raise
            low = middle + 1
    return best


def _is_too_long(error: InvalidRequest) -> bool:
    return error.code == "context_length_exceeded"


def droppable(items: list[Item]) -> list[frozenset[int]]:
    """What may be dropped, in this order: turns before the last question, then steps since it.

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
