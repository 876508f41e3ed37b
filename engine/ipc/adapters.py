"""`AdapterTable`: the LoRA adapters of the engine, as the server knows them.

It outlives an engine process: the next one gets those that were loaded, and those that were
unloaded while their requests still run, by their ids, so that answers go on with the same weights
or not at all.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import count

from penstock.engine.config import AdapterSource, LoraConfig
from penstock.engine.errors import AdapterRefused, EngineFailed
from penstock.engine.step.messages import AdapterLoaded, LoadAdapter, OnWire, UnloadAdapter
from penstock.engine.step.model_info import LoadedAdapter


class AdapterTable:
    """On one event loop."""

    def __init__(
        self,
        config: LoraConfig | None,
        send: Callable[[OnWire], None],
        check_up: Callable[[], None],
    ) -> None:
        """check_up: raises EngineFailed where what is sent does not arrive."""
        self._config = config
        self._send = send
        self._check_up = check_up
        self._has_started = False  # a process has
        self.by_name: dict[str, LoadedAdapter] = {}
        self._leaving: dict[str, LoadedAdapter] = {}  # by id
        self._num_requests = Counter[str]()  # by name
        self._loading: dict[int, asyncio.Future[LoadedAdapter]] = {}
        self._numbers = count()
        self._turn = asyncio.Lock()

    @property
    def max_loras(self) -> int:
        """0 where none can be loaded."""
        return self._config.max_loras if self._config else 0

    @property
    def num_requests(self) -> dict[str, int]:
        """Since it was loaded, of each that is."""
        return {name: self._num_requests[name] for name in self.by_name}

    def count(self, adapter_id: str) -> None:
        self._num_requests[adapter_id.rpartition("@")[0]] += 1

    def config(self, ids_in_use: Collection[str]) -> LoraConfig | None:
        """For the next process. ids_in_use: of open requests."""
        if self._config is None or not self._has_started:
            return self._config
        self._leaving = {id_: each for id_, each in self._leaving.items() if id_ in ids_in_use}
        adapters = (*self.by_name.values(), *self._leaving.values())
        sources = tuple(
            AdapterSource(
                name=each.name, path=each.path, base_model_name=each.base_model_name, id=each.id
            )
            for each in adapters
        )
        return replace(self._config, adapters=sources)

    def on_ready(self, loaded: Iterable[LoadedAdapter]) -> None:
        self._has_started = True
        self.by_name = {each.name: each for each in loaded if each.id not in self._leaving}

    def on_resumed(self) -> None:
        """The process has the open requests: what was unloaded before goes when they end."""
        for adapter_id in self._leaving:
            self._send(UnloadAdapter(adapter_id))

    def on_end(self) -> None:
        for waiting in self._loading.values():
            if not waiting.done():
                waiting.set_exception(EngineFailed("the engine ended meanwhile; try again"))
        self._loading.clear()

    def on_loaded(self, message: AdapterLoaded) -> None:
        waiting = self._loading.pop(message.number, None)
        if waiting is None or waiting.done():
            if message.adapter and message.adapter not in self.by_name.values():
                self._unload(message.adapter)  # nobody waits for it any more
        elif message.adapter:
            waiting.set_result(message.adapter)
        else:
            waiting.set_exception(AdapterRefused(message.message))

    async def load(self, name: str, path: str, *, in_place: bool = False) -> LoadedAdapter:
        """Returns when requests may name it. in_place: in place of one of this name, if there is
        one, with which requests that run go on. Raises AdapterRefused, EngineFailed."""
        if self._config is None:
            raise AdapterRefused("start the server with --enable-lora to load adapters")
        async with self._turn:
            self._check_up()
            before = self.by_name.get(name)
            if before and not in_place:
                raise AdapterRefused(
                    f"an adapter {name!r} is loaded already; set load_inplace to true to load "
                    "another in its place"
                )
            if not before and len(self.by_name) >= self._config.max_loras:
                raise AdapterRefused(
                    f"{len(self.by_name)} adapters are loaded, and --max-loras is "
                    f"{self._config.max_loras}; unload one first"
                )
            number = next(self._numbers)
            waiting: asyncio.Future[LoadedAdapter] = asyncio.get_running_loop().create_future()
            self._loading[number] = waiting
            self._send(LoadAdapter(number, AdapterSource(name=name, path=path)))
            loaded = await waiting
            self.by_name[name] = loaded
            self._leaving.pop(loaded.id, None)
            if before and before.id != loaded.id:
                self._unload(before)
            return loaded

    def unload(self, name: str) -> bool:
        """Requests that run with it go on. False where there is none of this name."""
        adapter = self.by_name.pop(name, None)
        if adapter:
            del self._num_requests[name]
            self._unload(adapter)
        return adapter is not None

    def _unload(self, adapter: LoadedAdapter) -> None:
        self._leaving[adapter.id] = adapter
        self._send(UnloadAdapter(adapter.id))
