"""A conversation sends what the server really said."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.loadtest.report.report import ReportConfig, RequestResult
from penstock.loadtest.workload.config import PromptFormat
from penstock.loadtest.workload.workload import TimedRequest, make_requests
from tests.bench.in_turns.cases import parse_cases
from tests.bench.in_turns.conversations import converse, summarize_turns


@dataclass
class Target:
    """Answers at once with a text of its own for each request; fails those that `fails` names."""

    fails: tuple[int, ...] = ()
    prompts: dict[int, list[int] | str] = field(default_factory=dict)
    num_open: int = 0
    most_open: int = 0

    def encode(self, request: TimedRequest) -> bytes:
        return b""

    async def send(self, request: TimedRequest, encoded: bytes, due_s: float) -> RequestResult:
        self.prompts[request.index] = request.prompt
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0)
        self.num_open -= 1
        turn = request.index % 3
        return RequestResult(
            index=request.index,
            scheduled_s=due_s,
            sent_s=due_s,
            ended_s=due_s + 2,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=2,
            arrivals_s=[due_s + (1, 0.1, 0.3)[turn], due_s + 2],
            text=f"said {request.index}",
            error="it died" if request.index in self.fails else None,
        )


def encode(text: str) -> list[int]:
    """One more than were generated."""
    return [1000, int(text.removeprefix("said ")), 2000]


def conversing(target: Any, form: PromptFormat = PromptFormat.IDS) -> Any:
    """Four conversations of three turns, two at a time."""
    (case,) = parse_cases("4x2@2:turns=3:n=4")
    requests = make_requests(case.workload(3, form))
    turns = [requests[first : first + 3] for first in range(0, 12, 3)]
    encoder = encode if form is PromptFormat.IDS else None
    return turns, asyncio.run(converse(target, turns, encoder, max_concurrency=2))


def test_a_turn_sends_all_before_it_with_what_the_server_said() -> None:
    """Its two tokens, of the three that the text has."""
    target = Target()
    conversations, (observed, by_turn) = conversing(target)
    assert target.most_open == 2
    assert len(observed.completed) == 12 and [len(each) for each in by_turn] == [4, 4, 4]
    for first, second, third in conversations:
        two = [*first.prompt, 1000, first.index, *second.prompt]
        assert target.prompts[first.index] == first.prompt
        assert target.prompts[second.index] == two
        assert target.prompts[third.index] == [*two, 1000, second.index, *third.prompt]


def test_a_text_is_continued_as_text() -> None:
    target = Target()
    conversations, _ = conversing(target, PromptFormat.TEXT)
    first, second, _ = conversations[0]
    assert target.prompts[second.index] == f"{first.prompt}said {first.index} {second.prompt}"


def test_a_conversation_ends_with_a_turn_that_fails_and_the_others_go_on() -> None:
    target = Target(fails=(1,))
    _, (observed, by_turn) = conversing(target)
    assert [each.error for each in observed.failed] == ["it died"]
    assert [len(each) for each in by_turn] == [4, 4, 3]


def test_ttft_is_that_of_the_turns_after_the_first_and_tokens_are_those_of_all() -> None:
    _, (observed, by_turn) = conversing(Target())
    summary = summarize_turns(observed, by_turn, ReportConfig(percentiles=(50.0,)))
    assert summary["mean_ttft_ms"] == pytest.approx(200)
    assert [turn["median_ttft_ms"] for turn in summary["turns"]] == pytest.approx([1000, 100, 300])
    assert [turn["input_tokens"] for turn in summary["turns"]] == [4, 10, 16]
    assert summary["total_output_tokens"] == 24
