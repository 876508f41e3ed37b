"""The server's life: it starts, serves, drains and ends. All of its mutable state is here."""

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from enum import StrEnum

from penstock.engine.client import (
    EngineClient,
    EngineConfig,
    EngineState,
    LoadProgress,
    LogFormat,
    StepReport,
    is_gguf,
    printable,
    say,
)
from penstock.scheduler.errors import PenstockError
from penstock.server.config import DuringRestart, MetricsAlias, ServeConfig, ServerConfig
from penstock.server.errors import ModelNotFound, NotServing
from penstock.server.observability.activity import Activity
from penstock.server.observability.metrics import Metrics
from penstock.server.observability.predictions import StepRecord
from penstock.server.observability.progress import Progress
from penstock.server.observability.request_log import EndedRequest, RequestLog, request_entry
from penstock.server.observability.tracing import Tracer
from penstock.server.observability.traffic_record import TrafficRecord
from penstock.server.observability.version import version
from penstock.server.output.generation import Generation, GenerationRequest
from penstock.server.prompt.model import (
    ServedModel,
    download_weights,
    find_adapters,
    find_model,
    load_model,
    read_prompt_files,
    with_draft_model,
)

logger = logging.getLogger("penstock")

# A process that shows no sign of life for this long gets no further traffic. It shows one a second.
_UNHEARD_S = 10.0
# Time for open requests to receive the error before the process ends too.
_LAST_WORDS_S = 5.0
# huggingface_hub's InferenceClient names this model where its caller names none.
_NO_NAME = "tgi"

EXIT_DRAINED = 0
EXIT_ENGINE_DIED = 1
EXIT_CANNOT_START = 2


