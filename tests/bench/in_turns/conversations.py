"""Conversations with one server: each turn sends all that was said before, and something new.

What the server said is its own text: an id-prompt has the ids that a tokenizer makes of it, at most
as many as were generated, so that all servers get as much to read. (Random models generate bytes
that are no characters, whose text may have thirty times as many tokens.) There is no pause for a
person to read or to type.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from penstock.loadtest.bench.http_target import HttpTarget
from penstock.loadtest.report.report import Replay, ReportConfig, RequestResult, Summary, summarize
from penstock.loadtest.workload.workload import TimedRequest
from tests.bench.in_turns.cases import Conversations

# The token ids of a text, without special tokens.
Encoder: TypeAlias = Callable[[str], list[int]]
# By turn, from the first.
Results: TypeAlias = list[list[RequestResult]]


async def converse(
    target: HttpTarget,
    conversations: Conversations,
    encode: Encoder | None,
    *,
    max_concurrency: int,
) -> tuple[Replay, Results]:
    """So many conversations at a time; one whose turn fails ends with it.

    encode: needed where prompts are ids.
    """
    by_turn: Results = [[] for _ in max(conversations, key=len)]
    waiting = iter(conversations)

    async def stream() -> None:
        for turns in waiting:
            await _converse(target, turns, encode, by_turn)

    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(max_concurrency):
            tasks.create_task(stream())
    duration_s = time.perf_counter() - start_s
    observed = Replay(
        results=[result for results in by_turn for result in results],
        duration_s=duration_s,
        client_cpu_share=(time.process_time() - cpu_start_s) / duration_s,
    )
    return observed, by_turn


async def _converse(
    target: HttpTarget, turns: list[TimedRequest], encode: Encoder | None, by_turn: Results
) -> None:
    said: list[int] | str | None = None
    for turn, results in zip(turns, by_turn, strict=False):
        request = turn if said is None else _continued(turn, said)
        encoded = target.encode(request)
        result = await target.send(request, encoded, time.perf_counter())
        results.append(result)
        if result.error is not None:
            return
        said = _with_answer(request.prompt, result, encode)


def _continued(turn: TimedRequest, said: list[int] | str) -> TimedRequest:
    new = turn.prompt
    if isinstance(new, str):
        assert isinstance(said, str), said
        prompt: list[int] | str = f"{said} {new}"
    else:
        assert isinstance(said, list), said
        prompt = [*said, *new]
    num_tokens = turn.num_prompt_tokens if isinstance(prompt, str) else len(prompt)
    return replace(turn, prompt=prompt, num_prompt_tokens=num_tokens)


def _with_answer(
    prompt: list[int] | str, answer: RequestResult, encode: Encoder | None
) -> list[int] | str:
    if isinstance(prompt, str):
        return prompt + answer.text
    assert encode is not None, "id-prompts need a tokenizer"
    return [*prompt, *encode(answer.text)[: answer.num_output_tokens]]


def summarize_turns(observed: Replay, by_turn: Results, config: ReportConfig) -> Summary:
    """Of all turns, but for TTFT: that of the turns after the first.

    The median TTFT and prompt length of each turn are in `turns`.
    """
    later = [result for results in by_turn[1:] for result in results]
    summary = summarize(observed, config)
    of_later = summarize(replace(observed, results=later), config) if later else summary
    return (
        summary
        | {key: value for key, value in of_later.items() if "_ttft_" in key}
        | {"turns": [*_of_each(observed, by_turn, config)]}
    )


def _of_each(observed: Replay, by_turn: Results, config: ReportConfig) -> Iterator[Summary]:
    for results in by_turn:
        summary = summarize(replace(observed, results=results), config)
        yield {
            "median_ttft_ms": summary["median_ttft_ms"],
            "input_tokens": summary["total_input_tokens"] / len(results),
            "cached_input_tokens": summary["total_cached_input_tokens"] / len(results),
        }
