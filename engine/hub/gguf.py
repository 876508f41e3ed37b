"""Which GGUF file of several is meant, by what the user wrote after the name of a directory or of a
repository of the hub; and whether it can be served, by its headers alone. Imports no tensors."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.files.gguf.file import SUFFIX, GgufFile, is_model_name, open_gguf, split_names
from penstock.engine.files.gguf.tokenizer import check_tokenizer
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.gguf.names import GgufNames

_SHOWN = 12
_REPOSITORY = r"[\w.-]+/[\w.-]+"
_WITH_FILE = re.compile(rf"({_REPOSITORY})/(.+\.gguf)")
_WITH_QUANTIZATION = re.compile(rf"({_REPOSITORY}):([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository of the hub, and which of its GGUF files is meant: a path in it, or a
    quantization, such as Q4_0; None where the user named neither."""

    repository: str
    wanted: str | None = None


def parse_reference(model: str) -> Reference:
    """`owner/name`, `owner/name:Q4_0` as for llama.cpp and vLLM, or `owner/name/file.gguf`."""
    for pattern in (_WITH_FILE, _WITH_QUANTIZATION):
        if match := pattern.fullmatch(model):
            return Reference(match[1], match[2])
    return Reference(model)


def gguf_models(names: Collection[str]) -> list[str]:
    """The first or only file of each model among files, by name."""
    return sorted(name for name in names if is_model_name(name))


def choose(model: str, names: Collection[str], wanted: str | None) -> list[str]:
    """All files of the one that is wanted: several if it is split. Raises InvalidModel. model: its
    name for the message, and how it is named. names: of all files."""
    models = gguf_models(names)
    found = _matching(models, wanted)
    if len(found) != 1:
        raise _not_one(model, found or models, wanted)
    folder, slash, name = found[0].rpartition("/")
    parts = [folder + slash + part for part in split_names(name)]
    if missing := [part for part in parts if part not in names]:
        raise InvalidModel(
            f"{model} lacks {missing[0]}, a part of {found[0]}; download the model again",
            brief=f"{missing[0]} is missing",
        )
    return parts


def _matching(models: list[str], wanted: str | None) -> list[str]:
    if wanted is None:
        return models
    if wanted.endswith(SUFFIX):
        folder, slash, name = wanted.rpartition("/")
        return [each for each in models if each == folder + slash + split_names(name)[0]]
    # In the name of the file or of its folder, between these: Q4_K is not Q4_K_M.
    word = re.compile(rf"(?:^|[-./]){re.escape(wanted)}(?:$|[-./])", re.IGNORECASE)
    return [each for each in models if word.search(each)]


def _not_one(model: str, models: list[str], wanted: str | None) -> InvalidModel:
    asked = f"no GGUF model {wanted!r}" if wanted else "no GGUF model"
    if not models:
        return InvalidModel(f"{model} has {asked}", brief="no GGUF model")
    shown = ", ".join(models[:_SHOWN]) + ", ..." * (len(models) > _SHOWN)
    is_several = wanted is None or len(_matching(models, wanted)) > 1
    what = f"{len(models)} GGUF models" if is_several else asked
    return InvalidModel(
        f"{model} has {what}; name one of its files, as in {model}/{models[0]}: {shown}",
        brief=f"has {len(models)} GGUF models; name one of them",
    )


def check_gguf(path: Path, *, needs_weights: bool = True) -> ModelConfig:
    """Raises InvalidModel unless it can be served. needs_weights: False for made-up weights."""
    gguf = open_gguf(path)
    config = ModelConfig.from_dir(path)
    if needs_weights:
        _check_tensors(gguf, config)
        check_tokenizer(gguf, config.vocab_size)
    return config


def _check_tensors(gguf: GgufFile, config: ModelConfig) -> None:
    names = GgufNames(config, gguf)
    expected = names.shapes
    if missing := expected.keys() - gguf.tensors.keys():
        raise InvalidModel(
            f"{gguf.path} lacks the tensor {min(missing)!r}, which its metadata implies; download "
            "or convert the model again",
            brief=f"{len(missing)} of its tensors are missing",
        )
    others = [name for name in gguf.tensors if name not in expected and not names.is_unused(name)]
    if others:
        raise InvalidModel(
            f"{gguf.path} has the tensor {others[0]!r}, which changes what the model computes in a "
            f"way that is not supported for its architecture, {config.family}",
            brief=f"{others[0]} is not supported",
        )
    for name, shape in expected.items():
        if not names.fits(name, found := gguf.tensors[name].shape):
            raise InvalidModel(
                f"{gguf.path} has the tensor {name!r} of the shape {found}, which does not fit "
                f"the {shape} that its metadata implies; download or convert the model again",
                brief=f"{name} has an unexpected shape",
            )
