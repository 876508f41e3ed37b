"""From the flags that were given to a `ServeConfig`. What they are is in `serve_flags`."""

import argparse
import os
from collections import Counter
from importlib.resources import files
from pathlib import Path

from penstock.engine.client import EngineConfig, LoraConfig, model_name
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.server.config import CorsConfig, ServeConfig, ServerConfig
from penstock.server.flags.flag import config_of
from penstock.server.flags.flag_parser import ENVIRONMENT_PREFIX, FlagParser
from penstock.server.flags.flag_values import keys_in
from penstock.server.flags.serve_flags import DEMO_NAMES, FLAGS


def serve_config(options: argparse.Namespace) -> ServeConfig:
    """Makes the tree of what was given. Raises InvalidConfig."""
    model = options.model or options.model_flag
    own_names: tuple[str, ...] = DEMO_NAMES
    if model:  # as it was named, but of a GGUF file its name alone
        own_names = (model_name(Path(model)) if model.endswith(".gguf") else model,)
    file = options.api_key_file
    keys = keys_in(file, "--api-key-file") if file else ()
    server = config_of(
        ServerConfig,
        FLAGS,
        options,
        served_model_names=tuple(options.served_model_name or own_names),
        api_keys=(*(options.api_key or ()), *keys),
        cors=config_of(CorsConfig, FLAGS, options),
    )
    engine = config_of(
        EngineConfig,
        FLAGS,
        options,
        model=model or str(files("penstock.engine.hub") / "demo_model"),
        lora=_lora(options),
        takes_images=not options.language_model_only and server.max_images > 0,
        scheduler=config_of(SchedulerConfig, FLAGS, options),
    )
    return ServeConfig(server=server, engine=engine)


def config_file(arguments: list[str]) -> Path | None:
    """Its values must be known before the other flags are parsed."""
    parser = FlagParser(prog="penstock serve", add_help=False)
    parser.add_argument("--config", default=os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG"))
    config, _ = parser.parse_known_args([each for each in arguments if each != "--"])
    return Path(config.config) if config.config else None


def _lora(options: argparse.Namespace) -> LoraConfig | None:
    """Raises InvalidConfig."""
    if not options.enable_lora:
        if options.lora_modules:
            raise InvalidConfig("--lora-modules requires --enable-lora")
        return None
    if len(options.lora_modules) > options.max_loras:
        raise InvalidConfig(
            f"--lora-modules has {len(options.lora_modules)} adapters, which all stay in memory, "
            f"and --max-loras is {options.max_loras}; raise it"
        )
    counts = Counter(source.name for source in options.lora_modules)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InvalidConfig(f"--lora-modules has {twice[0]!r} twice; names must differ")
    return config_of(LoraConfig, FLAGS, options)
