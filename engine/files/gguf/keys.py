"""`Keys`: a file's metadata by the names that come after its architecture's, and its tensors."""

import struct
from typing import Any

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.file import GgufFile

# More than any model has; another number is refused with config.json's.
_MAX_LAYERS = 10_000
_MAX_NUMBERS = 2**16


def quotient(number: Any, divisor: Any) -> Any:
    """None where these are no such numbers, which the check of config.json says better."""
    if not all(isinstance(each, int) and each > 0 for each in (number, divisor)):
        return None
    return number // divisor


class Keys:
    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self.gguf, self.architecture = gguf, architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(f"{self.architecture}.{key}", default)

    def has(self, tensor: str) -> bool:
        return tensor in self.gguf.tensors

    @property
    def num_layers(self) -> int:
        """0 where the metadata has no possible number."""
        number = self.get("block_count")
        return number if isinstance(number, int) and 0 < number <= _MAX_LAYERS else 0

    def by_layer(self, key: str) -> list[Any]:
        """Returns what each layer has: a list of the metadata, or one value for all. Raises
        InvalidModel."""
        value = self.get(key)
        if not isinstance(value, list):
            return [value] * self.num_layers
        if len(value) != self.num_layers:
            raise self.wrong(f"{key} for {len(value)} layers, and {self.num_layers} layers")
        return value

    def numbers(self, tensor: str) -> list[float]:
        """Reads a small tensor of float32. Raises InvalidModel."""
        info = self.gguf.tensors.get(tensor)
        if info is None or info.type.name != "F32" or info.num_elements > _MAX_NUMBERS:
            raise self.wrong(f"no tensor {tensor!r} of the type F32")
        with self.gguf.part_of[tensor].open("rb") as file:
            file.seek(info.offset)
            return list(struct.unpack(f"<{info.num_elements}f", file.read(info.num_bytes)))

    def wrong(self, what: str) -> InvalidModel:
        """what: the file has, in an error message."""
        return InvalidModel(f"{self.gguf.path} has {what}; convert the model again")
