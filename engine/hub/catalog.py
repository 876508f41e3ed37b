"""The models on this machine: in the hub's cache and in directories, and which can be served."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import CachedRepoInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from penstock.engine.files.gguf.file import is_gguf, open_gguf, split_names
from penstock.engine.files.json_file import CONFIG, Fields
from penstock.engine.hub.check import check_directory, holds_gguf
from penstock.engine.hub.gguf import check_gguf, gguf_models
from penstock.engine.hub.model_files import ListedModel
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families.unsupported import not_a_model

# A directory with one of these is a model's, whether it can be served or not.
_MARKS = (
    *("config.json", "adapter_config.json", "params.json"),
    *("*.safetensors", "*.gguf", "*.bin", "*.pth", "*.onnx"),
)
_MAX_DEPTH = 3


def cached_models() -> list[ListedModel]:
    """Lists those of the hub's cache, by name: of each the revision that a start uses. Raises
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
    return [listed for model in models for listed in _cached(model)]


def models_in(directory: Path) -> list[ListedModel]:
    """Lists a model's directory, or those below one. Raises InvalidModel if there is no such
    directory."""
    if is_gguf(directory) and directory.is_file():
        return [_listed(str(directory), directory, _num_bytes(directory))]
    if not directory.is_dir():
        raise not_a_model(str(directory))
    found = list(_find(directory, _MAX_DEPTH)) or [directory]
    paths = [path for each in found for path in _gguf_files(each, _entries(each)) or [each]]
    return [_listed(str(path), path, _num_bytes(path)) for path in paths]


def _cached(model: CachedRepoInfo) -> list[ListedModel]:
    revision = model.refs.get("main") or max(model.revisions, key=lambda each: each.last_modified)
    snapshot = revision.snapshot_path
    if files := _gguf_files(snapshot, snapshot.rglob("*")):
        return [
            _listed(f"{model.repo_id}/{path.relative_to(snapshot)}", path, _num_bytes(path))
            for path in files
        ]
    listed = _listed(model.repo_id, snapshot, revision.size_on_disk)
    if listed.problem and any(model.repo_path.glob("blobs/*.incomplete")):
        problem = "its download is not complete; penstock serve continues it"
        listed = dataclasses.replace(listed, problem=problem)
    return [listed]


def _listed(name: str, path: Path, num_bytes: int) -> ListedModel:
    family, problem, model_impl = None, None, None
    try:
        found = (check_gguf if is_gguf(path) else check_directory)(path)
        family, model_impl = found.family, found.model_impl
    except InvalidModel as error:
        family = _family(path)
        problem = error.brief.replace(f"{path}/", "").replace(f"{path.parent}/", "")
    return ListedModel(
        name=name,
        path=path,
        num_bytes=num_bytes,
        family=family,
        problem=problem,
        model_impl=model_impl,
    )


def _family(path: Path) -> str | None:
    """As config.json has it, or a GGUF file, whatever it is."""
    try:
        if is_gguf(path):
            return str(open_gguf(path).metadata.get("general.architecture"))
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
            # os.path says False of what may not be looked at, for which pathlib raises.
            if os.path.isdir(entry) and not entry.name.startswith("."):  # noqa: PTH112
                yield from _find(entry, depth - 1)


def _entries(directory: Path) -> Iterable[Path]:
    try:
        return list(directory.iterdir())
    except OSError:  # not ours to read
        return []


def _gguf_files(directory: Path, paths: Iterable[Path]) -> list[Path]:
    """The first or only file of each model, where a directory has no other models. paths: of what
    is in it."""
    names = [str(path.relative_to(directory)) for path in paths]
    return [directory / name for name in gguf_models(names)] if holds_gguf(names) else []


def _num_bytes(path: Path) -> int:
    if is_gguf(path):
        parts = [path.with_name(name) for name in split_names(path.name)]
        return sum(part.stat().st_size for part in parts if part.exists())
    num_bytes = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # a broken link, or not ours to read
                num_bytes += (Path(parent) / name).stat().st_size
    return num_bytes
