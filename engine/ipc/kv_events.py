"""`KVEventPublisher`: the pool's blocks as ZeroMQ messages in vLLM's form (`--kv-events-config`).

A PUB socket sends three frames: the topic, the batch's number in 8 bytes, big-endian, and the batch
in msgpack: [time, events, rank], with each event a map (vLLM since its pull request 42892). A
ROUTER socket answers a number with all batches from that one on that are kept, each as its number
and the batch, and then with the number -1 and nothing. Numbers begin at 0 with each engine process,
whose first event is AllBlocksCleared.

Events have the token ids of prompts, and go to whoever connects.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, Full, Queue

import msgspec
import zmq

from penstock.engine.config import KVEventsConfig
from penstock.scheduler.cache.kv_events import KVEvent, Stored
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.groups import KVGroup, StateGroup

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
# vLLM calls the memory that attention reads so, whatever the device.
_MEDIUM = "GPU"
_POLL_S = 0.05


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """vLLM's. block_hashes: the first 8 bytes of digests. extra_keys: for each block what is in its
    digest besides tokens, or None."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """vLLM's."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """vLLM's."""


class EventBatch(msgspec.Struct, array_like=True):
    """vLLM's."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = 0


class KVEventPublisher:
    """Sends from a thread of its own. One other thread calls it, which never waits."""

    def __init__(
        self, config: KVEventsConfig, groups: Sequence[KVGroup | StateGroup], block_size: int
    ) -> None:
        """groups: of layers. Raises InvalidConfig for an address that cannot be used."""
        self._config = config
        self._groups = groups
        self._block_size = block_size
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: Queue[tuple[int, EventBatch]] = Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_made = self._num_dropped = 0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.setsockopt(zmq.LINGER, 1000)  # ms for the last batch to be sent
        _open(self._pub, config.endpoint, binds=_binds(config.endpoint))
        self._router: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._router = context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            _open(self._router, config.replay_endpoint, binds=True)
        self._put([AllBlocksCleared()])
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        logger.warning(
            "events of KV blocks are sent from %s: they have the token ids of prompts, so let "
            "only those connect who may read prompts",
            config.endpoint,
        )

    def publish(self, events: Sequence[KVEvent]) -> None:
        """The events of one step, in their order."""
        if events:
            self._put([self._on_wire(event) for event in events])

    def close(self) -> None:
        """After what was published was sent."""
        self._is_open = False
        self._thread.join()

    def _put(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        number, self._num_made = self._num_made, self._num_made + 1
        try:
            self._queue.put_nowait((number, EventBatch(time.time(), events)))
        except Full:  # a number is missing, so whoever listens knows
            self._num_dropped += 1
            if self._num_dropped == 1:
                logger.warning("events of KV blocks are made faster than sent: some are dropped")

    def _on_wire(self, event: KVEvent) -> BlockStored | BlockRemoved:
        if not isinstance(event, Stored):
            return BlockRemoved([_number(event.digest)], _MEDIUM, event.group)
        group = self._groups[event.group]
        window = group.window if isinstance(group, KVGroup) else None
        kind = "full_attention" if window is None else "sliding_window"
        keys = [[event.adapter] if event.adapter else [] for _ in event.digests]
        for each, inserts in zip(keys, event.inserts, strict=True):
            each += inserts
        if event.parent is None and event.cache_salt:
            keys[0].append(event.cache_salt)
        return BlockStored(
            block_hashes=[_number(digest) for digest in event.digests],
            parent_block_hash=None if event.parent is None else _number(event.parent),
            token_ids=event.token_ids,
            block_size=self._block_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=event.adapter,
            extra_keys=[each or None for each in keys],
            group_idx=event.group,
            # A recurrent state after the block, whatever the layer; vLLM names it after Mamba's.
            kv_cache_spec_kind=kind if isinstance(group, KVGroup) else "mamba",
            kv_cache_spec_sliding_window=window,
        )

    def _run(self) -> None:
        topic = self._config.topic.encode()
        while self._is_open or not self._queue.empty():
            if self._router is not None and self._router.poll(0):
                self._replay(self._router)
            try:
                place, batch = self._queue.get(timeout=_POLL_S)
            except Empty:
                continue
            number, payload = place.to_bytes(8, "big"), self._encoder.encode(batch)
            self._pub.send_multipart((topic, number, payload))
            self._kept.append((number, payload))
        self._pub.close()
        if self._router is not None:
            self._router.close()

    def _replay(self, router: "zmq.Socket[bytes]") -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for events of KV blocks is not 8 bytes, and is not answered")
            return
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                router.send_multipart((client, b"", number, payload))
        router.send_multipart((client, b"", END, b""))


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _binds(endpoint: str) -> bool:
    """As vLLM has it: what has a wildcard is bound, another address connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _open(socket: "zmq.Socket[bytes]", endpoint: str, *, binds: bool) -> None:
    try:
        socket.bind(endpoint) if binds else socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise InvalidConfig(f"--kv-events-config: {endpoint} cannot be used: {error}") from error
