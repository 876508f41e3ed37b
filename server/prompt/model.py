"""`ServedModel`: all that the server knows of the model once it is loaded."""

from dataclasses import dataclass, field, replace

from penstock.engine.client import LoadedAdapter, ModelInfo
from penstock.server.observability.version import version
from penstock.server.output.pooling import Pooler
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from penstock.server.structured.grammar_checker import GrammarChecker
from penstock.server.tools.chat_format import ChatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The first name is the one that answers carry.

    grammars None: grammars are not compiled before the engine sees them. adapter: with which the
    model is served under this name.
    """

    names: tuple[str, ...]
    created_s: int
    info: ModelInfo
    encoder: PromptEncoder
    defaults: GenerationDefaults
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    grammars: GrammarChecker | None = None
    pooler: Pooler = field(default_factory=Pooler)
    adapter: LoadedAdapter | None = None

    def with_adapter(self, adapter: LoadedAdapter) -> "ServedModel":
        return replace(self, names=(adapter.name,), adapter=adapter)

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
        dtype = (
            info.dtype
            if info.kv_cache_dtype == info.dtype
            else f"{info.dtype}_{info.kv_cache_dtype}"
        )
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
