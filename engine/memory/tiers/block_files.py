"""`BlockFiles`: blocks of keys and values in a directory, one file each.

    DIR/secret                              32 random bytes
    DIR/MODEL/DIGEST'S FIRST BYTE/DIGEST.GROUP      header | the block's bytes

MODEL is made of what decides the bytes of a block, so no model finds those of another. Digests are
keyed by the secret and MODEL, so that a name tells nothing of a prompt. The header carries the
digest, the length, a CRC-32 of the bytes, and a code over all these that cannot be made without the
secret. A file that is cut off, changed, or under another's name is not believed.

A file appears under its name at once, as it is written under another and then renamed; so several
servers may use one directory. Nothing is flushed: what a power failure leaves of a file is found
by its checksum. Directories and files are for their owner alone.

The limit is for all that is in DIR, whoever wrote it: the files whose blocks were used least
recently go first. A file's time of modification is when its block was last used.
"""

import contextlib
import os
import secrets
import struct
import time
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from penstock.scheduler.cache.prefix import DIGEST_BYTES, KEY_BYTES
from penstock.scheduler.cache.tier import TierBlock
from penstock.scheduler.errors import InvalidConfig

_MAGIC = b"PSTKKV 1"
_SECRET = "secret"
_SECRET_BYTES = 32
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}sIIQ")  # magic, digest, group, checksum, length
_CODE_BYTES = 16
HEADER_BYTES = _HEADER.size + _CODE_BYTES
_MODEL_CHARACTERS = 32
_UNFINISHED = ".new-"
# A file that is being written is not removed with those that a killed process left.
_UNFINISHED_S = 600.0
# This share is removed beyond what is needed: to find the oldest, all are looked at.
_SPARE = 0.1
_PROBE_BYTES = 32 * 2**20


class Unreadable(Exception):
    """A block's file is missing, cut off, changed, or of something else."""

    @property
    def is_missing(self) -> bool:
        return str(self) == "missing"


class File(NamedTuple):
    path: str
    name: str
    num_bytes: int
    used_s: float


