"""Loads what serves a model, in steps: its files, the tokenizer, the weights, the engine."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.engine.client import (
    Download,
    EngineClient,
    LoadProgress,
    ModelFiles,
    ModelInfo,
    open_model,
)
from penstock.server.config import ServeConfig
from penstock.server.observability.progress import Progress
from penstock.server.output.pooling import Pooler
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from penstock.server.structured.grammar_checker import GrammarChecker
from penstock.server.tools.chat_format import ChatFormat

logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """The files of a model that the server's process reads."""

    encoder: PromptEncoder
    defaults: GenerationDefaults
    pooler: Pooler


async def find_model(config: ServeConfig, progress: Progress) -> ModelFiles:
    """Raises PenstockError for a model that cannot be served."""
    model = config.engine.model
    phase = progress.phase("model", f"asking Hugging Face for {model}")
    with contextlib.nullcontext() if _is_here(model) else phase:
        return await asyncio.to_thread(open_model, config.engine)


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
    files, info = await asyncio.gather(prompt_files, _start(engine, progress))
    return ServedModel(
        names=config.server.served_model_names,
        created_s=int(time.time()),
        info=info,
        encoder=files.encoder,
        defaults=files.defaults,
        pooler=replace(files.pooler, hidden_size=info.hidden_size),
        grammars=GrammarChecker(directory, info, config.engine.load_format),
        chat_format=ChatFormat.detect(
            files.encoder.template_source,
            config.server.tool_call_parser,
            config.server.reasoning_parser,
            trusts_templates=config.server.trust_request_chat_template,
        ),
    )


def _is_here(model: str) -> bool:
    # Of os.path: leaves the ~ of an unknown user as it is, which pathlib raises for.
    return os.path.exists(os.path.expanduser(model))  # noqa: PTH110, PTH111


def _read_prompt_files(config: ServeConfig, directory: Path) -> PromptFiles:
    encoder = PromptEncoder.load(directory, config.server.chat_template, config.engine.load_format)
    encoder.try_out_template()
    return PromptFiles(
        defaults=GenerationDefaults.load(directory),
        # The engine knows the size, later.
        pooler=Pooler.load(directory, config.server.pooler, hidden_size=0),
        encoder=encoder,
    )


async def _start(engine: EngineClient, progress: Progress) -> ModelInfo:
    logger.info("engine: starting its process")
    progress.on_engine(LoadProgress("engine"))  # until it reports phases itself
    try:
        return await engine.start()
    finally:
        progress.end_engine()
