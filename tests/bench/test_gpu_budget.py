"""What nine minutes on a GPU reach, by the durations that an H200 has measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu.goals import GOALS, LLAMA, QWEN, SMALL, Goal
from tests.bench.gpu.parts import PARTS, Part

_ROWS = Path(__file__).with_name("gpu") / "measured_h200.jsonl"
# loadtest/LOG.md: what Triton compiles is 20 s of each start where nothing was carried along. The
# tests had 103 s, 8 processes at once, and did not come to their end.
_START_S, _TESTS_S = 20.0, 103.0
NINE_MINUTES_S = 540.0
_OF_MODELS = {LLAMA: "llama", SMALL: "small"}


def part_of(goal: Goal) -> str:
    """Which part prints the goal's row."""
    part, model = goal.row["part"], goal.row["model"]
    if part in ("decode", "ttft"):
        return f"goals-{_OF_MODELS[model]}"
    if part == "offline":
        return f"offline-{_OF_MODELS[model]}"
    return "goals-attention" if part == "kernel" else str(part)


def measured_s() -> dict[str, float]:
    """Of each part of which an H200 has measured more than single steps, with a slow start."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in _ROWS.read_text().splitlines()]
    found = {"tests": _TESTS_S}
    for row in rows:
        if row["part"] == "offline":
            found[f"offline-{_OF_MODELS[row['model']]}"] = row["seconds"] + _START_S
        if row["part"] == "http" and row["model"] == QWEN:
            found["http"] = row["streams"] * 1024 / row["tokens_per_s"] + _START_S
    return found


def ended(durations_s: dict[str, float], seconds: float = NINE_MINUTES_S) -> dict[str, float]:
    """When each part came to its end, of those that did, in a suite whose parts take so long."""
    now_s, found = 0.0, {}
    for number, part in enumerate(PARTS, 1):
        allowed_s = part.allowed_s(PARTS[number:], seconds - now_s)
        now_s += max(0.0, min(durations_s[part.name], allowed_s))
        if durations_s[part.name] <= allowed_s:
            found[part.name] = now_s
    return found


ESTIMATES_S = {part.name: float(part.estimate_s) for part in PARTS}
OF_GOALS = list(dict.fromkeys(part_of(goal) for goal in GOALS))


def test_no_estimate_is_below_what_was_measured() -> None:
    measured = measured_s()
    assert set(measured) == {"tests", "offline-small", "offline-llama", "http"}
    assert {name for name, seconds in measured.items() if seconds > ESTIMATES_S[name]} == set()


def test_parts_of_goals_come_in_the_order_of_the_goals_and_keep_their_time() -> None:
    names = [part.name for part in PARTS if part.for_goals]
    assert names == ["probe", "device", "compile", *OF_GOALS]


def test_nine_minutes_reach_the_row_of_every_goal_and_then_the_tests() -> None:
    reached = ended(ESTIMATES_S | measured_s())
    assert set(OF_GOALS) < set(reached) and "tests" in reached
    times = [reached[name] for name in OF_GOALS]
    assert times == sorted(times) and times[-1] < 6.5 * 60


@pytest.mark.parametrize("hangs", PARTS[:11], ids=lambda part: part.name)
def test_a_part_that_hangs_loses_no_other_goal(hangs: Part) -> None:
    reached = ended(ESTIMATES_S | {hangs.name: 3600.0})
    assert set(OF_GOALS) - set(reached) == {hangs.name} & set(OF_GOALS)


def test_less_time_reaches_the_goals_that_are_worth_most() -> None:
    reached = [name for name in OF_GOALS if name in ended(ESTIMATES_S, seconds=210)]
    assert reached == OF_GOALS[:3]


def test_where_all_takes_longer_the_tests_are_cut_off_and_no_goal() -> None:
    reached = ended({name: 1.4 * seconds for name, seconds in ESTIMATES_S.items()})
    assert set(OF_GOALS) <= set(reached) and "tests" not in reached
