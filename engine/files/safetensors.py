"""Safetensors, one file or shards with an index, and under which of several names a tensor is
stored. Reads no more than the headers, and imports no tensors."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from penstock.engine.errors import InvalidModel
from penstock.engine.files.encoder_names import encoder_name
from penstock.engine.files.json_file import Fields, check_regular, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The characters of the library's error that are told: it quotes the file.
_MAX_REASON = 300


def open_safetensors(path: Path, *, framework: str) -> Any:
    """Reads the header alone; its sizes must be those of the file. Raises InvalidModel."""
    check_regular(path)
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        reason = str(error)[:_MAX_REASON]
        raise InvalidModel(
            f"{path} is not a readable safetensors file: {reason}; delete it, and copy or download "
            "it again",
            brief=f"{path.name} is damaged",
        ) from None


def read_weight_map(index: Path) -> dict[str, str]:
    """The shard of each tensor, by its name. Raises InvalidModel."""
    content = read_json(index)
    if not isinstance(content, dict) or not content.get("weight_map"):
        raise InvalidModel(f"{index} is not a valid index of shards: it lacks 'weight_map'")
    weight_map = Fields(index, content).mapping("weight_map")
    for tensor, file in weight_map.items():
        # Nothing outside of the model's directory, and nothing but weights.
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise Fields(f"{index}: weight_map", weight_map).wrong(
                tensor, "the name of a safetensors file beside the index", file
            )
    return weight_map


# Text models beside encoders have a prefix, of newer files and of older ones; embedding models,
# saved without an output layer, lack even "model.".
_MODEL = "model."
_PREFIXES = ("", "model.language_model.", "language_model.model.")
_OTHERS = ("language_model.",)
# Older files have a vision tower in a module of its own.
_TOWER, _OLD_TOWER = "vision_tower.", "vision_tower.vision_model."


def stored_name(name: str, names: Container[str]) -> str:
    """The first of these that is in `names`, for a tensor or layer such as "model.norm.weight"; the
    name itself where none is."""
    if name in names:
        return name
    rest = name.removeprefix(_MODEL)
    prefixes = _OTHERS if rest == name else _PREFIXES
    if rest.startswith(_TOWER) and (old := rest.replace(_TOWER, _OLD_TOWER)) in names:
        return old
    found = (prefix + rest for prefix in prefixes if prefix + rest in names)
    return next(found, None) or encoder_name(name, names) or name


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
