"""`EngineClient`: an engine process and the streams of its requests, joined for the server."""

from collections.abc import Callable, Sequence

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineFailed
from penstock.engine.ipc.streams import OpenStreams, OutputStream
from penstock.engine.ipc.supervisor import EngineProcess, EngineState
from penstock.engine.messages import OnWire, Refused, StepReport
from penstock.engine.model_info import ModelInfo
from penstock.engine.phases import LoadProgress
from penstock.scheduler.types import Request, RequestId


class EngineClient:
    """Starts the engine process, submits requests and returns their outputs. On one event loop."""

    def __init__(self, config: EngineConfig, module: str = "penstock.engine.ipc.process") -> None:
        """module: see `EngineProcess`."""
        self._process = EngineProcess(config, module, self._on_message, self._on_end)
        self._streams = OpenStreams(
            config.scheduler.max_num_seqs, config.max_num_queued_reqs, self._send
        )
        self._on_step: list[Callable[[StepReport], None]] = []
        self._on_progress: Callable[[LoadProgress], None] = lambda _: None
        self._last_report: StepReport | None = None

    @property
    def state(self) -> EngineState:
        return self._process.state

    @property
    def info(self) -> ModelInfo:
        """Raises EngineFailed before the model is loaded."""
        return self._process.info

    @property
    def pid(self) -> int | None:
        """Of the engine process; None where there is none, or it has ended."""
        return self._process.pid

    @property
    def silence_s(self) -> float:
        """See `EngineProcess.silence_s`."""
        return self._process.silence_s

    @property
    def num_open(self) -> int:
        """Answers that have not ended, running and waiting together: `n` of each request."""
        return self._streams.num_open

    @property
    def last_report(self) -> StepReport | None:
        return self._last_report

    def on_step(self, callback: Callable[[StepReport], None]) -> None:
        """Calls back with every step's report, on the event loop: for metrics."""
        self._on_step.append(callback)

    def on_progress(self, callback: Callable[[LoadProgress], None]) -> None:
        """Calls back when a phase of the start begins, and about how far it is."""
        self._on_progress = callback

    async def start(self) -> ModelInfo:
        """Starts the process and returns when it is ready. Raises EngineFailed."""
        return await self._process.start()

    async def wait_dead(self) -> str:
        """Returns the reason when the engine process has ended without `close`."""
        return await self._process.wait_dead()

    async def close(self) -> None:
        """Ends the process. Requests that are still open get EngineFailed."""
        await self._process.close()

    def kill(self) -> None:
        """Ends the process now, as `close` does, without the rest of it."""
        self._process.kill()

    def check_room(self, num_answers: int) -> None:
        """Raises QueueFull if this many answers would not be accepted now; RequestRefused if there
        is never room for them."""
        self._streams.check_room(num_answers)

    def submit(self, request: Request) -> OutputStream:
        """Sends the request at once; its stream gives its outputs, in order, as they arrive.

        An item is all outputs that have arrived, so a slow reader gets few large items; the
        iteration ends after the last final output. Cancelling it, or `aclose`, aborts the request.
        Raises QueueFull, EngineFailed, or RequestRefused for an n without room. While it runs,
        the iterator raises EngineFailed if the engine dies, RequestRefused if the engine does not
        accept the request.
        """
        (stream,) = self.submit_alike([request])
        return stream

    def submit_alike(self, requests: Sequence[Request]) -> list[OutputStream]:
        """The same of several, all or none, that differ in id, prompt and max_tokens alone: so what
        they share is sent once."""
        if self.state is not EngineState.READY:
            raise EngineFailed(f"the engine is {self.state}")
        return self._streams.submit_alike(requests)

    def abort(self, request_id: RequestId, index: int | None = None) -> None:
        """Ends a request, or only its answer `index`; no more outputs come for it."""
        self._streams.abort(request_id, index)

    def _send(self, message: OnWire) -> None:
        self._process.send(message)

    def _on_message(self, message: LoadProgress | StepReport | Refused) -> None:
        if isinstance(message, LoadProgress):
            self._on_progress(message)
            return
        if isinstance(message, Refused):
            self._streams.refuse(message.request_id, message.message)
            return
        self._last_report = message
        self._streams.push(message.outputs)
        for callback in self._on_step:
            callback(message)

    def _on_end(self, why: str) -> None:
        self._streams.fail_all(EngineFailed(why))
