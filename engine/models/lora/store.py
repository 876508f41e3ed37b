"""`Adapters`: the loaded LoRA adapters of an executor, and which sequence has which."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.engine.config import AdapterSource, LoraConfig
from penstock.engine.errors import AdapterRefused, UnknownAdapter
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.lora.weights import adapter_digest, read_adapter
from penstock.engine.models.parts.adapter import Adapter
from penstock.engine.step.model_info import LoadedAdapter
from penstock.engine.step.model_input import AdapterRun
from penstock.scheduler.types import Request, RequestId, ScheduledBatch, SlotAssignment

logger = logging.getLogger(__name__)


class OtherRanks(Protocol):
    """Those that have the other parts of each adapter."""

    def load_adapter(self, source: AdapterSource) -> None:
        """All of them have read theirs then, or none keeps it. source: with its id. Raises
        AdapterRefused where one cannot, RankFailed where one has ended."""
        ...

    def unload_adapter(self, adapter_id: str) -> None:
        """No step that is sent to them from now on has tokens of it. Raises RankFailed."""
        ...


@dataclass(slots=True)
class _Held:
    """weights: as the model computes with them. users: requests that have not ended."""

    loaded: LoadedAdapter
    weights: Any
    users: set[RequestId] = field(default_factory=set)
    is_leaving: bool = False


class Adapters:
    """See `AdapterStore`. One thread calls it; another reads files."""

    def __init__(
        self,
        config: LoraConfig | None,
        model: ModelConfig | None,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        make: Callable[[Adapter], Any] = lambda adapter: adapter,
        drop: Callable[[Any], None] = lambda weights: None,
        shard: Shard | None = None,
        first_layer: int = 0,
    ) -> None:
        """config, model: None where none can be loaded. device: that files are read to. make: gives
        the weights as the model needs them. drop: gets them when nothing uses them any more.
        shard, first_layer: see `read_adapter`."""
        self._config = config
        self._model = model
        self._dtype = dtype
        self._device = device
        self._make = make
        self._drop = drop
        self._shard, self._first_layer = shard, first_layer
        self._others: OtherRanks | None = None
        self._held: dict[str, _Held] = {}
        self._id_of: dict[RequestId, str] = {}
        self._ids: list[str | None] = [None] * max_num_seqs  # by slot
        self._lock = threading.Lock()  # of what is held, between both threads
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def lead(self, others: OtherRanks) -> None:
        """This is rank 0, and the others have what it has from now on."""
        self._others = others

    def load(self, source: AdapterSource) -> "Future[LoadedAdapter]":
        """See `AdapterStore`."""
        return self._reader.submit(self._load, source)

    def unload(self, adapter_id: str) -> None:
        """See `AdapterStore`."""
        if held := self._held.get(adapter_id):
            held.is_leaving = True
            self._drop_unused(held)

    def prepare(self, request: Request) -> None:
        """The request uses its adapter until it is released. Raises UnknownAdapter."""
        if request.adapter is None:
            return
        held = self._held.get(request.adapter)
        if held is None:
            raise UnknownAdapter(request.adapter)
        held.users.add(request.id)
        self._id_of[request.id] = request.adapter

    def release(self, request_id: RequestId) -> None:
        """The request has ended."""
        adapter_id = self._id_of.pop(request_id, None)
        if adapter_id is not None:
            held = self._held[adapter_id]
            held.users.discard(request_id)
            self._drop_unused(held)

    def assign(self, assignment: SlotAssignment) -> None:
        self._ids[assignment.slot] = assignment.adapter

    def runs(self, batch: ScheduledBatch, query_starts: Sequence[int]) -> tuple[AdapterRun, ...]:
        """Groups the batch's tokens: sequences that follow each other share an adapter's run.
        query_starts: see `ModelInput`."""
        if not self._held:
            return ()
        found: list[AdapterRun] = []
        last = None
        for row, slot in enumerate(batch.slots):
            adapter_id = self._ids[slot]
            if adapter_id is not None:
                num_tokens = batch.num_tokens[row]
                if adapter_id == last:
                    num_tokens += found.pop().num_tokens
                first = query_starts[row + 1] - num_tokens
                found.append(AdapterRun(first, num_tokens, self._held[adapter_id].weights))
            last = adapter_id
        return tuple(found)

    def num_bytes(self, batch: ScheduledBatch) -> int:
        """Counts the bytes of adapters of the batch's sequences, each once."""
        if not self._held:
            return 0
        ids = {self._ids[slot] for slot in batch.slots}
        return sum(self._held[each].loaded.num_bytes for each in ids if each is not None)

    def _load(self, source: AdapterSource) -> LoadedAdapter:
        """Raises PenstockError."""
        if self._config is None or self._model is None:
            raise AdapterRefused("start the server with --enable-lora to load adapters")
        directory = Path(source.path)
        adapter_id = f"{source.name}@{adapter_digest(directory)}"
        if source.id not in (None, adapter_id):
            raise AdapterRefused(
                f"the files in {directory} are not those that {source.name!r} was loaded from; "
                "load it again"
            )
        with self._lock:
            if held := self._held.get(adapter_id):
                held.is_leaving = False
                return held.loaded
        with torch.inference_mode():
            kinds = self._model, self._dtype, self._device, self._config.max_rank
            adapter = read_adapter(directory, *kinds, self._shard, self._first_layer)
            weights = self._make(adapter)
        self._load_on_others(replace(source, id=adapter_id), weights)
        loaded = LoadedAdapter(
            id=adapter_id,
            name=source.name,
            path=source.path,
            base_model_name=source.base_model_name,
            rank=adapter.rank,
            num_bytes=adapter.num_bytes,
        )
        logger.info(
            "adapter %s: rank %d, %.1f MiB, from %s",
            source.name,
            loaded.rank,
            loaded.num_bytes / 2**20,
            source.path,
        )
        with self._lock:
            self._held[adapter_id] = _Held(loaded, weights)
        return loaded

    def _load_on_others(self, source: AdapterSource, weights: Any) -> None:
        """Raises PenstockError, without the weights."""
        if self._others is not None:
            try:
                self._others.load_adapter(source)
            except BaseException:
                self._drop(weights)
                raise

    def _drop_unused(self, held: _Held) -> None:
        with self._lock:
            if held.is_leaving and not held.users:
                del self._held[held.loaded.id]
                self._drop(held.weights)
                if self._others is not None:
                    self._others.unload_adapter(held.loaded.id)


def no_adapters(max_num_seqs: int) -> Adapters:
    """For a model that none can be loaded for."""
    return Adapters(None, None, torch.float32, torch.device("cpu"), max_num_seqs)
