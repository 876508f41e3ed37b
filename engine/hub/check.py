"""Whether a model can be served, by its JSON files and the names of the others.

The start refuses by it, for a directory and for a model of the hub, whose weights are not yet
downloaded; so does the list of models. Of safetensors it reads the headers, where they are there.
What only the weights themselves show is found later.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.config import ModelImpl
from penstock.engine.errors import unreadable
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.json_file import CONFIG, Fields, check_regular
from penstock.engine.files.safetensors import INDEX, SINGLE, open_safetensors, read_weight_map
from penstock.engine.files.tokenizer_model import TEKKEN, tiktoken_only
from penstock.engine.hub.gguf import gguf_models
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.fallback.source import TransformersClass, find_class
from penstock.engine.models.families.families import find_family
from penstock.engine.models.families.unsupported import (
    not_a_model,
    without_config,
    without_weights,
)
from penstock.engine.models.formats.parse import HF_QUANT_CONFIG

GENERATION_CONFIG = "generation_config.json"
# One of them is enough; without tokenizer.json, the others are converted.
_TOKENIZERS = ("tokenizer.json", TEKKEN, "vocab.*", "*.model")
_TIKTOKEN = ("*.tiktoken", "tiktoken.model")
# These are read, here or later, by us or by transformers.
_READ = (
    *(CONFIG, GENERATION_CONFIG, INDEX, SINGLE, "modules.json", "chat_template.jinja"),
    *(*_TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "chat_template.json", HF_QUANT_CONFIG),
)
# Directories below the one that was named are looked at, as one of them may be meant.
_MAX_DEPTH = 2
_MAX_ENTRIES = 2_000


def check_directory(
    directory: Path, *, needs_weights: bool = True, impl: ModelImpl = ModelImpl.AUTO
) -> ModelConfig | TransformersClass:
    """Raises InvalidModel unless it can be served."""
    names = names_in(directory)
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in _READ):
            check_regular(directory / name)
    for template in sorted(directory.glob("additional_chat_templates/*.jinja")):
        check_regular(template)
    config = check_model(str(directory), directory, names, needs_weights=needs_weights, impl=impl)
    if needs_weights:
        for name in weight_files(str(directory), directory, names):
            open_safetensors(directory / name, framework="numpy")
    return config


def check_model(
    model: str,
    directory: Path,
    names: Collection[str],
    *,
    needs_weights: bool = True,
    impl: ModelImpl = ModelImpl.AUTO,
) -> ModelConfig | TransformersClass:
    """Raises InvalidModel unless it can be served.

    model: its name for the message. names: of all its files; of these, `directory` must have
    config.json, generation_config.json, hf_quant_config.json and the index of shards.
    needs_weights: False for made-up weights, which need no tokenizer either.
    """
    if CONFIG not in names:
        raise without_config(model, names)
    config = find_implementation(directory, impl)
    if needs_weights:
        if missing := [file for file in weight_files(model, directory, names) if file not in names]:
            raise InvalidModel(
                f"{model} lacks {missing[0]}, which {INDEX} names; download the model again, or "
                "use --load-format dummy for random weights",
                brief=f"{len(missing)} of its weight files are missing",
            )
        tiktoken = {name for name in names for each in _TIKTOKEN if fnmatchcase(name, each)}
        others = set(names) - tiktoken
        if not any(fnmatchcase(name, pattern) for name in others for pattern in _TOKENIZERS):
            if tiktoken:
                raise tiktoken_only(model)
            raise InvalidModel(
                f"{model} has no tokenizer that can be read; copy the tokenizer.json of its base "
                "model into it",
                brief="no tokenizer",
            )
    return config


def holds_gguf(names: Collection[str]) -> bool:
    """Whether a directory with these files is served from a GGUF file in it: it has no others."""
    has_others = any(fnmatchcase(name, "*.safetensors") for name in names if "/" not in name)
    return not has_others and bool(gguf_models(names))


def weight_files(model: str, directory: Path, names: Collection[str]) -> list[str]:
    """The safetensors that are read: the index's shards, or the only file. Raises InvalidModel."""
    if INDEX in names:
        return sorted(set(read_weight_map(directory / INDEX).values()))
    if SINGLE in names:
        return [SINGLE]
    raise without_weights(model, names)


def names_in(directory: Path) -> list[str]:
    """Names what is in it, relative to it; of its directories only what may be a model."""
    if not directory.is_dir():
        raise not_a_model(str(directory))
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise unreadable(directory, error) from None
    names = [path.name for path in paths]
    if CONFIG in names:
        return names
    below = (inner for path in paths[:_MAX_ENTRIES] for inner in _models_below(path, _MAX_DEPTH))
    return [*names, *(str(path.relative_to(directory)) for path in below)]


def _models_below(path: Path, depth: int) -> list[Path]:
    """Each config.json in and below it; none of a file."""
    try:
        if not depth or not path.is_dir():
            return []
        if (path / CONFIG).is_file():
            return [path / CONFIG]
        entries = sorted(path.iterdir())[:_MAX_ENTRIES]
    except OSError:  # not ours to read
        return []
    return [inner for entry in entries for inner in _models_below(entry, depth - 1)]


if TYPE_CHECKING:
    from penstock.engine.models.fallback.load import TransformersConfig


def find_implementation(
    model_dir: Path, wanted: ModelImpl = ModelImpl.AUTO
) -> ModelConfig | TransformersClass:
    """By config.json alone. Raises InvalidModel where there is none. model_dir: or a GGUF file,
    whose families are all our own."""
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
