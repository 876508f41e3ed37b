"""A subscriber knows which prefixes a server has, from its events alone."""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from penstock.engine.config import KVEventsConfig
from penstock.engine.ipc.kv_events import END, KVEventPublisher
from penstock.engine.step.model_info import EncoderInfo
from penstock.scheduler.cache.kv_events import KVEvents, Removed, Stored
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import Insert
from tests.support.scheduling import Driver, make_request
from tests.support.serving import RunningServer, free_port

Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator["zmq.Context[Socket]"]:
    made: zmq.Context[Socket] = zmq.Context()
    yield made
    made.destroy(linger=0)


def replayed(context: "zmq.Context[Socket]", endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """All batches from number `first` on, as a client of vLLM's asks for them."""
    batches: list[tuple[int, bytes]] = []
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while socket.poll(20_000):
            _, number, payload = socket.recv_multipart()
            if number == END:
                return batches
            batches.append((int.from_bytes(number, "big"), payload))
    raise AssertionError("the end of the replay never came")


@pytest.mark.parametrize(
    ("windows", "num_states"), [((None,), 0), ((None, 6), 0), ((None,), 6), ((None, 6), 20)]
)
def test_events_tell_of_what_can_be_found_and_of_nothing_else(
    windows: tuple[int | None, ...], num_states: int
) -> None:
    events = KVEvents(4)
    driver = Driver(
        num_blocks=24,
        max_model_len=64,
        windows=windows,
        more_blocks=(24,) * (len(windows) - 1),
        num_states=num_states,
        events=events,
    )
    chosen, found = random.Random(1), set[tuple[int, bytes]]()
    num_stored = num_removed = 0
    for number in range(40):
        prompt = [3 + chosen.randrange(2)] * (4 * chosen.randrange(1, 8)) + [5, 6, 7, 8, 9]
        driver.scheduler.add(make_request(str(number), prompt, n=1 + number % 2))
        for _ in range(chosen.randrange(1, 6)):
            driver.step()
            for event in events.take():
                if isinstance(event, Stored):
                    assert len(event.token_ids) == 4 * len(event.digests)
                    new = {(event.group, digest) for digest in event.digests}
                    assert not new & found
                    found |= new
                    num_stored += len(new)
                else:
                    assert isinstance(event, Removed)
                    found.remove(event)
                    num_removed += 1
            for group, kv in enumerate(driver.scheduler._kv.groups):
                assert {digest for g, digest in found if g == group} == set(kv._block_of)
    assert num_stored > 100 and num_removed > 50


def test_batches_are_as_vllm_sends_them_and_are_sent_again(
    tmp_path: Path, context: "zmq.Context[Socket]"
) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(endpoint=endpoint, replay_endpoint=replay, topic="kv@pod@model")
    events = KVEvents(4)
    driver = Driver(windows=(None, 6), more_blocks=(64,), num_states=9, events=events)
    publisher = KVEventPublisher(config, driver.executor.info.kv_groups, 4)
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(endpoint)
    subscriber.subscribe("kv@")
    # Who subscribes late asks for what was before.
    first = replayed(context, replay, 0)
    assert [number for number, _ in first] == [0]
    assert msgspec.msgpack.decode(first[0][1])[1] == [{"type": "AllBlocksCleared"}]
    subscriber.poll(1000)
    driver.scheduler.add(make_request("a", [*range(20, 34)], max_tokens=1, cache_salt="mine"))
    driver.run()
    publisher.publish(events.take())
    assert subscriber.poll(20_000)
    topic, number, payload = subscriber.recv_multipart()
    assert (topic, number) == (b"kv@pod@model", (1).to_bytes(8, "big"))
    at_s, [whole, windowed, state], rank = msgspec.msgpack.decode(payload)
    assert at_s > 1e9 and rank == 0
    assert whole | {"block_hashes": []} == {
        "type": "BlockStored",
        "block_hashes": [],
        "parent_block_hash": None,
        "token_ids": [*range(20, 32)],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["mine"], None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert len(set(whole["block_hashes"])) == 3
    assert windowed["group_idx"] == 1
    assert windowed["kv_cache_spec_kind"] == "sliding_window"
    assert windowed["kv_cache_spec_sliding_window"] == 6
    # Of a state, the one block after which there is a snapshot.
    assert state["block_hashes"] == whole["block_hashes"][:1]
    assert (state["group_idx"], state["kv_cache_spec_kind"]) == (2, "mamba")
    assert (state["parent_block_hash"], state["token_ids"]) == (None, [*range(20, 24)])
    assert replayed(context, replay, 1) == [(1, payload)]
    publisher.publish([Removed(0, bytes(16))])
    publisher.close()
    *_, removed = subscriber.recv_multipart()
    assert msgspec.msgpack.decode(removed)[1] == [
        {"type": "BlockRemoved", "block_hashes": [0], "medium": "GPU", "group_idx": 0}
    ]
    subscriber.close()


def test_an_address_that_cannot_be_used_is_an_error_at_the_start() -> None:
    with pytest.raises(InvalidConfig, match="--kv-events-config: tcp://\\*:nowhere cannot be used"):
        KVEventPublisher(KVEventsConfig(endpoint="tcp://*:nowhere"), (), 4)


def test_a_server_sends_its_events_to_who_asks(context: "zmq.Context[Socket]") -> None:
    replay = f"tcp://127.0.0.1:{free_port()}"
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": replay,
    }
    server = RunningServer("--scripted", "--kv-events-config", msgspec.json.encode(config).decode())
    try:
        server.wait_until_ready()
        prompt = [*range(20, 60)]
        body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": 2}
        assert server.post("/v1/completions", body).status_code == 200
        batches = [msgspec.msgpack.decode(each) for _, each in replayed(context, replay, 0)]
        stored = [event for batch in batches for event in batch[1] if len(event) > 1]
        assert stored[0]["token_ids"] == prompt[:32] and stored[0]["block_size"] == 16
        assert "token ids of prompts" in server.log()
    finally:
        server.stop()


def test_extra_keys_of_a_block_have_what_its_images_show() -> None:
    events = KVEvents(4)
    encoder = EncoderInfo(
        weight_bytes=0, flops_per_patch=0, flops_per_pair=0, bytes_per_token=0, max_patches=1
    )
    driver = Driver(events=events, encoder=encoder)
    inserts = (Insert(2, 3, b"a" * 16, (1, 1, 3)), Insert(6, 2, b"b" * 16, (1, 1, 2)))
    driver.add(make_request("a", [*range(20, 34)], max_tokens=1, inserts=inserts))
    driver.run()
    keys = [each for event in events.take() if isinstance(event, Stored) for each in event.inserts]
    first, second = (name.hex() for name in (b"a" * 16, b"b" * 16))
    assert keys == [[first], [first, second], []]
