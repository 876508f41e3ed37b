"""`ServedModel`, all that the server knows of a model, and how it is loaded: its files, the
tokenizer, the weights, the engine."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.engine.client import (
    Download,
    EngineClient,
    EngineConfig,
    LoadedAdapter,
    LoadProgress,
    LoraConfig,
    ModelFiles,
    ModelImpl,
    ModelInfo,
    is_gguf,
    open_model,
    with_local_adapters,
)
from penstock.scheduler.errors import InvalidConfig
from penstock.server.config import ServeConfig
from penstock.server.media.decoder import ImageDecoder
from penstock.server.media.families import ImageFamily
from penstock.server.media.fetcher import ImageFetcher
from penstock.server.media.reader import ImageReader
from penstock.server.observability.progress import Progress
from penstock.server.observability.version import version
from penstock.server.output.classifier import Classifier
from penstock.server.output.pooling import Pooler
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from penstock.server.prompt.words import NamedPrompts, PairFormat
from penstock.server.structured.grammar_checker import GrammarChecker
from penstock.server.tools.chat_format import ChatFormat

logger = logging.getLogger("penstock")

_IMAGE_SETTINGS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The first name is the one that answers carry.

    grammars None: grammars are not compiled before the engine sees them. images None: it takes
    none. classifier, pairs None: it does not classify, or score pairs of texts. adapter: with which
    the model is served under this name.
    """

    names: tuple[str, ...]
    created_s: int
    info: ModelInfo
    encoder: PromptEncoder
    defaults: GenerationDefaults
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    grammars: GrammarChecker | None = None
    images: ImageReader | None = None
    pooler: Pooler = field(default_factory=Pooler)
    prompts: NamedPrompts = field(default_factory=NamedPrompts)
    classifier: Classifier | None = None
    pairs: PairFormat | None = None
    adapter: LoadedAdapter | None = None

    @property
    def adapter_id(self) -> str | None:
        return None if self.adapter is None else self.adapter.id

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def fingerprint(self) -> str:
        """Changes when anything does that may change a seeded answer."""
        info = self.info
        dtype = "_".join(dict.fromkeys((info.dtype, info.kv_cache_dtype)))
        base = f"fp_penstock_{version()}_{info.architecture}_{dtype}_{info.device}"
        digest = (self.adapter_id or "").rpartition("@")[2]
        return f"{base}_{digest[:8]}" if digest else base

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    @property
    def max_prompt_chars(self) -> int:
        """No longer text fits: every token of it would have to be the longest there is."""
        return self.info.max_model_len * self.encoder.max_token_chars


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """The files of a model that the server's process reads."""

    encoder: PromptEncoder
    defaults: GenerationDefaults
    pooler: Pooler
    prompts: NamedPrompts


async def find_model(config: ServeConfig, progress: Progress) -> ModelFiles:
    """Raises PenstockError for a model that cannot be served."""
    model = config.engine.model
    phase = progress.phase("model", f"asking Hugging Face for {model}")
    with contextlib.nullcontext() if _is_here(model) else phase:
        return await asyncio.to_thread(open_model, config.engine)


async def with_draft_model(
    config: EngineConfig, prompt_files: Awaitable[PromptFiles], progress: Progress
) -> EngineConfig:
    """Finds the model that is to propose drafts, and downloads it. Raises PenstockError for one
    that cannot."""
    wanted = config.speculative
    if wanted is None or wanted.model is None or not wanted.has_model:
        return config
    settings = replace(config, model=wanted.model, model_impl=ModelImpl.PENSTOCK)
    files = await asyncio.to_thread(open_model, settings)
    encoder = (await prompt_files).encoder
    if files.download and is_gguf(files.directory):  # which has the tokenizer too
        await download_weights(files.download, progress)
        files = replace(files, download=None)
    await asyncio.to_thread(encoder.check_alike, files.directory, config.load_format)
    if files.download:
        await download_weights(files.download, progress)
    return replace(config, speculative=replace(wanted, model=str(files.directory)))


async def find_adapters(config: LoraConfig | None, progress: Progress) -> LoraConfig | None:
    """Raises PenstockError for one that is neither here nor on the hub."""
    if config is None or all(_is_here(adapter.path) for adapter in config.adapters):
        return config
    with progress.phase("adapters", "asking Hugging Face for them"):
        return await asyncio.to_thread(with_local_adapters, config)


