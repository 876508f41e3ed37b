"""The names of a checkpoint's tensors, without a look at the tensors, and under which of several
names one is stored."""

import json
import struct
from collections.abc import Container
from pathlib import Path

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
# Text models beside encoders have a prefix, of newer files and of older ones; embedding models,
# saved without an output layer, lack even "model.".
_MODEL = "model."
_PREFIXES = ("", "model.language_model.", "language_model.model.")
_OTHERS = ("", "language_model.")


def stored_name(name: str, names: Container[str]) -> str:
    """The first of these that is in `names`, for a tensor or layer such as "model.norm.weight"; the
    name itself where none is."""
    if name.startswith(_MODEL):
        rest = name.removeprefix(_MODEL)
        candidates = [prefix + rest for prefix in _PREFIXES]
    else:
        candidates = [prefix + name for prefix in _OTHERS]
    if name in names:
        return name
    return next((each for each in candidates if each in names), name)


def text_model_name(name: str) -> str:
    """The name without the prefix that the text model has beside encoders; also of a pattern."""
    for prefix in ("model.language_model.", "language_model.model."):
        name = name.replace(prefix, _MODEL)
        name = name.replace(prefix.replace(".", r"\."), _MODEL.replace(".", r"\."))
    return name.replace("language_model.lm_head", "lm_head")


def tensor_names(model_dir: Path) -> frozenset[str] | None:
    """None where they are not there, or cannot be read: who reads the weights says why."""
    try:
        if (model_dir / _INDEX).is_file():
            return frozenset(json.loads((model_dir / _INDEX).read_text())["weight_map"])
        if not (model_dir / _SINGLE).is_file():
            return None
        with (model_dir / _SINGLE).open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        return frozenset(header) - {"__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, struct.error, RecursionError):
        return None
