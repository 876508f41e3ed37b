"""The open streams without a process: what they send, what they count, and what ends them."""

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest

from penstock.engine.errors import EngineFailed, QueueFull, RequestRefused
from penstock.engine.ipc.streams import OpenStreams, OutputStream
from penstock.engine.step.messages import Abort, OnWire, Submit, SubmitAlike
from penstock.scheduler.errors import TargetOutOfReach
from penstock.scheduler.types import (
    Finish,
    FinishReason,
    Insert,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
)
from tests.support.scheduling import make_request

FINISH = Finish(FinishReason.LENGTH, None, 0.0, 0, 0)


class Streams(OpenStreams):
    """Room for two running answers and two waiting ones; keeps what it sends."""

    def __init__(self, *, is_fair: bool = False) -> None:
        self.sent: list[OnWire] = []
        super().__init__(2, 2, self.sent.append, is_fair=is_fair)

    def submit(self, request: Request) -> OutputStream:
        (stream,) = self.submit_alike([request])
        return stream


def output(name: str, token_id: int, *, index: int = 0, is_last: bool = False) -> RequestOutput:
    finish = FINISH if is_last else None
    return RequestOutput(RequestId(name), index, [token_id], None, finish, 0)


async def ids(stream: OutputStream) -> list[int]:
    return [i async for outputs in stream for output in outputs for i in output.token_ids]


async def test_a_request_is_sent_and_its_outputs_reach_its_own_stream() -> None:
    streams = Streams()
    requests = [make_request(name, 3) for name in "ab"]
    a, b = (streams.submit(request) for request in requests)
    assert streams.sent == [Submit(request) for request in requests] and streams.num_open == 2
    streams.push([output("a", 7), output("b", 8)])
    streams.push([output("a", 9, is_last=True), output("b", 10, is_last=True)])
    assert streams.num_open == 0
    assert [await ids(a), await ids(b)] == [[7, 9], [8, 10]]


async def test_requests_of_one_kind_are_one_message_that_has_what_they_share_once() -> None:
    streams = Streams()
    shared = SamplingParams(
        max_tokens=5,
        allowed_token_ids=tuple(range(1000)),
        logit_bias=((1, 2.0),),
        bad_words=((1, 2), (3,)),
        grammar="x" * 1000,
    )
    requests = [
        replace(make_request(name, num_prompt), sampling=replace(shared, max_tokens=max_tokens))
        for name, num_prompt, max_tokens in (("a", 3, 5), ("b", 4, 5), ("c", 5, 6), ("d", 6, 5))
    ]
    opened = streams.submit_alike(requests)
    assert len(opened) == streams.num_open == 4
    (message,) = streams.sent
    encoded = msgspec.msgpack.encode(message)
    assert len(encoded) < len(msgspec.msgpack.encode(Submit(requests[0]))) + 500
    received = msgspec.msgpack.decode(encoded, type=OnWire)
    assert isinstance(received, SubmitAlike)
    each = [submit.request for submit in received.each()]
    assert each == requests
    for name in ("allowed_token_ids", "logit_bias", "bad_words", "grammar"):
        assert len({id(getattr(request.sampling, name)) for request in each}) == 1
    assert each[0].sampling is each[1].sampling is each[3].sampling


async def test_images_reach_the_engine_and_the_next_one_too() -> None:
    streams = Streams()
    images = [
        (Insert(1, 2, bytes([n]) * 16, (1, 1, 2), bytes(range(12)), (4, 3), (1, 2, 2), 7, True),)
        for n in range(2)
    ]
    requests = [make_request(str(n), 4, inserts=inserts) for n, inserts in enumerate(images)]
    opened = streams.submit_alike(requests)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(streams.sent[0]), type=OnWire)
    assert isinstance(received, SubmitAlike)
    assert [submit.request.inserts for submit in received.each()] == images
    # What another engine gets after a restart.
    assert [stream.resumption().inserts for stream in opened] == images


async def test_requests_of_one_kind_are_all_taken_or_none() -> None:
    streams = Streams()
    requests = [make_request(str(i), 3) for i in range(5)]
    with pytest.raises(RequestRefused):
        streams.submit_alike(requests)
    assert streams.num_open == 0 and not streams.sent


async def test_answers_count_until_their_final_output_and_the_limit_holds() -> None:
    streams = Streams()
    streams.submit(make_request("a", 3, n=3))
    with pytest.raises(RequestRefused, match="at most 4;"):
        streams.submit(make_request("b", 3, n=5))
    with pytest.raises(QueueFull, match=r"^3 answers .* needs 2 more;"):
        streams.submit(make_request("b", 3, n=2))
    assert len(streams.sent) == 1, "what was not accepted was sent"
    streams.push([output("a", 7, index=1, is_last=True)])
    assert streams.num_open == 2
    streams.submit(make_request("b", 3, n=2))
    assert streams.num_open == 4