class State(StrEnum):
    """Whether the server can serve a client now."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # the engine does; open requests go on when it runs again
    DRAINING = "draining"
    DEAD = "dead"


class Service:
    """One engine, its model, and the requests that are open. Lives on one event loop."""

    def __init__(
        self,
        config: ServeConfig,
        make_engine: Callable[[EngineConfig], EngineClient] = EngineClient,
    ) -> None:
        self.config = config
        self._make_engine = make_engine
        self.metrics = Metrics(
            config.server.served_model_names[0],
            has_vllm_names=config.server.metrics_alias is MetricsAlias.VLLM,
        )
        endpoint = config.server.otlp_traces_endpoint
        self.request_log = RequestLog(is_at_info=config.server.log_requests)
        self.tracer = Tracer.to_endpoint(endpoint) if endpoint else None
        self._traffic = _traffic_record(config)
        self._state = State.STARTING
        self._progress = Progress(config.server.log_format)
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._engine: EngineClient | None = None
        self._model: ServedModel | None = None
        self._steps: StepRecord | None = None
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> State:
        is_restarting = self._engine and self._engine.state is EngineState.RESTARTING
        return State.RESTARTING if self._state is State.READY and is_restarting else self._state

    @property
    def model(self) -> ServedModel:
        assert self._model, "the gate lets nothing through before the model is loaded"
        return self._model

    @property
    def engine(self) -> EngineClient:
        assert self._engine, "the gate lets nothing through before the model is loaded"
        return self._engine

    def model_named(self, name: str | None) -> ServedModel:
        """The model, with an adapter where that is the name. Without a name, the model itself.
        Raises ModelNotFound."""
        if not name or name in self.model.names:
            return self.model
        adapter = self.engine.adapters.by_name.get(name)
        if adapter is None and name == _NO_NAME:
            return self.model
        if adapter is None:
            raise ModelNotFound(name, self.model.name)
        return replace(self.model, names=(adapter.name,), adapter=adapter)

    @property
    def steps(self) -> StepRecord:
        assert self._steps, "the gate lets nothing through before the model is loaded"
        return self._steps

    @property
    def num_open(self) -> int:
        """Answers that have not ended, running and waiting together."""
        return self._engine.streams.num_open if self._engine else 0

    @property
    def last_report(self) -> StepReport | None:
        """The report of the latest step; None before the first."""
        return self._engine.last_report if self._engine else None

    @property
    def is_loaded(self) -> bool:
        return self._model is not None

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around each request: a drain waits for those that are open."""
        self._num_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    async def run(self) -> None:
        """Loads, serves until the engine ends, and says so; `over` then holds the exit code."""
        try:
            logger.info(
                "penstock %s loads %s; until it is ready, %s answers with status 503",
                version(),
                self.config.engine.model,
                _url_of(self.config.server),
            )
            async with self._progress.shown():
                engine = await self._load()
            _announce_ready(self.config.server, self.model)
            activity = asyncio.create_task(Activity(self.metrics, self.model.info).run())
            try:
                why = await engine.wait_dead()
            finally:
                activity.cancel()
            await self._fail(f"the engine ended: {why}", EXIT_ENGINE_DIED)
        except PenstockError as error:
            await self._fail(str(error), EXIT_CANNOT_START)
        except Exception as error:
            logger.exception("could not start")
            await self._fail(f"{type(error).__name__}: {error}", EXIT_CANNOT_START)

    async def drain(self, cause: str) -> None:
        """Refuses new requests, lets running ones finish; those that take too long get an error.
        cause: for the log, why the server ends."""
        if self._state in (State.DRAINING, State.DEAD):
            return
        self._state = State.DRAINING
        try:
            await self._drain_requests(cause)
            await self.close()
            await self._until_idle(_LAST_WORDS_S)
        finally:
            self._end(EXIT_DRAINED if self._state is State.DRAINING else EXIT_ENGINE_DIED)

    async def _drain_requests(self, cause: str) -> None:
        num_open, timeout_s = self._num_requests, self.config.server.shutdown_timeout_s
        if not num_open:
            logger.info("%s: no request is open, so the server ends now", cause)
            return
        what = (
            f"{cause}: {_requests(num_open)} may take up to {timeout_s:g} s to finish, then the "
            f"server ends; a second {cause} ends it at once"
        )

        def state() -> LoadProgress:
            num_ended = max(0, num_open - self._num_requests)
            return LoadProgress("drain", num_ended, num_open, "requests ended")

        async with self._progress.shown():
            with self._progress.phase("drain", what, state):
                await self._until_idle(timeout_s)
        if self._num_requests:
            logger.warning(
                "drain: %s did not finish in %g s and will end with an error; a longer "
                "--shutdown-timeout gives them more time",
                _requests(self._num_requests),
                timeout_s,
            )

    def kill(self) -> None:
        """Ends the engine and what it started, now; the caller ends this process."""
        if self._engine:
            self._engine.process.kill()

    async def close(self) -> None:
        """Ends the engine; open requests get an error."""
        try:
            if self._model and self._model.grammars:
                await self._model.grammars.close()
            if self._model and self._model.images:
                self._model.images.close()
        finally:
            if self._engine:
                await self._engine.close()
            if self._traffic:
                self._traffic.close()

    def check_serving(self) -> None:
        """Raises NotServing unless new requests are accepted."""
        if self.state is not State.RESTARTING:
            self._check_open()
        elif self.config.server.during_restart is DuringRestart.REFUSE:
            raise self._not_ready_yet()

    def _not_ready_yet(self) -> NotServing:
        retry_after_s = self.engine.ready_in_s
        message = (
            "the engine ended and is starting again; requests that were running go on then; try "
            f"again in {retry_after_s} s"
        )
        return NotServing(message, is_ending=False, retry_after_s=retry_after_s)

    def _check_open(self) -> None:
        if self.state is State.STARTING:
            raise NotServing(
                f"the model is still loading{self._phases()}; try again soon", is_ending=False
            )
        if self.state is State.DRAINING:
            raise NotServing("this server is shutting down; use another server", is_ending=True)
        if self.state is State.DEAD:
            raise NotServing(
                "the engine has ended, and the server is shutting down", is_ending=True
            )

    def check_ready(self) -> None:
        """Raises NotServing unless new requests would be answered now."""
        if self.state is State.RESTARTING:
            raise self._not_ready_yet()
        self._check_open()
        self._check_running(_UNHEARD_S)

    def check_health(self) -> None:
        """Raises NotServing unless the engine is alive, and has stepped recently if it has work, or
        is being restarted: a server that was ended then would lose its open requests."""
        if self.state is State.STARTING or self._engine is None:
            raise NotServing(f"the model is still loading{self._phases()}", is_ending=False)
        if self._engine.state is EngineState.RESTARTING:
            return
        if self._engine.state is not EngineState.READY:
            raise NotServing("the engine is not running", is_ending=True)
        self._check_running(self._engine.stall_limit_s)

    def _check_running(self, max_unheard_s: float) -> None:
        """Raises NotServing for a process that is stopped, or in whose steps something hangs."""
        engine = self.engine
        if engine.process.silence_s > max_unheard_s:
            message = f"the engine process has not run for {engine.process.silence_s:.0f} s"
            raise NotServing(message, is_ending=False)
        age_s = engine.step_age_s
        if age_s > engine.stall_limit_s:
            message = f"{engine.streams.num_open} answers are open, no step for {age_s:.0f} s"
            raise NotServing(message, is_ending=False)

    def submit_generation(self, request: GenerationRequest) -> Generation:
        """Submits; raises QueueFull or EngineFailed. The caller closes the generation."""
        generation = Generation(
            request,
            self.engine,
            self.model.encoder.vocabulary,
            self.metrics,
            self.config.server.request_timeout_s,
            self.on_end(),
            self._traffic,
        )
        generation.submit()
        return generation

    def on_end(self) -> Callable[[EndedRequest], None] | None:
        """To be called when the HTTP request in whose task this is called has ended; None if nobody
        wants to know."""
        entry = request_entry.get()
        trace = self.tracer.begin(self.model.name) if self.tracer else None
        if entry is None:
            return trace

        def end(request: EndedRequest) -> None:
            entry.ended = request
            if trace:
                trace(request)

        return end

    async def _load(self) -> EngineClient:
        """Checks of the model come before what takes long: its config, then its tokenizer,
        then the download of its weights, then the engine's process, which reads them."""
        files = await find_model(self.config, self._progress)
        directory = files.directory
        if files.download and is_gguf(directory):  # which has the tokenizer too
            await download_weights(files.download, self._progress)
            files = replace(files, download=None)
        prompt_files = asyncio.ensure_future(
            read_prompt_files(self.config, directory, self._progress)
        )
        if files.download:
            await prompt_files
            await download_weights(files.download, self._progress)
        lora = await find_adapters(self.config.engine.lora, self._progress)
        config = replace(self.config.engine, model=str(directory), lora=lora)
        config = await with_draft_model(config, prompt_files, self._progress)
        engine = self._make_engine(config)
        engine.on_progress(self._progress.on_engine)
        self.metrics.watch(engine)
        self._engine = engine
        self._model = await load_model(self.config, directory, prompt_files, engine, self._progress)
        engine.on_progress(lambda _: None)  # of another start, which the log tells of
        self.metrics.on_ready(self._model.info)
        self._steps = StepRecord(self._model.info, self.metrics.predictions)
        self._steps.watch(engine)
        gc.collect()
        gc.freeze()  # no collection has to walk loaded objects again while streams wait
        if self.state is State.STARTING:
            self._state = State.READY
        return engine

    def _phases(self) -> str:
        """Returns what is going on, in parentheses, for those who ask while the model loads."""
        text = self._progress.text()
        return f" ({text})" if text else ""

    async def _fail(self, message: str, code: int) -> None:
        if self.state is State.DRAINING and code == EXIT_CANNOT_START:
            return  # a signal ended it before it could start
        self._state = State.DEAD
        try:
            _announce_failure(self.config.server, message)
            await self._until_idle(_LAST_WORDS_S)
            await self.close()
        finally:
            self._end(code)

    async def _until_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    def _end(self, code: int) -> None:
        if not self.over.done():
            self.over.set_result(code)


