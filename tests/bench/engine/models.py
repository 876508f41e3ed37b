"""The models that are measured: shapes of `configs/models`, with random weights."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.engine.models.config import ModelConfig
from penstock.scheduler.errors import InvalidConfig

# What a model becomes with --tiny: its family and flags stay.
_TINY = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_SHARD_LAYERS = 4


def model_fields(model: str, tiny: bool) -> dict[str, Any]:
    """config.json of a folder in configs/models."""
    known = resources.files("penstock.configs").joinpath("models")
    file = known.joinpath(model, "config.json")
    if not file.is_file():
        names = ", ".join(sorted(entry.name for entry in known.iterdir() if entry.is_dir()))
        raise InvalidConfig(f"configs/models has no {model!r}; choose one of {names}")
    fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return fields | _TINY if tiny else fields


def model_config(model: str, tiny: bool) -> ModelConfig:
    with model_dir(model, tiny) as directory:
        return ModelConfig.from_dir(directory)


@contextmanager
def model_dir(model: str, tiny: bool) -> Iterator[Path]:
    """A directory with the model's config.json, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as directory:
        write_model_dir(model, tiny, Path(directory), with_weights=False)
        yield Path(directory)


def write_model_dir(model: str, tiny: bool, directory: Path, *, with_weights: bool) -> None:
    """config.json and optional bfloat16 safetensors in shards, as in a hub model."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = model_fields(model, tiny)
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    if with_weights:
        _write_weights(ModelConfig.from_dir(directory), directory)


def _write_weights(config: ModelConfig, directory: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight_map: dict[str, str] = {}
    shapes = [_outer_shapes(config)]
    for first in range(0, config.num_layers, _SHARD_LAYERS):
        last = min(first + _SHARD_LAYERS, config.num_layers)
        layers = (_layer_shapes(config, index) for index in range(first, last))
        shapes.append({name: shape for layer in layers for name, shape in layer.items()})
    for number, shard in enumerate(shapes):
        file = f"model-{number + 1:05}-of-{len(shapes):05}.safetensors"
        save_file(
            {
                name: (0.02 * torch.randn(shape, device=device)).to(torch.bfloat16).cpu()
                for name, shape in shard.items()
            },
            directory / file,
        )
        weight_map |= dict.fromkeys(shard, file)
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _outer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = dict(config.tensors.shapes())
    if config.head.is_tied:
        del shapes["lm_head.weight"]
    return shapes


def _layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    shapes = config.layers[index].tensors.shapes()
    return {f"model.layers.{index}.{name}": shape for name, shape in shapes}
