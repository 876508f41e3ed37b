"""When an answer counts as a loop, against its definition in plain Python."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.output.loops import LoopDetector, LoopRule


def loops(rule: LoopRule, ids: list[int]) -> bool:
    """Whether the last tokens are copies of a block, as `LoopRule` has it."""
    for size in range(max(1, rule.min_size), rule.max_size + 1):
        num_copied = max(rule.min_tokens, size * rule.min_count)
        tail = ids[-num_copied:]
        if len(tail) == num_copied and all(a == b for a, b in zip(tail, tail[size:], strict=False)):
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(
    before=st.lists(st.integers(0, 2), max_size=12),
    block=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    copies=st.integers(0, 8),
    rule=st.builds(
        LoopRule, st.integers(1, 3), st.integers(3, 6), st.integers(2, 4), st.integers(0, 9)
    ),
)
def test_an_answer_loops_at_the_first_token_that_completes_the_copies(
    before: list[int], block: list[int], copies: int, rule: LoopRule
) -> None:
    detector = LoopDetector(rule)
    ids: list[int] = []
    for token_id in before + block * copies:
        ids.append(token_id)
        assert detector.feed(token_id) == loops(rule, ids), ids


@pytest.mark.parametrize(("num_tokens", "expected"), [(31, False), (32, True)])
def test_a_short_run_of_one_token_is_no_loop(num_tokens: int, expected: bool) -> None:
    detector = LoopDetector(LoopRule(1, 256, 4, 32))
    assert any(detector.feed(5) for _ in range(num_tokens)) == expected
