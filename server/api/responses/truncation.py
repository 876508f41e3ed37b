"""`truncation: auto` of /v1/responses: which items of a long conversation are dropped."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any, TypeVar

from penstock.server.errors import InvalidRequest

Item = dict[str, Any]
T = TypeVar("T")

# A conversation of so many takes a second to check, and is checked once for each try.
MAX_ITEMS = 1 << 14
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


async def with_what_fits(
    past: list[Item],
    items: list[Item],
    render: Callable[[list[Item], list[Item]], Awaitable[T]],
    *,
    max_messages: int,
) -> T:
    """The result of `render` for the conversation with the fewest items dropped that fits.

    past, items: of earlier responses and of this request. render: raises InvalidRequest with the
    code context_length_exceeded for what does not fit. So does this if the last question alone is
    too long. max_messages: conversations with more than this never fit, and are not rendered.
    """
    whole = past + items
    units = droppable(whole)
    dropped_with = {i: number for number, unit in enumerate(units) for i in unit}

    async def render_without(num_dropped: int) -> T:
        kept = [i for i in range(len(whole)) if dropped_with.get(i, num_dropped) >= num_dropped]
        num_past = bisect_left(kept, len(past))
        return await render(
            [whole[i] for i in kept[:num_past]], [whole[i] for i in kept[num_past:]]
        )

    return await _fewest(render_without, _least_dropped(whole, units, max_messages), len(units))


async def _fewest(render: Callable[[int], Awaitable[T]], low: int, high: int) -> T:
    """Renders with the fewest items dropped that fit, from low to high. Raises InvalidRequest."""
    try:
        return await render(low)
    except InvalidRequest as error:
        if not _is_too_long(error) or low == high:
            raise
    low += 1
    best = await render(high)
    while low < high:
        middle = (low + high) // 2
        try:
            best = await render(middle)
            high = middle
        except InvalidRequest as error:
            if not _is_too_long(error):
                raise
            low = middle + 1
    return best


def _least_dropped(items: list[Item], units: list[frozenset[int]], max_messages: int) -> int:
    """How many units at least are dropped. What users say and what tools return are messages of
    their own, while other items may share one."""
    num_items, num_messages = len(items), sum(map(_is_message, items))
    for number, unit in enumerate(units):
        if num_items <= MAX_ITEMS and num_messages <= max_messages:
            return number
        num_items -= len(unit)
        num_messages -= sum(_is_message(items[i]) for i in unit)
    return len(units)


def _is_message(item: Item) -> bool:
    return _is_question(item) or item.get("type") in _OUTPUTS


def _is_too_long(error: InvalidRequest) -> bool:
    return error.code == "context_length_exceeded"


def droppable(items: list[Item]) -> list[frozenset[int]]:
    """Returns what may be dropped, in this order: turns before the last question, then steps since
    it.

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
    has_result = False  # whether the last step does
    for i in range(last + 1, len(items)):
        is_result = items[i].get("type") in _OUTPUTS
        if has_result and not is_result:
            steps.append([])
            has_result = False
        if not _is_rule(items[i]):
            steps[-1].append(i)
            has_result |= is_result
    return _with_results(items, [unit for unit in (*units, *steps[:-1]) if unit])


def _is_question(item: Item) -> bool:
    return item.get("type", "message") == "message" and item.get("role") == "user"


def _is_rule(item: Item) -> bool:
    return item.get("role") in ("system", "developer")


def _with_results(items: list[Item], units: list[list[int]]) -> list[frozenset[int]]:
    """And the results of their calls, wherever they are. No item is in two units."""
    results: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        if item.get("type") in _OUTPUTS:
            results.setdefault(str(item.get("call_id")), []).append(i)
    taken: set[int] = set()
    whole = []
    for unit in units:
        calls = [items[i] for i in unit if str(items[i].get("type")).endswith("_call")]
        # Taken out: many calls may have the id of the same results.
        found = (results.pop(str(call.get("call_id")), ()) for call in calls)
        whole.append(frozenset(chain(unit, *found)) - taken)
        taken |= whole[-1]
    return whole
