"""What a conversation of six turns shows of each server, and what is told of it."""

from typing import Any

from tests.bench.in_turns.machine import CpuUse
from tests.bench.in_turns.rounds import Measurement
from tests.bench.server.six_turns import MOST_LOST, turns_table, wasted


def measured(server: str, number: int, *turns: tuple[float, float, float]) -> Measurement:
    """turns: tokens of the prompt, how many were cached, and TTFT in ms."""
    keys = ("input_tokens", "cached_input_tokens", "median_ttft_ms")
    summary: dict[str, Any] = {"turns": [dict(zip(keys, turn, strict=True)) for turn in turns]}
    cpu = CpuUse(server=1.0, client=0.0, others=0.0, stolen=0.0, processes={})
    return Measurement(round=number, server=server, case="c", summary=summary, cpu=cpu)


def test_a_row_has_what_was_added_and_what_each_server_computed_of_it() -> None:
    lines = turns_table(
        [
            measured("penstock", 1, (100, 0, 50), (220, 112, 40)),
            measured("llama", 1, (100, 0, 60), (220, 0, 130)),
            measured("llama", 2, (100, 0, 70), (220, 0, 150)),
            measured("penstock", 2, (100, 0, 54), (220, 112, 44)),
        ]
    )
    assert [line.split() for line in lines[1:]] == [
        ["1", "100", "100", "100", "52", "100", "65"],
        ["2", "220", "120", "108", "42", "220", "140"],
    ]


def test_computing_what_was_said_before_again_is_told_of_penstock_alone() -> None:
    few = measured("penstock", 1, (100, 0, 1), (220, 100 - MOST_LOST, 1))
    peer = measured("llama", 1, (100, 0, 1), (220, 0, 1))
    assert wasted([few, peer]) == ""
    more = measured("penstock", 1, (100, 0, 1), (220, 100 - MOST_LOST - 1, 1))
    assert wasted([more, peer]) == "153 of 120 tokens in turn 2"
    assert wasted([peer]) == "" and turns_table([]) == []
