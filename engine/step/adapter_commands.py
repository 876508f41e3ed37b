"""LoRA adapters that are loaded before the step loop runs, and while it does."""

import logging
from collections.abc import Callable
from concurrent.futures import Future

from penstock.engine.config import LoraConfig
from penstock.engine.errors import AdapterRefused
from penstock.engine.step.executor import AdapterStore
from penstock.engine.step.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from penstock.engine.step.model_info import LoadedAdapter
from penstock.scheduler.errors import PenstockError

logger = logging.getLogger(__name__)


def load_first(store: AdapterStore | None, config: LoraConfig | None) -> tuple[LoadedAdapter, ...]:
    """Those of the settings. One that an earlier engine had, and that cannot be loaded again, is
    left out, and the log says why: its requests are refused, and all others go on.

    Raises PenstockError for one that is named for the first time.
    """
    loaded = []
    for source in config.adapters if config else ():
        try:
            if store is None:
                raise _NO_STORE
            loaded.append(store.load(source).result())
        except PenstockError as error:
            if source.id is None:
                raise
            logger.error("the adapter %s is no longer served: %s", source.name, error)
    return tuple(loaded)


class AdapterCommands:
    """Those of the server that arrive between two steps. On the loop's thread."""

    def __init__(self, store: AdapterStore | None, send: Callable[[AdapterLoaded], None]) -> None:
        self._store = store
        self._send = send
        self._loading: dict[int, Future[LoadedAdapter]] = {}

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def apply(self, command: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(command, LoadAdapter):
            if self._store is None:
                self._send(AdapterLoaded(command.number, None, str(_NO_STORE)))
                return
            self._loading[command.number] = self._store.load(command.source)
        elif self._store is not None:
            self._store.unload(command.adapter_id)

    def report_loaded(self) -> None:
        """Answers the commands whose adapters have been read. Raises what is not the adapter's
        fault."""
        for number in [number for number, future in self._loading.items() if future.done()]:
            self._send(answer_to(number, self._loading.pop(number)))


def answer_to(number: int, loaded: "Future[LoadedAdapter]") -> AdapterLoaded:
    """number: of the command. Raises what is not the adapter's fault."""
    try:
        return AdapterLoaded(number, loaded.result())
    except (PenstockError, OSError, MemoryError) as error:
        # A name in its files may be half a pair of surrogates, which no message can hold.
        message = str(error).encode(errors="backslashreplace").decode()
        return AdapterLoaded(number, None, message or "out of memory")


_NO_STORE = AdapterRefused("this engine computes no LoRA adapters")
