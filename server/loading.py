"""Loads what serves a model: its files, the engine's process and the tokenizer, both at once."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from penstock.engine.client import EngineClient, LoadProgress, ModelInfo, resolve_model
from penstock.server.config import ServeConfig
from penstock.server.observability.progress import Progress
from penstock.server.output.pooling import Pooler
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from penstock.server.structured.grammar_checker import GrammarChecker
from penstock.server.tools.chat_format import ChatFormat

logger = logging.getLogger("penstock")


async def find_model(model: str, progress: Progress) -> Path:
    """Its directory; downloads what is missing of a hub id. Raises PenstockError."""
    what = f"looking for {model}; what is missing is downloaded from Hugging Face"
    is_download = not _is_here(model)
    phase = progress.phase("model", what, has_own_bar=True)
    with phase if is_download else contextlib.nullcontext():
        return await asyncio.to_thread(resolve_model, model)


async def load_model(
    config: ServeConfig, directory: Path, engine: EngineClient, progress: Progress
) -> ServedModel:
    """Starts the engine with it. Raises PenstockError."""
    encoder, info = await asyncio.gather(
        _load_encoder(config, directory, progress), _start(engine, progress)
    )
    return ServedModel(
        names=config.server.served_model_names,
        created_s=int(time.time()),
        info=info,
        encoder=encoder,
        defaults=GenerationDefaults.load(directory),
        pooler=Pooler.load(directory, config.server.pooler, info.hidden_size),
        grammars=GrammarChecker(directory, info, config.engine.load_format),
        chat_format=ChatFormat.detect(
            encoder.template_source,
            config.server.tool_call_parser,
            config.server.reasoning_parser,
            trusts_templates=config.server.trust_request_chat_template,
        ),
    )


def _is_here(model: str) -> bool:
    return Path(model).expanduser().exists()


async def _load_encoder(config: ServeConfig, directory: Path, progress: Progress) -> PromptEncoder:
    with progress.phase("tokenizer", f"reading it from {directory}"):
        return await asyncio.to_thread(
            PromptEncoder.load,
            directory,
            config.server.chat_template,
            config.engine.load_format,
        )


async def _start(engine: EngineClient, progress: Progress) -> ModelInfo:
    logger.info("engine: starting its process")
    progress.on_engine(LoadProgress("engine"))  # until it reports phases itself
    try:
        return await engine.start()
    finally:
        progress.end_engine()
