"""The server's settings, and the tree that joins them with the engine's."""

from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from scheduler.errors import InvalidConfig

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where it listens, what it is called, and what it lets in.

    api_key None: no key is asked for. chat_template None: the one beside the model.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...]
    api_key: str | None = None
    max_body_bytes: int = 32 * MIB
    shutdown_timeout_s: float = 30.0
    sse_ping_interval_s: float = 15.0
    chat_template: Path | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"--port is {self.port}; it must be between 0 and 65535")
        if self.max_body_bytes < 1:
            raise InvalidConfig("--max-body-bytes must be at least 1")
        if self.shutdown_timeout_s < 0:
            raise InvalidConfig("--shutdown-timeout must not be negative")
        if self.sse_ping_interval_s <= 0:
            raise InvalidConfig("--sse-ping-interval must be positive")
        if self.api_key == "":
            raise InvalidConfig("--api-key is empty; give a key, or leave the flag out for none")
        if self.chat_template and not self.chat_template.is_file():
            raise InvalidConfig(f"--chat-template: there is no file {self.chat_template}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything that `penstock serve` is told."""

    server: ServerConfig
    engine: EngineConfig
