"""The one module of the engine that `server/` may import: everything that a server needs of it.

Importing it loads neither torch nor what is slow to load: `penstock --help` passes through here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.engine.config import (
    ADAPTER_FILES,
    AdapterSource,
    AttentionBackend,
    Device,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    KVEventsConfig,
    LoadFormat,
    LogFormat,
    LoraConfig,
    ModelImpl,
    Quantization,
)
from penstock.engine.errors import (
    AdapterRefused,
    BadGrammar,
    EngineFailed,
    QueueFull,
    RequestEndedEngine,
    RequestRefused,
)
from penstock.engine.files.gguf.file import is_gguf, model_name
from penstock.engine.files.gguf.tokenizer import read_tokenizer as read_gguf_tokenizer
from penstock.engine.files.json_file import read_json as read_model_json
from penstock.engine.files.json_file import read_object as read_model_object
from penstock.engine.hub.listed_model import ListedModel
from penstock.engine.hub.model_files import Download, ModelFiles
from penstock.engine.ipc.adapters import AdapterTable
from penstock.engine.ipc.client import EngineClient
from penstock.engine.ipc.streams import OutputStream
from penstock.engine.ipc.supervisor import EndCause, EngineState
from penstock.engine.loop.messages import StepReport
from penstock.engine.process.log_writer import flush_all as flush_logs
from penstock.engine.process.logs import CLEAR_LINE, is_terminal, printable, say
from penstock.engine.process.logs import configure as configure_logs
from penstock.engine.process.logs import fields as log_fields
from penstock.engine.process.phases import LoadProgress
from penstock.engine.process.request_ids import new_request_id
from penstock.engine.step.model_info import LoadedAdapter, ModelInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer


__all__ = [  # noqa: RUF022  # in groups
    # The engine process and its requests.
    "EngineClient",  # starts the process, submits requests
    "EngineState",  # starting, ready, restarting or dead
    "EndCause",  # what ended an engine process
    "new_request_id",  # from the HTTP request's id
    "OutputStream",  # the outputs of one request
    "ModelInfo",  # the loaded model: sizes, limits, device, peaks
    "AdapterTable",  # loads and unloads LoRA adapters
    "LoadedAdapter",  # a LoRA adapter that requests may name
    "LoadProgress",  # the phase of the start, and how far it is
    "StepReport",  # what one step computed, for metrics
    # Settings.
    "EngineConfig",  # all of them
    "AttentionBackend",  # --attention-backend
    "Device",  # --device
    "Dtype",  # --dtype
    "KVCacheDtype",  # --kv-cache-dtype
    "KVEventsConfig",  # --kv-events-config
    "LoadFormat",  # --load-format
    "ModelImpl",  # --model-impl
    "Quantization",  # --quantization
    "LogFormat",  # --log-format
    "LoraConfig",  # --enable-lora, and what goes with it
    "AdapterSource",  # of --lora-modules
    "ADAPTER_FILES",  # those that are read of one
    # Logs, which both processes write alike.
    "configure_logs",  # sets level, format and the current request's id
    "log_fields",  # what a line has beside its message
    "printable",  # escapes control characters
    "say",  # prints for a person
    "flush_logs",  # before os._exit
    "is_terminal",  # whether a line on it may be drawn again
    "CLEAR_LINE",  # what begins such a line
    # Errors, whose messages are sentences for a client or an operator.
    "AdapterRefused",  # a LoRA adapter cannot be loaded
    "EngineFailed",  # the engine could not start, or ended
    "QueueFull",  # more answers are waiting than may; has the time to retry after
    "RequestEndedEngine",  # the engine ended twice because of this request
    "RequestRefused",  # the engine did not accept this request
    "BadGrammar",  # a grammar does not compile
    # The model's files.
    "open_model",  # from a path or hub id to a directory or GGUF file, checked
    "ModelFiles",  # what it returns
    "Download",  # of what is not there yet
    "cached_models",  # those in the hub's cache, and which can be served
    "models_in",  # those in a directory
    "ListedModel",  # one of them
    "shown_size",  # bytes as people read them
    "read_model_json",  # one of them; an error names it
    "read_model_object",  # one that holds an object
    "load_dummy_tokenizer",  # for dummy weights without a tokenizer
    "is_gguf",  # whether a path is a GGUF file, which is a model without a directory
    "model_name",  # of one
    "read_gguf_tokenizer",  # of one, as a tokenizer.json
    # Structured output.
    "GrammarCompiler",  # compiles grammars for one model
    "load_grammar_compiler",  # makes one
]


class GrammarCompiler(Protocol):
    """Compiles grammars in llguidance's notation for one model's tokenizer."""

    def compile(self, grammar: str) -> Any:
        """Compiles here and now, as the engine will; it may take any time and memory, or end the
        process. Raises BadGrammar."""
        ...


def load_grammar_compiler(
    directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...], load_format: LoadFormat
) -> GrammarCompiler:
    """Reads nothing yet: the first grammar loads the tokenizer."""
    from penstock.engine.sampling.grammar import GrammarCompiler

    return GrammarCompiler(directory, vocab_size, eos_token_ids, load_format)


def open_model(config: EngineConfig) -> ModelFiles:
    """The model's files, all but the weights of a hub id. Raises PenstockError for one that cannot
    be served.

    Without a network, a snapshot downloaded before still serves.
    """
    from penstock.engine.hub.hub import open_model

    needs_weights = config.load_format is LoadFormat.AUTO and not config.scripted
    return open_model(config.model, needs_weights=needs_weights, impl=config.model_impl)


def cached_models() -> list[ListedModel]:
    """Those in the cache of Hugging Face's hub."""
    from penstock.engine.hub.catalog import cached_models

    return cached_models()


def models_in(directory: Path) -> list[ListedModel]:
    """Those in a directory, itself or below it. Raises PenstockError if there is no such one."""
    from penstock.engine.hub.catalog import models_in

    return models_in(directory)


def shown_size(num_bytes: int) -> str:
    """As people read it: 16.4 GB."""
    from penstock.engine.hub.progress import size

    return size(num_bytes)


def load_dummy_tokenizer(directory: Path, load_format: LoadFormat) -> "Tokenizer | None":
    """A made-up tokenizer of the model's vocabulary size, where the weights are dummies and the
    directory has no tokenizer; else None. Raises PenstockError for an invalid config.json."""
    from penstock.engine.files.dummy_tokenizer import dummy_tokenizer, needs_dummy_tokenizer
    from penstock.engine.hub.implementation import read_model

    if not needs_dummy_tokenizer(directory, load_format):
        return None
    return dummy_tokenizer(read_model(directory).vocab_size)