async def test_the_time_to_retry_after_follows_from_how_often_answers_end() -> None:
    streams = Streams()
    for name in "abcd":
        streams.submit(make_request(name, 3))
    assert streams._retry_after_s() == 1
    streams._ended_at_s.extend([time.monotonic() - 30.0] * 3)
    assert streams._retry_after_s() == 10
    with pytest.raises(QueueFull, match="in 10 s"):
        streams.submit(make_request("e", 3))


async def test_an_answer_that_a_stop_string_ended_counts_once() -> None:
    streams = Streams()
    streams.submit(make_request("a", 3, n=3))
    streams.abort(RequestId("a"), 0)
    streams.push([output("a", 7, index=0, is_last=True)])  # of the engine, on its way until now
    assert (streams.num_open, len(streams._ended_at_s)) == (2, 1)
    streams.abort(RequestId("a"))
    assert (streams.num_open, len(streams._ended_at_s)) == (0, 3)


async def test_an_abort_is_sent_and_outputs_on_their_way_are_dropped() -> None:
    streams = Streams()
    stream = streams.submit(make_request("a", 3, n=2))
    streams.abort(RequestId("a"), 0)
    streams.push([output("a", 7, index=0), output("a", 8, index=1, is_last=True)])
    assert await ids(stream) == [8] and streams.num_open == 0
    streams.abort(RequestId("a"))
    assert streams.sent[1:] == [Abort(RequestId("a"), 0)], "an abort of what has ended is not sent"


async def test_a_refused_request_raises_in_its_reader_and_gives_its_place_back() -> None:
    streams = Streams()
    stream = streams.submit(make_request("a", 3, n=2))
    streams.fail(RequestId("a"), RequestRefused("the prompt is too long"))
    assert streams.num_open == 0
    with pytest.raises(RequestRefused, match="too long"):
        await ids(stream)


async def test_the_streams_outlive_a_failure_of_all_that_is_open() -> None:
    """Outputs that came before are read first, and new requests can be submitted."""
    streams = Streams()
    stream = streams.submit(make_request("a", 3, n=4))
    streams.push([output("a", 7)])
    streams.fail_all(EngineFailed("the engine ended"))
    assert stream.take()[0].token_ids == [7]
    with pytest.raises(EngineFailed, match="the engine ended"):
        stream.take()
    again = streams.submit(make_request("a", 3))
    streams.push([output("a", 9, is_last=True)])
    assert await ids(again) == [9] and streams.num_open == 0


async def test_a_listener_is_called_once_for_all_outputs_that_came_together() -> None:
    streams = Streams()
    stream = streams.submit(make_request("a", 3))
    calls: list[int] = []
    stream.listen(lambda: calls.append(stream.num_waiting))
    streams.push([output("a", 7)])
    streams.push([output("a", 8)])
    assert not calls
    await asyncio.sleep(0)
    assert calls == [2]


async def test_a_queue_that_one_tenant_has_filled_has_an_equal_share_for_another() -> None:
    streams = Streams(is_fair=True)
    for name in "abcd":
        streams.submit(make_request(name, 3, tenant="flood"))
    with pytest.raises(QueueFull):
        streams.submit(make_request("e", 3, tenant="flood"))
    for name in "xy":
        streams.submit(make_request(name, 3, tenant="quiet"))
    with pytest.raises(QueueFull):
        streams.submit(make_request("z", 3, tenant="quiet"))
    assert streams.num_open == 6
    streams.push([output("a", 1, is_last=True), output("x", 1, is_last=True)])
    with pytest.raises(QueueFull):
        streams.submit(make_request("f", 3, tenant="flood"))
    streams.submit(make_request("z", 3, tenant="quiet"))


async def test_a_request_with_a_target_waits_until_the_engine_has_accepted_it() -> None:
    streams = Streams()
    plain = streams.submit(make_request("plain", 3))
    await plain.accepted()
    late = streams.submit(make_request("late", 3, ttft_target_s=1.0))
    waiting = asyncio.create_task(late.accepted())
    await asyncio.sleep(0)
    assert not waiting.done()
    streams.accept(late.request.id)
    await waiting
    refused = streams.submit(make_request("refused", 3, ttft_target_s=1.0))
    streams.fail(refused.request.id, TargetOutOfReach(2.0, 1.0))
    with pytest.raises(TargetOutOfReach):
        await refused.accepted()
