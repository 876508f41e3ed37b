"""`GgufFile`: a model in one GGUF file, or in several that llama.cpp has split it into."""

import functools
import mmap
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.errors import InvalidModel, unreadable
from penstock.engine.files.gguf.header import Header, TensorInfo, parse_header

SUFFIX = ".gguf"
# As `llama-gguf-split` names them.
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_SPLITS = 1000


@dataclass(frozen=True, slots=True)
class GgufFile:
    """metadata: of the first part. tensors: of all parts. part_of: in which part each is."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    part_of: dict[str, Path]

    @property
    def parts(self) -> list[Path]:
        return sorted(set(self.part_of.values()))


def is_gguf(path: Path) -> bool:
    """Whether this is a file, and named as one of GGUF."""
    return path.suffix == SUFFIX and not path.is_dir()


def split_names(name: str) -> list[str]:
    """The names of all parts of the model of which this file is one: itself, if it is not split."""
    match = _SPLIT.fullmatch(name)
    if not match or not 1 <= int(match["count"]) <= _MAX_SPLITS:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def model_name(path: Path) -> str:
    """The file's name without what says that it is GGUF, and a part of one."""
    match = _SPLIT.fullmatch(path.name)
    return match["stem"] if match else path.stem


def is_model_name(name: str) -> bool:
    """Whether a GGUF file of this name can be a model, and is the first part of one: not the
    companion of one, such as the vision tower that llama.cpp calls mmproj."""
    short = name.rpartition("/")[2].lower()
    is_companion = "mmproj" in short or "imatrix" in short
    return short.endswith(SUFFIX) and not is_companion and split_names(short)[0] == short


def open_gguf(path: Path) -> GgufFile:
    """Reads the headers of all its parts. Raises InvalidModel."""
    parts = [path.with_name(name) for name in split_names(path.name)]
    return _opened(path, tuple((part, *_identity(part)) for part in parts))


@functools.lru_cache(maxsize=1)  # the settings of one model are read one after the other
def _opened(path: Path, parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    headers = {part: read_header(part) for part, _, _ in parts}
    first, *others = headers.values()
    _check_parts(path, first, len(parts))
    tensors: dict[str, TensorInfo] = {}
    part_of: dict[str, Path] = {}
    for part, header in headers.items():
        if repeated := tensors.keys() & header.tensors.keys():
            raise InvalidModel(
                f"{part} has the tensor {min(repeated)!r}, which another part of the model has "
                "too; download the parts again"
            )
        tensors |= header.tensors
        part_of |= dict.fromkeys(header.tensors, part)
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if others and expected != len(tensors):
        raise InvalidModel(
            f"{path} and the other parts of it have {len(tensors)} tensors, and should have "
            f"{expected}; download the parts again"
        )
    return GgufFile(path, first.metadata, tensors, part_of)


def read_header(path: Path) -> Header:
    """Reads that of one part. Raises InvalidModel."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if not size:
                raise InvalidModel(f"{path} is empty; download or copy it again", brief="empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                view = memoryview(content)
                try:
                    return parse_header(str(path), view, size)
                finally:
                    view.release()
    except OSError as error:
        raise unreadable(path, error) from None


def _identity(path: Path) -> tuple[int, int]:
    """Tells its content from others, as far as the system knows: size, and time of the last change
    in ns."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise InvalidModel(
            f"{path} does not exist; check the path"
            + (f", and download all {len(split_names(path.name))} parts" * ("-of-" in path.name))
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidModel(f"{path} is not a regular file, as a model must be")
    return status.st_size, status.st_mtime_ns


def _check_parts(path: Path, first: Header, num_parts: int) -> None:
    count = first.metadata.get("split.count", 0)
    if count not in (0, 1, num_parts):
        raise InvalidModel(
            f"{path} is a part of a model in {count} files, but its name does not say so; name it "
            f"as it was (NAME-00001-of-{count!s:0>5}.gguf), beside the other parts",
            brief="a part of a model in several files",
        )
