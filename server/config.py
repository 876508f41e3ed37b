"""The server's settings, and the tree that joins them with the engine's.

It knows the settings and their limits, not the packages that use them.
"""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.engine.client import EngineConfig, LogFormat, python_path
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import Pooling

MIB = 1 << 20
DEFAULT_MAX_IMAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsConfig:
    """The pages of other origins that browsers allow to call the server; by default none."""

    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """How embeddings are made, vLLM's `--pooler-config`; None takes the model's own setting."""

    pooling: Pooling | None = None
    normalize: bool | None = None


class DuringRestart(StrEnum):
    """How requests fare that arrive while the engine restarts."""

    REFUSE = "refuse"  # status 503, so that a load balancer asks another server
    WAIT = "wait"  # they wait as in a full server, with the same limit


class MetricsAlias(StrEnum):
    """Another server whose names the metrics are also shown under."""

    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, its names, and which requests it accepts.

    The help of its flag describes each setting (`penstock.server.flags.serve_flags`).
    api_keys empty: no key is needed. handover_key, admin_key: None for nobody. tool_call_parser,
    reasoning_parser: a name, "none", or None to detect it from the chat template.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    handover_key: str | None = None
    admin_key: str | None = None
    lora_root: Path | None = None
    cors: CorsConfig = CorsConfig()
    allowed_hosts: tuple[str, ...] = ()
    forwarded_allow_ips: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    request_timeout_s: float | None = None
    max_body_bytes: int = 16 * MIB
    shutdown_timeout_s: float = 30.0
    during_restart: DuringRestart = DuringRestart.REFUSE
    sse_ping_interval_s: float = 15.0
    max_stored_responses: int = 4096
    max_stored_response_bytes: int = 256 * MIB
    chat_template: Path | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    pooler: PoolerConfig = PoolerConfig()
    max_images: int = DEFAULT_MAX_IMAGES
    image_options: Mapping[str, Any] | None = None
    allowed_media_domains: tuple[str, ...] = ()
    has_page: bool = True
    log_level: str = "info"
    log_format: LogFormat = LogFormat.TEXT
    log_requests: bool = False
    strict_fields: bool = False
    metrics_alias: MetricsAlias | None = None
    otlp_traces_endpoint: str | None = None
    record_traffic: Path | None = None

    def __post_init__(self) -> None:
        if not self.host:
            raise InvalidConfig("--host is empty; 0.0.0.0 accepts other machines")
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"--port is {self.port}; it must be between 0 and 65535")
        if self.max_body_bytes < 1:
            raise InvalidConfig("--max-body-bytes must be at least 1")
        for each in self.forwarded_allow_ips:
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise InvalidConfig(
                    f"--forwarded-allow-ips: {error}; write it like 127.0.0.1 or 10.0.0.0/8"
                ) from None
        if self.shutdown_timeout_s < 0:
            raise InvalidConfig("--shutdown-timeout must not be negative")
        if self.max_stored_responses < 0 or self.max_stored_response_bytes < 0:
            raise InvalidConfig(
                "--max-stored-responses and --max-stored-response-bytes must not be negative"
            )
        if self.max_images < 0:
            raise InvalidConfig("--limit-mm-per-prompt must not be negative")
        if self.sse_ping_interval_s <= 0:
            raise InvalidConfig("--sse-ping-interval must be positive")
        if "" in self.api_keys:
            raise InvalidConfig("--api-key is empty; give a key, or leave the flag out for none")
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise InvalidConfig(f"--root-path is {self.root_path}; write it like /llm")
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise InvalidConfig("--request-timeout must be positive")
        url = self.otlp_traces_endpoint
        if url is not None and not url.startswith(("http://", "https://")):
            raise InvalidConfig(
                f"--otlp-traces-endpoint is {url}; write it like http://localhost:4318/v1/traces"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise InvalidConfig("--ssl-keyfile requires --ssl-certfile")
        for flag, path in (("key", self.ssl_keyfile), ("cert", self.ssl_certfile)):
            if path and not path.is_file():
                raise InvalidConfig(f"--ssl-{flag}file: there is no file {path}")
        if (self.lora_root is None) != (self.admin_key is None):
            raise InvalidConfig(
                "--lora-root and --admin-key-file go together: adapters are loaded from the one, "
                "while the server runs, by who has the other"
            )
        if self.lora_root and not self.lora_root.is_dir():
            raise InvalidConfig(f"--lora-root: there is no directory {self.lora_root}")
        if self.chat_template and not self.chat_template.is_file():
            raise InvalidConfig(f"--chat-template: there is no file {self.chat_template}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """All settings of `penstock serve`."""

    server: ServerConfig
    engine: EngineConfig

    def __post_init__(self) -> None:
        lora = self.engine.lora
        if self.server.lora_root and lora is None:
            raise InvalidConfig("--lora-root requires --enable-lora")
        for source in lora.adapters if lora else ():
            if source.name in self.server.served_model_names:
                raise InvalidConfig(
                    f"--lora-modules has an adapter {source.name!r}, which is a name of the model"
                )


_NEEDED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


def bare_environment() -> dict[str, str]:
    """Returns no more than the interpreter needs to run a module of this package. Processes that
    work on what a client has sent get it: keys and tokens of the server are none of it."""
    needed = {name: os.environ[name] for name in _NEEDED_VARIABLES if name in os.environ}
    return needed | {"PYTHONPATH": python_path()}
