"""The header of a GGUF file: its metadata, and what type, shape and place each tensor has.

Whatever the file says is checked against its size before memory is allocated for it, so a file that
is damaged, or made to do harm, is one InvalidModel. Source: docs/gguf.md of the ggml repository.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

from penstock.engine.errors import InvalidModel


@dataclass(frozen=True, slots=True)
class TensorType:
    """block_size: numbers, of one row, that are stored together in block_bytes."""

    name: str
    block_size: int
    block_bytes: int


# Those that are read. Source: ggml's ggml-common.h.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}
# The others, for the error that names them: of activations, of no weights, and of former versions.
OTHER_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 2**16
# Ten times as many as any model has; a list of Python takes more memory than the file.
_MAX_ENTRIES = 2**20
_MAX_ELEMENTS = 2**24
_MAX_ALIGNMENT = 2**20
_DEFAULT_ALIGNMENT = 32
# Struct's letter by the type of metadata.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
# One element takes at least so many.
_STRING_BYTES = 8


class HeaderIncomplete(InvalidModel):
    """The part of the file that is there ends within the header."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """shape: rows first, as in torch. offset: of its first byte, from the beginning of the file."""

    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements // self.type.block_size * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def parse_header(name: str, data: memoryview, file_size: int) -> Header:
    """data: the file's beginning, or all of it. Raises InvalidModel, and HeaderIncomplete where the
    header is longer than data. name: of the file, in error messages."""
    reader = _reader(name, data)
    num_tensors, num_entries = reader.count(_MAX_ENTRIES), reader.count(_MAX_ENTRIES)
    metadata = {}
    for _ in range(num_entries):
        key = reader.name()
        if key in metadata:
            raise reader.damaged(f"has two fields {key!r}")
        metadata[key] = reader.value(reader.scalar("I"))
    infos = {}
    for _ in range(num_tensors):
        tensor = reader.name()
        if tensor in infos:
            raise reader.damaged(f"has two tensors {tensor!r}")
        infos[tensor] = reader.tensor(tensor)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not (isinstance(alignment, int) and 8 <= alignment <= _MAX_ALIGNMENT) or alignment % 8:
        raise reader.damaged(f"has the alignment {alignment!r:.20}")
    start = -(-reader.position // alignment) * alignment
    tensors = {
        tensor: TensorInfo(kind, shape, start + offset)
        for tensor, (kind, shape, offset) in infos.items()
    }
    end = start
    for tensor, info in sorted(tensors.items(), key=lambda each: each[1].offset):
        if (info.offset - start) % alignment:
            raise reader.damaged(f"has the tensor {tensor!r} at the odd place {info.offset}")
        if info.offset < end:
            raise reader.damaged(f"has the tensor {tensor!r} within the bytes of another")
        end = info.offset + info.num_bytes
        if info.offset + info.num_bytes > file_size:
            raise InvalidModel(
                f"{name} is not complete: its tensor {tensor!r} ends at byte "
                f"{info.offset + info.num_bytes:,} of {file_size:,}; download or copy it again",
                brief="its file is not complete",
            )
    return Header(metadata, tensors)


def _reader(name: str, data: memoryview) -> "_Reader":
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise InvalidModel(
            f"{name} is not a GGUF file, though its name ends with .gguf; download it again",
            brief="not a GGUF file",
        )
    reader = _Reader(name, data, len(_MAGIC))
    version = reader.scalar("I")
    if version not in _VERSIONS:
        is_swapped = version & 0xFFFF == 0
        what = "big-endian numbers" if is_swapped else f"version {version} of the format"
        raise InvalidModel(
            f"{name} is a GGUF file with {what}, which is not supported; convert the model again "
            "with a newer llama.cpp, on a little-endian machine",
            brief=f"GGUF with {what}",
        )
    return reader


class _Reader:
    def __init__(self, name: str, data: memoryview, position: int) -> None:
        self.position = position
        self._name = name
        self._data = data
        self._num_elements = 0

    def scalar(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def count(self, most: int) -> int:
        number: int = self.scalar("Q")
        if number > most:
            raise self.damaged(f"says that it has {number:,} of what may be {most:,} at most")
        return number

    def name(self) -> str:
        try:
            return bytes(self._take(self.count(_MAX_NAME_BYTES))).decode()
        except UnicodeDecodeError:
            raise self.damaged("has a name that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            return self._text()
        number = self.scalar(self._letter(kind))
        return _shortest(number) if kind == _FLOAT32 else number

    def tensor(self, name: str) -> tuple[TensorType, tuple[int, ...], int]:
        num_dimensions = self.scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"has the tensor {name!r} of {num_dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self.scalar("I"), self.scalar("Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            unknown = OTHER_TYPES.get(number, f"of the number {number}")
            raise InvalidModel(
                f"{self._name} has its tensor {name!r} in the type {unknown}, which is not "
                f"supported; supported are {', '.join(each.name for each in TENSOR_TYPES.values())}"
                ": use another quantization of the model, such as Q4_K_M or Q8_0",
                brief=f"{unknown} tensors are not supported",
            )
        if 0 in shape or shape[-1] % kind.block_size:
            raise self.damaged(f"has the tensor {name!r} of the impossible shape {shape}")
        return kind, shape, offset

    def damaged(self, what: str) -> InvalidModel:
        return InvalidModel(
            f"{self._name} is damaged: it {what}; download or copy it again",
            brief="its header is damaged",
        )

    def _array(self) -> list[Any]:
        kind = self.scalar("I")
        number = self.count(_MAX_ELEMENTS)
        self._num_elements += number
        if self._num_elements > _MAX_ELEMENTS:
            raise self.damaged(f"has more than {_MAX_ELEMENTS:,} elements in its metadata")
        if kind == _STRING:
            self._check_there(number * _STRING_BYTES)
            return [self._text() for _ in range(number)]
        letter = self._letter(kind)
        content = self._take(number * struct.calcsize(f"<{letter}"))
        return list(struct.unpack(f"<{number}{letter}", content))

    def _text(self) -> str:
        # A token may be a part of a character, too, which no file has in practice.
        return bytes(self._take(self.scalar("Q"))).decode(errors="replace")

    def _letter(self, kind: int) -> str:
        letter = _SCALARS.get(kind)
        if letter is None:
            raise self.damaged(f"has metadata of the unknown type {kind}")
        return letter

    def _take(self, num_bytes: int) -> memoryview:
        self._check_there(num_bytes)
        self.position += num_bytes
        return self._data[self.position - num_bytes : self.position]

    def _check_there(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.position:
            raise HeaderIncomplete(
                f"{self._name} is damaged or not complete: it ends within its header; download or "
                "copy it again",
                brief="its header is not complete",
            )


def _shortest(number: float) -> float:
    """The decimal with the fewest digits that float32 rounds to this: 1e-05, for what float64 shows
    as 9.999999747378752e-06."""
    stored = struct.pack("<f", number)
    rounded = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next((each for each in rounded if struct.pack("<f", each) == stored), number)
