"""Events as bytes, and what happens when the client disconnects."""

import asyncio
import json
from typing import Any, TypeVar

import pytest
from tokenizers import Tokenizer, decoders, models

from penstock.scheduler.types import TokenLogprobs
from penstock.server.api.common import unless_disconnected
from penstock.server.api.openai.chat_writer import ChatWriter
from penstock.server.api.openai.completion_writer import CompletionWriter
from penstock.server.api.openai.writer import Head, OpenAIWriter, error_event
from penstock.server.errors import InvalidRequest
from penstock.server.http.sse import begin
from penstock.server.output.delta import LogprobEntry, OutputDelta, Usage
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.openai import CompletionRequest, GenerationFields

TEXTS = [
    "plain",
    'quote " and \\ back',
    "line\nbreak\r\n\ttab",
    "\x00\x1f\x7f",
    "😀é\u2028",
    "\ufffd",
]


@pytest.fixture
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "ð": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer)


WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
Kind = TypeVar("Kind", bound=OpenAIWriter)


def writer(kind: type[Kind], vocabulary: Vocabulary, **options: Any) -> Kind:
    fields: GenerationFields
    if issubclass(kind, ChatWriter):
        chat = {"messages": [{"role": "user", "content": "a"}]}
        fields = ChatCompletionRequest.of(chat | options, num_bytes=0)
    else:
        fields = CompletionRequest.of({"prompt": "a"} | options, num_bytes=0)
    return kind(Head("id-1", 'a "model"', "fp"), vocabulary, fields)


def parsed(events: bytes) -> list[dict[str, object]]:
    """The JSON of each event; that each is one line is what SSE needs."""
    parts = events.removesuffix(b"\n\n").split(b"\n\n")
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_its_chunk(vocabulary: Vocabulary, text: str) -> None:
    events = writer(CompletionWriter, vocabulary).delta(OutputDelta(3, text, [], None))
    (chunk,) = parsed(events)
    assert chunk["model"] == 'a "model"'
    assert chunk["choices"] == [{"index": 3, "text": text, "logprobs": None, "finish_reason": None}]


def test_text_and_finish_are_two_events(vocabulary: Vocabulary) -> None:
    events = writer(ChatWriter, vocabulary).delta(OutputDelta(0, "end", [], "stop"))
    content, finish = (chunk["choices"] for chunk in parsed(events))
    blank = {"index": 0, "logprobs": None}
    assert content == [blank | {"delta": {"content": "end"}, "finish_reason": None}]
    end = {"finish_reason": "stop", "stop_reason": None, "matched_stop": None}
    assert finish == [blank | {"delta": {}} | end]


def test_chunks_have_a_null_usage_only_if_usage_was_requested(
    vocabulary: Vocabulary,
) -> None:
    delta = OutputDelta(0, "x", [], None)
    (silent,) = parsed(writer(ChatWriter, vocabulary).delta(delta))
    (explicit,) = parsed(writer(ChatWriter, vocabulary, **WITH_USAGE).delta(delta))
    assert "usage" not in silent and explicit["usage"] is None


def test_the_end_carries_the_usage_and_no_choice(vocabulary: Vocabulary) -> None:
    end = writer(ChatWriter, vocabulary, **WITH_USAGE).end(Usage(5, 7, 3))
    usage, done = end.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    chunk = json.loads(usage.removeprefix(b"data: "))
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_logprobs_hold_raw_bytes_and_no_infinity(vocabulary: Vocabulary) -> None:
    logprobs = TokenLogprobs(-1.5, ((0, -0.5), (1, float("-inf"))))
    delta = OutputDelta(0, "a", [LogprobEntry(1, logprobs, 0)], None)
    (chunk,) = parsed(writer(ChatWriter, vocabulary, logprobs=True, top_logprobs=2).delta(delta))
    assert chunk["choices"][0]["logprobs"]["content"] == [  # type: ignore[index]
        {
            "token": "\ufffd",
            "logprob": -1.5,
            "bytes": [0xF0],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xF0]},
            ],
        }
    ]


def test_completion_logprobs_name_the_sampled_token_besides_the_best(
    vocabulary: Vocabulary,
) -> None:
    entry = LogprobEntry(0, TokenLogprobs(-3.0, ((1, -0.1),)), 4)
    delta = OutputDelta(0, "a", [entry], "stop")
    body = writer(CompletionWriter, vocabulary, logprobs=1).content([delta], Usage(1))
    assert body["choices"][0]["logprobs"] == {
        "text_offset": [4],
        "token_logprobs": [-3.0],
        "tokens": ["a"],
        "top_logprobs": [{"\ufffd": -0.1, "a": -3.0}],
    }


def test_an_error_within_a_stream_is_one_event() -> None:
    (event,) = parsed(error_event(InvalidRequest("no", param="n")))
    assert event["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }


async def never() -> dict[str, str]:
    await asyncio.sleep(3600)
    return {}


async def gone() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def test_work_that_ends_first_gives_its_result() -> None:
    async def work() -> str:
        return "done"

    assert await unless_disconnected(never, work()) == "done"


async def test_work_that_fails_first_raises_its_error() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await unless_disconnected(never, work())


async def test_a_disconnect_cancels_the_work() -> None:
    was_cancelled = False

    async def work() -> str:
        nonlocal was_cancelled
        try:
            await asyncio.sleep(3600)
            return "done"
        finally:
            was_cancelled = True

    assert await unless_disconnected(gone, work()) is None
    assert was_cancelled


async def test_cancelling_from_outside_cancels_both() -> None:
    before = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(unless_disconnected(never, never()), 0.01)
    assert asyncio.all_tasks() == before


async def test_a_coroutine_that_need_not_wait_runs_to_its_end_at_once() -> None:
    seen = []

    async def work() -> None:
        seen.append("done")

    assert begin(work()) is None
    assert seen == ["done"]


async def test_a_coroutine_that_waits_is_finished_by_the_task_that_awaits_its_rest() -> None:
    gate, seen = asyncio.Event(), []

    async def work() -> None:
        for i in range(3):
            await gate.wait()
            await asyncio.sleep(0)
            seen.append(i)

    rest = begin(work())
    assert rest is not None and seen == []
    gate.set()
    await rest
    assert seen == [0, 1, 2]


async def test_what_a_coroutine_waits_for_may_fail_after_it_was_begun() -> None:
    future = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await future

    rest = begin(work())
    assert rest is not None
    future.set_exception(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await rest


async def test_cancelling_the_task_that_awaits_the_rest_cancels_the_coroutine() -> None:
    was_cancelled = False

    async def work() -> None:
        nonlocal was_cancelled
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    rest = begin(work())
    assert rest is not None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rest, 0.01)
    assert was_cancelled
