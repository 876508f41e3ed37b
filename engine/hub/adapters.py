"""LoRA adapters of Hugging Face's hub, by the name of their repository."""

import re
from dataclasses import replace
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from penstock.engine.config import ADAPTER_FILES, LoraConfig
from penstock.engine.hub.download import explain
from penstock.engine.models.errors import InvalidModel

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def with_local_adapters(config: LoraConfig) -> LoraConfig:
    """Downloads those whose path is no directory and looks like a name of the hub; without a
    network, what was downloaded earlier is used. Raises InvalidModel."""
    sources = (replace(each, path=_local(each.path)) for each in config.adapters)
    return replace(config, adapters=tuple(sources))


def _local(path: str) -> str:
    if Path(path).exists() or not _HUB_ID.fullmatch(path):
        return path
    settings, _ = [Path(_file(path, name)) for name in ADAPTER_FILES]
    return str(settings.parent)


def _file(repository: str, name: str) -> str:
    """Returns its path. Raises InvalidModel."""
    try:
        return hf_hub_download(repository, name)
    except Exception as error:  # the hub's client also raises errors of its transport
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise InvalidModel(
                f"{repository} has no {name}, so it is no LoRA adapter as PEFT saves it"
            ) from None
        raise explain(repository, error) from None
