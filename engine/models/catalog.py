"""The models on this machine: in the hub's cache and in directories, and which can be served."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import CachedRepoInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from penstock.engine.models.check import CONFIG, check_directory
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats import not_a_directory
from penstock.engine.models.json_file import Fields
from penstock.engine.models.listed_model import ListedModel

# What makes a directory a model's, whether it can be served or not.
_MARKS = (
    *("config.json", "adapter_config.json", "params.json"),
    *("*.safetensors", "*.gguf", "*.bin", "*.pth", "*.onnx"),
)
_MAX_DEPTH = 3


def cached_models() -> list[ListedModel]:
    """Of the hub's cache, by name: of each model the revision that a start uses. Raises
    InvalidModel if the cache is not a directory."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    except ValueError:  # of scan_cache_dir, for what is no directory
        raise InvalidModel(
            f"the cache of the hub, {constants.HF_HUB_CACHE}, is not a directory; set HF_HOME to "
            "one, or delete it"
        ) from None
    models = sorted(
        (each for each in repositories if each.repo_type == "model" and each.revisions),
        key=lambda each: each.repo_id,
    )
    return [_cached(model) for model in models]


def models_in(directory: Path) -> list[ListedModel]:
    """Of a model's directory, or of one that has some below it. Raises InvalidModel if there is no
    such directory."""
    if not directory.is_dir():
        raise not_a_directory(str(directory))
    found = list(_find(directory, _MAX_DEPTH)) or [directory]
    return [_listed(str(path), path, _num_bytes(path)) for path in found]


def _cached(model: CachedRepoInfo) -> ListedModel:
    revision = model.refs.get("main") or max(model.revisions, key=lambda each: each.last_modified)
    listed = _listed(model.repo_id, revision.snapshot_path, revision.size_on_disk)
    if listed.problem and any(model.repo_path.glob("blobs/*.incomplete")):
        problem = "its download is not complete; penstock serve continues it"
        return dataclasses.replace(listed, problem=problem)
    return listed


def _listed(name: str, path: Path, num_bytes: int) -> ListedModel:
    family, problem = None, None
    try:
        family = check_directory(path).family
    except InvalidModel as error:
        family = _family(path)
        problem = error.brief.replace(f"{path}/", "")
    return ListedModel(name=name, path=path, num_bytes=num_bytes, family=family, problem=problem)


def _family(path: Path) -> str | None:
    """As config.json has it, whatever it is."""
    try:
        fields = Fields.read(path / CONFIG)
        return fields.text("model_type") or next(iter(fields.names("architectures") or ()), None)
    except InvalidModel:
        return None


def _find(directory: Path, depth: int) -> Iterator[Path]:
    entries = sorted(_entries(directory))
    if any(fnmatchcase(entry.name, mark) for entry in entries for mark in _MARKS):
        yield directory
    elif depth:
        for entry in entries:
            # Of os.path: False for what may not be looked at, which pathlib raises for.
            if os.path.isdir(entry) and not entry.name.startswith("."):  # noqa: PTH112
                yield from _find(entry, depth - 1)


def _entries(directory: Path) -> Iterable[Path]:
    try:
        return list(directory.iterdir())
    except OSError:  # not ours to read
        return []


def _num_bytes(directory: Path) -> int:
    num_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # a broken link, or not ours to read
                num_bytes += (Path(parent) / name).stat().st_size
    return num_bytes