async def read_prompt_files(
    config: ServeConfig, directory: Path, progress: Progress
) -> PromptFiles:
    """Raises PenstockError."""
    with progress.phase("tokenizer", f"reading it from {directory}"):
        return await asyncio.to_thread(_read_prompt_files, config, directory)


async def download_weights(download: Download, progress: Progress) -> None:
    """Raises PenstockError."""
    with progress.phase("download", download.what, download.state):
        await asyncio.to_thread(download.run)


async def load_model(
    config: ServeConfig,
    directory: Path,
    prompt_files: Awaitable[PromptFiles],
    engine: EngineClient,
    progress: Progress,
) -> ServedModel:
    """Starts the engine with it. Raises PenstockError."""
    reading = _image_reader(config, directory, prompt_files, engine)
    starting, images = asyncio.create_task(reading), None
    try:
        files, info = await asyncio.gather(prompt_files, _start(engine, progress))
        images = await starting if info.encoder else None
    finally:
        if images is None:
            starting.add_done_callback(_close_unused)
    return ServedModel(
        names=config.server.served_model_names,
        created_s=int(time.time()),
        info=info,
        encoder=files.encoder,
        defaults=files.defaults,
        pooler=files.pooler.of(info),
        prompts=files.prompts,
        classifier=Classifier.load(directory, info),
        pairs=PairFormat.of(files.encoder, directory, info),
        grammars=GrammarChecker(directory, info, config.engine.load_format),
        images=images,
        chat_format=ChatFormat.detect(
            files.encoder.template_source,
            config.server.tool_call_parser,
            config.server.reasoning_parser,
            tool_template=files.encoder.tool_template_source,
            trusts_templates=config.server.trust_request_chat_template,
        ),
    )


async def _image_reader(
    config: ServeConfig,
    directory: Path,
    prompt_files: Awaitable[PromptFiles],
    engine: EngineClient,
) -> ImageReader | None:
    """None for a model that takes no images, or does not say how. Raises InvalidConfig."""
    server, encoder = config.server, (await prompt_files).encoder
    if not config.engine.takes_images:
        return None
    family = ImageFamily.load(directory, lambda token_id: encoder.token_names([token_id])[0])
    if family is None:
        return None
    if not any((directory / name).is_file() for name in _IMAGE_SETTINGS):
        logger.warning(
            "%s has no %s, which says how images are read, so that the model takes text alone",
            directory,
            _IMAGE_SETTINGS[0],
        )
        return None
    try:
        options = family.read_options(server.image_options or {})
    except ValueError as error:
        raise InvalidConfig(f"--mm-processor-kwargs: {error}") from error
    decoder = ImageDecoder(family)
    fetcher = ImageFetcher(server.allowed_media_domains, server.max_body_bytes)
    await decoder.start()
    return ImageReader(
        family,
        decoder,
        fetcher,
        server.max_images,
        options,
        lambda: engine.streams.num_insert_bytes,
    )


def _close_unused(starting: "asyncio.Task[ImageReader | None]") -> None:
    """Its errors are nobody's: the engine takes no images of this model, or has failed."""
    if not starting.cancelled() and not starting.exception() and (images := starting.result()):
        images.close()


def _is_here(model: str) -> bool:
    # os.path leaves the ~ of an unknown user as it is, which pathlib raises for.
    return os.path.exists(os.path.expanduser(model))  # noqa: PTH110, PTH111


def _read_prompt_files(config: ServeConfig, directory: Path) -> PromptFiles:
    encoder = PromptEncoder.load(directory, config.server.chat_template, config.engine.load_format)
    encoder.try_out_templates()
    return PromptFiles(
        defaults=GenerationDefaults.load(directory),
        # The engine knows the size, later.
        pooler=Pooler.load(directory, config.server.pooler),
        prompts=NamedPrompts.load(directory),
        encoder=encoder,
    )


async def _start(engine: EngineClient, progress: Progress) -> ModelInfo:
    logger.info("engine: starting its process")
    progress.on_engine(LoadProgress("engine"))  # until it reports phases itself
    try:
        return await engine.start()
    finally:
        progress.end_engine()
