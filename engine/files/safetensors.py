"""Safetensors: one file, or shards with an index. Reads no more than the headers, and imports no
tensors."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from penstock.engine.errors import InvalidModel
from penstock.engine.files.json_file import Fields, check_regular, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def open_safetensors(path: Path, *, framework: str) -> Any:
    """Reads the header alone; its sizes must be those of the file. Raises InvalidModel."""
    check_regular(path)
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise InvalidModel(
            f"{path} is not a readable safetensors file: {error}; delete it, and copy or download "
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
