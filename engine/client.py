"""The one module of the engine that `server/` may import: everything that a server needs of it.

Importing it loads neither torch nor what is slow to load: `penstock --help` passes through here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.engine.config import (
    ADAPTER_FILES,  # the files that are read of a LoRA adapter
    AdapterSource,  # of --lora-modules
    AttentionBackend,  # --attention-backend
    Device,  # --device
    DraftMethod,  # of --speculative-config
    Dtype,  # --dtype
    EngineConfig,  # all settings
    KVCacheDtype,  # --kv-cache-dtype
    KVEventsConfig,  # --kv-events-config
    LoadFormat,  # --load-format
    LogFormat,  # --log-format
    LoraConfig,  # --enable-lora, and what goes with it
    ModelImpl,  # --model-impl
    Quantization,  # --quantization
    SpeculativeConfig,  # --speculative-config
)
from penstock.engine.errors import (
    AdapterRefused,  # a LoRA adapter cannot be loaded
    BadGrammar,  # a grammar does not compile
    EngineFailed,  # the engine could not start, or ended
    QueueFull,  # more answers are waiting than may; has the time to retry after
    RequestEndedEngine,  # the engine ended twice because of this request
    RequestRefused,  # the engine did not accept this request
)
from penstock.engine.files.gguf.file import (
    is_gguf,  # whether a path is a GGUF file, which is a model without a directory
    model_name,  # a GGUF file's
)
from penstock.engine.files.json_file import (
    read_json as read_model_json,  # a file of the model; an error names it
)
from penstock.engine.files.json_file import (
    read_object as read_model_object,  # a file of the model that holds an object
)
from penstock.engine.hub.model_files import (
    Download,  # the files that are not there yet
    ListedModel,  # a model in the hub's cache or a directory
    ModelFiles,  # what `open_model` returns
)
from penstock.engine.hub.model_files import size as shown_size  # as people read it: 16.4 GB
from penstock.engine.ipc.adapters import AdapterTable  # loads and unloads LoRA adapters
from penstock.engine.ipc.client import EngineClient  # starts the process, submits requests
from penstock.engine.ipc.streams import OutputStream  # the outputs of one request
from penstock.engine.ipc.supervisor import (
    EndCause,  # what ended an engine process
    EngineState,  # starting, ready, restarting or dead
)
from penstock.engine.process.garbage import (
    importing,  # around the imports of a start
    uncollected,  # while many objects are made
)
from penstock.engine.process.logs import (
    CLEAR_LINE,  # begins a line that is drawn again
    is_terminal,  # whether a line on it may be drawn again
    printable,  # escapes control characters
    say,  # prints for a person
)
from penstock.engine.process.logs import (
    configure as configure_logs,  # sets level, format and the current request's id
)
from penstock.engine.process.logs import fields as log_fields  # what a line has beside its message
from penstock.engine.process.logs import flush_all as flush_logs  # before os._exit
from penstock.engine.process.phases import LoadProgress  # the phase of the start, and how far it is
from penstock.engine.process.python_path import python_path  # of a process of this package
from penstock.engine.step.messages import (
    StepReport,  # what one step computed, for metrics
    new_request_id,  # from the HTTP request's id
)
from penstock.engine.step.model_info import (
    LoadedAdapter,  # a LoRA adapter that requests may name
    ModelInfo,  # the loaded model: sizes, limits, device, peaks
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
    be served. Without a network, a snapshot downloaded before still serves."""
    from penstock.engine.hub.local import open_local

    needs_weights = config.load_format is LoadFormat.AUTO and not config.scripted
    local = open_local(config.model, needs_weights=needs_weights, impl=config.model_impl)
    if local is not None:
        return local
    from penstock.engine.hub.hub import open_model

    return open_model(config.model, needs_weights=needs_weights, impl=config.model_impl)


def with_local_adapters(config: LoraConfig) -> LoraConfig:
    """Downloads adapters that are named as on the hub. Raises PenstockError."""
    from penstock.engine.hub.adapters import with_local_adapters

    return with_local_adapters(config)


def cached_models() -> list[ListedModel]:
    """Those in the cache of Hugging Face's hub."""
    from penstock.engine.hub.catalog import cached_models

    return cached_models()


def models_in(directory: Path) -> list[ListedModel]:
    """Those in a directory, itself or below it. Raises PenstockError if there is no such one."""
    from penstock.engine.hub.catalog import models_in

    return models_in(directory)


def convert_tokenizer(path: Path) -> tuple[str, dict[str, str]] | None:
    """A GGUF file's tokenizer, or a directory's tokenizer.model or tekken.json, as a
    tokenizer.json, with bos_token, eos_token ... of a directory; None for what is neither. Raises
    PenstockError."""
    from penstock.engine.files.gguf.tokenizer import read_tokenizer
    from penstock.engine.files.tokenizer_model import read_tokenizer_model

    return (read_tokenizer(path), {}) if is_gguf(path) else read_tokenizer_model(path)


def load_dummy_tokenizer(directory: Path, load_format: LoadFormat) -> "Tokenizer | None":
    """A made-up tokenizer of the model's vocabulary size, where the weights are dummies and the
    directory has no tokenizer; else None. Raises PenstockError for an invalid config.json."""
    from penstock.engine.files.dummy_tokenizer import dummy_tokenizer, needs_dummy_tokenizer
    from penstock.engine.hub.check import read_model

    if not needs_dummy_tokenizer(directory, load_format):
        return None
    return dummy_tokenizer(read_model(directory).vocab_size)
