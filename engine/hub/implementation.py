"""Whose implementation computes a model: ours, or a class of transformers. Imports no tensors."""

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.config import ModelImpl
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.json_file import Fields
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.fallback.source import TransformersClass, find_class
from penstock.engine.models.families.families import find_family

if TYPE_CHECKING:
    from penstock.engine.models.fallback.load import TransformersConfig


def find_implementation(
    model_dir: Path, wanted: ModelImpl = ModelImpl.AUTO
) -> ModelConfig | TransformersClass:
    """By config.json alone. Raises InvalidModel where there is none.

    model_dir: or a GGUF file, whose families are all our own.
    """
    if is_gguf(model_dir):
        if wanted is ModelImpl.TRANSFORMERS:
            raise InvalidModel(
                f"--model-impl transformers reads safetensors, and {model_dir} is a GGUF file; "
                "leave it out"
            )
        return ModelConfig.from_dir(model_dir)
    if wanted is not ModelImpl.PENSTOCK:
        fields = Fields.read(model_dir / "config.json")
        if wanted is ModelImpl.TRANSFORMERS or not _is_ours(fields):
            if found := find_class(fields):
                return found
            if wanted is ModelImpl.TRANSFORMERS:
                raise InvalidModel(
                    f"{fields.path} names no decoder that transformers has a class for; leave out "
                    "--model-impl transformers",
                    brief="transformers has no class for it",
                )
    return ModelConfig.from_dir(model_dir)


def read_model(
    model_dir: Path, wanted: ModelImpl = ModelImpl.AUTO
) -> "ModelConfig | TransformersConfig":
    """Its settings, as what computes it has them. Raises InvalidModel."""
    found = find_implementation(model_dir, wanted)
    if isinstance(found, ModelConfig):
        return found
    # Only here: it imports torch.
    from penstock.engine.models.fallback.load import TransformersConfig

    return TransformersConfig.from_dir(model_dir)


def _is_ours(fields: Fields) -> bool:
    """Whether there is a row of its family; whether all else in it is supported is not asked."""
    try:
        find_family(fields)
    except InvalidModel:
        return False
    return True
