"""Whether a GGUF file can be served, by its headers alone. Imports no tensors."""

from pathlib import Path

from penstock.engine.files.gguf.file import GgufFile, open_gguf
from penstock.engine.files.gguf.tokenizer import check_tokenizer
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.gguf.names import UNUSED, GgufNames


def check_gguf(path: Path, *, needs_weights: bool = True) -> ModelConfig:
    """Raises InvalidModel unless it can be served. needs_weights: False for made-up weights."""
    gguf = open_gguf(path)
    config = ModelConfig.from_dir(path)
    if needs_weights:
        _check_tensors(gguf, config)
        check_tokenizer(gguf, config.vocab_size)
    return config


def _check_tensors(gguf: GgufFile, config: ModelConfig) -> None:
    expected = GgufNames(config).shapes
    if missing := expected.keys() - gguf.tensors.keys():
        raise InvalidModel(
            f"{gguf.path} lacks the tensor {min(missing)!r}, which its metadata implies; download "
            "or convert the model again",
            brief=f"{len(missing)} of its tensors are missing",
        )
    others = [name for name in gguf.tensors if name not in expected and not UNUSED.fullmatch(name)]
    if others:
        raise InvalidModel(
            f"{gguf.path} has the tensor {others[0]!r}, which changes what the model computes in a "
            f"way that is not supported for its architecture, {config.family}",
            brief=f"{others[0]} is not supported",
        )
    for name, shape in expected.items():
        if (found := gguf.tensors[name].shape) != shape:
            raise InvalidModel(
                f"{gguf.path} has the tensor {name!r} of the shape {found}, which does not fit "
                f"the {shape} that its metadata implies; download or convert the model again",
                brief=f"{name} has an unexpected shape",
            )