def _traffic_record(config: ServeConfig) -> TrafficRecord | None:
    """Raises InvalidConfig."""
    path = config.server.record_traffic
    settings = {"scheduler": asdict(config.engine.scheduler), "version": version()}
    return None if path is None else TrafficRecord(path, settings)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _url_of(server: ServerConfig) -> str:
    """Where this machine reaches it."""
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def _announce_ready(server: ServerConfig, model: ServedModel) -> None:
    url = _url_of(server)
    what = (
        f"penstock serves {model.name} ({model.info.architecture}, {model.info.dtype}, "
        f"{model.info.device}, context {model.info.max_model_len}) on {url}"
    )
    if server.log_format is LogFormat.JSON:
        logger.info("%s", what)
        return
    # No secret in a log.
    key = "-H 'Authorization: Bearer YOUR_KEY' " if server.api_keys else ""
    path, body = "/v1/completions", '"prompt": "Once upon a time", "max_tokens": 64'
    if not model.info.generates:
        path = "/v1/embeddings" if model.classifier is None else "/classify"
        body = '"input": "Once upon a time"'
    elif model.encoder.template_source is not None:
        path = "/v1/chat/completions"
        body = '"messages": [{"role": "user", "content": "Who are you?"}]'
    say(
        f"{what}\n\n"
        f"  curl {url}{path} {key}-H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model.name}", {body}}}\'\n',
        sys.stdout,
    )


def _announce_failure(server: ServerConfig, message: str) -> None:
    if server.log_format is LogFormat.JSON:
        logger.error("%s", message)
    else:
        # One line, whatever a file's name or a library's error has in it.
        say(f"penstock: error: {printable(message)}", sys.stderr)