class BlockFiles:
    """The files of one model's blocks. Threads may share it."""

    def __init__(self, directory: Path, identity: bytes, limit_bytes: int) -> None:
        """identity: differs where the same block would have other bytes, or mean other tokens.
        Raises InvalidConfig for a directory that cannot be used."""
        self.directory = directory
        self.limit_bytes = limit_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            derived = partial(blake2b, _MAGIC + identity, key=_secret_in(directory))
            name = derived(digest_size=32, person=b"model").hexdigest()
            self._own = directory / name[:_MODEL_CHARACTERS]
            self._own.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(
                f"--kv-offload-dir {directory} cannot be used: {error.strerror or error}"
            ) from error
        self.key = derived(digest_size=KEY_BYTES, person=b"digests").digest()
        """The digests are made with it."""
        self._code_key = derived(digest_size=32, person=b"headers").digest()

    def measure_read(self) -> float:
        """Bytes per second of reading what is not in the system's cache: it takes about 0.1 s.
        Raises InvalidConfig where nothing can be written."""
        path = self._own / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w+b") as file:
                path.unlink()
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(descriptor)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                started_s = time.perf_counter()
                while file.read(2**20):
                    pass
                return _PROBE_BYTES / max(time.perf_counter() - started_s, 1e-6)
        except OSError as error:
            raise InvalidConfig(
                f"--kv-offload-dir {self.directory} cannot be written: {error.strerror or error}"
            ) from error

    def write(self, block: TierBlock, content: memoryview) -> None:
        """Raises OSError."""
        path = self._path(block)
        unfinished = path.parent / f"{_UNFINISHED}{os.getpid()}-{secrets.token_hex(8)}"
        header = self._header(block, content)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(unfinished, flags, 0o600)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(unfinished, flags, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(header)
                file.write(content)
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, block: TierBlock, num_bytes: int) -> memoryview:
        """Its num_bytes. Raises Unreadable; and OSError where the directory cannot be read."""
        path = self._path(block)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Unreadable("missing") from None
        found = bytearray(HEADER_BYTES + num_bytes + 1)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            length = 0
            while length < len(found):
                more = file.readinto(memoryview(found)[length:])
                if not more:
                    break
                length += more
        if length != HEADER_BYTES + num_bytes:
            raise Unreadable("of another length")
        content = memoryview(found)[HEADER_BYTES:-1]
        if self._header(block, content) != found[:HEADER_BYTES]:
            raise Unreadable("changed")
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def touch(self, block: TierBlock) -> None:
        """Its block was used. Raises FileNotFoundError where it is not there."""
        os.utime(self._path(block))

    def remove(self, block: TierBlock) -> None:
        with contextlib.suppress(OSError):
            self._path(block).unlink()

    def blocks(self) -> Iterator[TierBlock]:
        """Those of this model that there are files of. Raises OSError."""
        for file in _files(self._own):
            digest, _, group = file.name.partition(".")
            with contextlib.suppress(ValueError):
                yield TierBlock(int(group), bytes.fromhex(digest))

    def tidy(self) -> tuple[int, int]:
        """Removes what is over the limit, and what killed processes left. Returns the bytes that
        are left, and how many blocks were removed. Raises OSError."""
        oldest_s = time.time() - _UNFINISHED_S
        files = []
        with os.scandir(self.directory) as entries:
            models = [each.path for each in entries if _is_model(each)]
        for model in models:
            for file in _files(model):
                if not file.name.startswith(_UNFINISHED):
                    files.append(file)
                elif file.used_s < oldest_s:
                    with contextlib.suppress(OSError):
                        Path(file.path).unlink()
        total, num_removed = sum(file.num_bytes for file in files), 0
        if total > self.limit_bytes:
            for file in sorted(files, key=lambda file: file.used_s):
                if total <= self.limit_bytes * (1 - _SPARE):
                    break
                with contextlib.suppress(FileNotFoundError):
                    Path(file.path).unlink()
                    num_removed += 1
                total -= file.num_bytes
        return total, num_removed

    def _path(self, block: TierBlock) -> Path:
        name = block.digest.hex()
        return self._own / name[:2] / f"{name}.{block.group}"

    def _header(self, block: TierBlock, content: memoryview) -> bytes:
        header = _HEADER.pack(_MAGIC, block.digest, block.group, crc32(content), len(content))
        return header + blake2b(header, digest_size=_CODE_BYTES, key=self._code_key).digest()


def _secret_in(directory: Path) -> bytes:
    """The same for all who use the directory. Raises OSError, InvalidConfig."""
    path = directory / _SECRET
    with contextlib.suppress(FileNotFoundError):
        return _read_secret(path)
    new = directory / f"{_UNFINISHED}{secrets.token_hex(8)}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        # Whoever comes second finds the first one's, whole.
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink()
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status, secret = os.fstat(descriptor), file.read(_SECRET_BYTES + 1)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InvalidConfig(
            f"{path} must belong to the user who runs the server, and be for that user alone "
            "(chmod 600): who reads it can make blocks that this server believes; name another "
            "--kv-offload-dir, or remove the file, and with it all blocks in the directory"
        )
    if len(secret) != _SECRET_BYTES:
        raise InvalidConfig(
            f"{path} is not a file of Penstock's; name another --kv-offload-dir, or remove the file"
        )
    return secret


def _is_model(entry: "os.DirEntry[str]") -> bool:
    is_hex = len(entry.name) == _MODEL_CHARACTERS and not set(entry.name) - set("0123456789abcdef")
    return is_hex and entry.is_dir(follow_symlinks=False)


def _files(model: str | Path) -> Iterator[File]:
    """Those in the directory of a model. What vanishes meanwhile is left out."""
    with os.scandir(model) as entries:
        parts = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
    for part in parts:
        with contextlib.suppress(FileNotFoundError), os.scandir(part) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield File(entry.path, entry.name, status.st_size, status.st_mtime)
