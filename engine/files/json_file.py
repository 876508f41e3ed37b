"""The JSON files of a model's directory: an object, and its fields by type.

Every error names the file, the field and what it may be. Knows no field's meaning. Of a GGUF file,
which is a model without a directory, its metadata is read as those files.
"""

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.engine.errors import InvalidModel, unreadable
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.gguf.settings import read_settings

CONFIG = "config.json"

T = TypeVar("T")

# Larger than any model's; what follows from a larger one fails later, and less clearly.
_MAX_COUNT = 2**31 - 1
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30
_SHOWN_CHARS = 80
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def check_regular(path: Path) -> None:
    """Raises InvalidModel unless it is a file or does not exist: to open a FIFO may wait for ever.
    A link to nothing is refused too: something removed what it pointed to."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise InvalidModel(
                f"{path} is a link to {path.readlink()}, which does not exist; download or copy "
                "the model again"
            ) from None
        return
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
        raise InvalidModel(f"{path} is {kind}; a model's files must be regular files")


def read_json(path: Path) -> Any:
    """None if there is no such file. Raises InvalidModel."""
    if gguf := next(filter(is_gguf, path.parents), None):
        return read_settings(gguf, str(path.relative_to(gguf)))
    check_regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} is not valid JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """A missing file is empty. Raises InvalidModel."""
    content = read_json(path)
    if content is None and not path.exists():
        return {}
    if not isinstance(content, dict):
        raise InvalidModel(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def shown(value: object) -> str:
    """As an error message quotes it: not all of a long one."""
    return _cut(repr(value))


def shown_json(value: object) -> str:
    """The same, as the file has it."""
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def is_number(value: object, number: float) -> bool:
    """Whether it is this number, but for rounding."""
    try:
        return isinstance(value, int | float) and math.isclose(value, number, rel_tol=1e-6)
    except OverflowError:  # an integer that no float can hold
        return False


class Fields:
    """An object's fields. In all of them null counts as absent, as transformers writes it."""

    def __init__(self, path: Path | str, content: dict[str, Any]) -> None:
        """path: names the object in error messages."""
        self.path = path
        self.content = content
        self._read: set[str] = set()

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Raises InvalidModel, for a file that does not exist too."""
        content = read_object(path)
        if is_gguf(path.parent):
            return cls(f"{path.parent} ({path.name})", content)
        if not content and not path.exists():
            raise InvalidModel(
                f"{path} does not exist; a model directory in Hugging Face's layout has one"
            )
        return cls(path, content)

    def get(self, name: str, default: Any = None) -> Any:
        """As it is, of any type."""
        self._read.add(name)
        return self.content.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self.content

    @property
    def asked(self) -> frozenset[str]:
        """The names of all fields that something has asked for, whether they are there or not."""
        return frozenset(self._read)

    def unread(self) -> list[str]:
        """The fields that nothing has asked for yet, and that are not off: null, false, 0, or
        empty."""
        return [name for name, value in self.content.items() if value and name not in self._read]

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """A copy; `defaults` are for fields that are absent. What is asked of one, is of both."""
        copy = Fields(self.path, {**defaults, **self.content})
        copy._read = self._read
        return copy

    def mapping(self, name: str) -> dict[str, Any]:
        """Empty if it is absent."""
        return self._typed(name, dict, "an object or null") or {}

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _MAX_COUNT
    ) -> int:
        """An integer within these bounds."""
        value = self._required(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least else "an integer of at least 0"
            raise self.wrong(name, kind, value)
        if value > most:
            raise self.wrong(name, f"at most {most:,}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number, of which arithmetic with others is neither 0 nor infinite."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(name, "a positive number", value)
        if not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise self.wrong(name, f"between {_LEAST_NUMBER:g} and {_MOST_NUMBER:g}", value)
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def names(self, name: str) -> list[str] | None:
        value = self._typed(name, list, "a list of names")
        if not all(isinstance(each, str) for each in value or ()):
            raise self.wrong(name, "a list of names", value)
        return value

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "a string")

    def _typed(self, name: str, kind: type[T], words: str) -> T | None:
        value = self.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, words, value)
        return value

    def _required(self, name: str, default: float | None) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise InvalidModel(f"{self.path} lacks the field {name!r}")
        return value

    def wrong(self, name: str, kind: str, value: object) -> InvalidModel:
        return InvalidModel(f"{self.path}: {name!r} must be {kind}, not {shown(value)}")
