"""The names of a checkpoint's tensors, without a look at the tensors, and under which of several
names one is stored."""

from collections.abc import Container
from pathlib import Path

from penstock.engine.errors import InvalidModel
from penstock.engine.files.safetensors import INDEX, SINGLE, open_safetensors, read_weight_map

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
        if (model_dir / INDEX).is_file():
            return frozenset(read_weight_map(model_dir / INDEX))
        if (model_dir / SINGLE).is_file():
            return frozenset(open_safetensors(model_dir / SINGLE, framework="numpy").keys())
    except InvalidModel:
        pass
    return None
