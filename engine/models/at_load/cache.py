"""The cache of quantized weights on disk: found by what they were made from, and read part by part.

One directory for each checkpoint and method: a safetensors file for each part, and a manifest that
is written last. It appears by one rename, so that a start that is cut off leaves no half of one.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine.files.json_file import CONFIG
from penstock.engine.files.safetensors import INDEX, SINGLE, read_weight_map
from penstock.engine.models.at_load.plan import VERSION, Plan
from penstock.engine.models.at_load.quality import Quality
from penstock.engine.models.at_load.rounding import GROUP_SIZE, Allocate, Codes
from penstock.engine.models.at_load.weights import Part

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
# Directories of writers that were killed are deleted after this.
_STALE_S = 24 * 3600
# Left free on the disk beside what is written.
_SPARE_BYTES = 2**28


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """key: as the directory's name. model: the checkpoint's directory, for people and to delete
    what an earlier state of it left. quality: None where it was not measured. share: which part of
    the model a rank has; empty for all of it."""

    key: str
    method: str
    model: str
    quality: Quality | None
    share: str = ""


def cache_directory(model_dir: Path, plan: Plan, share: str = "") -> Path | None:
    """Where the weights of this plan are, or are to be. Its name says all that they depend on: the
    checkpoint's files by name, size and time, how they are rounded, and the share of a rank. None
    where there is no directory for caches: a user without a home, as in containers."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None
    names = {CONFIG, SINGLE, INDEX}
    if (model_dir / INDEX).exists():
        names |= set(read_weight_map(model_dir / INDEX).values())
    paths = [path for name in sorted(names) if (path := model_dir / name).exists()]
    content = (
        VERSION,
        GROUP_SIZE,
        [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths],
        [(part.key, part.rows, part.in_features, part.kind.value) for part in plan.parts],
        *([share] if share else []),
    )
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    return cache / "penstock" / "quantized" / key


class CachedWeights:
    """The parts of one plan, as they are on disk."""

    def __init__(self, directory: Path, plan: Plan, allocate: Allocate) -> None:
        """Opens and checks every file. Raises ValueError where one is not what it should be."""
        self._allocate = allocate
        self._files: dict[str, Any] = {}
        try:
            self.manifest = msgspec.json.decode((directory / _MANIFEST).read_bytes(), type=Manifest)
            if self.manifest.key != directory.name:
                raise ValueError("it was made from something else")
            for part, path in _files(directory, plan):
                self._files[part.key] = stored = safe_open(path, framework="pt")
                _check(part, stored)
        except (OSError, SafetensorError, msgspec.MsgspecError) as error:
            raise ValueError(str(error)) from None

    def __call__(self, part: Part) -> Codes:
        """Copies: memory that maps a file is read from it again when memory is short."""
        stored = self._files[part.key]
        return Codes(*(self._copy(stored.get_tensor(name)) for name in Codes._fields))

    def _copy(self, tensor: Tensor) -> Tensor:
        return self._allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def find(directory: Path | None, plan: Plan, allocate: Allocate) -> CachedWeights | None:
    if directory is None or not directory.exists():
        return None
    try:
        return CachedWeights(directory, plan, allocate)
    except ValueError as error:
        logger.warning("%s is damaged, and is made again: %s", directory, error)
        return None


class CacheWriter:
    """Writes the parts one by one. What fails is logged once, and then nothing is cached. At the
    end of its context, what is not finished is deleted."""

    def __init__(self, directory: Path | None, plan: Plan) -> None:
        self._target = directory
        self._partial: Path | None = None
        if directory is None:
            self._give_up("this user has no home directory; set XDG_CACHE_HOME")
            return
        try:
            directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _delete_stale(directory.parent)
            needed = int(plan.num_weights * plan.bits_per_weight / 8) + _SPARE_BYTES
            if shutil.disk_usage(directory.parent).free < needed:
                self._give_up(f"{directory.parent} has less than {needed / 2**30:.1f} GiB free")
                return
            made = tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent)
            self._partial = Path(made)
            self._files = {part.key: path for part, path in _files(self._partial, plan)}
        except OSError as error:
            self._give_up(error)

    def __enter__(self) -> "CacheWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def add(self, part: Part, codes: Codes) -> None:
        if self._partial is None:
            return
        try:
            save_file(codes._asdict(), self._files[part.key])
        except (OSError, SafetensorError) as error:
            self._give_up(error)

    def finish(
        self, method: str, model_dir: Path, share: str, quality: Quality | None
    ) -> Path | None:
        """Returns where it is now; None where it could not be written."""
        if self._partial is None or self._target is None:
            return None
        manifest = Manifest(
            key=self._target.name,
            method=method,
            model=str(model_dir.resolve()),
            quality=quality,
            share=share,
        )
        try:
            (self._partial / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
            for path in self._partial.iterdir():
                _sync(path)
            shutil.rmtree(self._target, ignore_errors=True)  # damaged, or it would have been used
            self._partial.rename(self._target)
        except OSError as error:
            self._give_up(error)
            return None
        self._partial = None
        _delete_earlier(self._target.parent, manifest)
        return self._target

    def _give_up(self, reason: object) -> None:
        logger.warning(
            "the quantized weights are not cached, so that the next start makes them again: %s",
            reason,
        )
        self._discard()

    def _discard(self) -> None:
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        self._partial = None


def _delete_stale(root: Path) -> None:
    """Deletes what writers left that were killed."""
    for path in root.glob("*.*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path)


def _delete_earlier(root: Path, manifest: Manifest) -> None:
    """Deletes what the same method made of this checkpoint before its files changed."""
    for path in root.glob(f"*/{_MANIFEST}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            other = msgspec.json.decode(path.read_bytes(), type=Manifest)
            made_of = (manifest.model, manifest.method, manifest.share)
            is_same = (other.model, other.method, other.share) == made_of
            if is_same and other.key != manifest.key:
                shutil.rmtree(path.parent)


def _files(directory: Path, plan: Plan) -> Iterator[tuple[Part, Path]]:
    for index, part in enumerate(plan.parts):
        yield part, directory / f"{index:05}.safetensors"


def _check(part: Part, stored: Any) -> None:
    """Raises ValueError unless it has the tensors of this part."""
    expected = part.empty(torch.device("meta"))._asdict()
    if set(stored.keys()) != set(expected):
        raise ValueError(f"{part.key} has other tensors")
    for name, tensor in expected.items():
        found = stored.get_tensor(name)  # mapped, not read
        if found.shape != tensor.shape:
            raise ValueError(f"{name} of {part.key} has another shape")
        if found.dtype != tensor.dtype:
            raise ValueError(f"{name} of {part.key} has another type")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
