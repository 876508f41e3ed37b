"""Refuses a model that cannot be served: names its format or family, and those supported.

It looks at the names of files and at config.json alone, so that a model on the hub is refused
before its weights are downloaded.
"""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from penstock.engine.files.json_file import Fields, shown
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families.pooled_heads import CLASSIFIER
from penstock.engine.models.formats.parse import quantization_name

_READS = "Penstock reads weights from safetensors and GGUF files"

# Keys of config.json that count the experts of a layer.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ENCODERS = re.compile(
    r"(albert|bert|camembert|deberta|distilbert|electra|modernbert|mpnet|nomic_bert|roberta)"
)
_NAMED = 5  # Architectures that a refusal names.
_CLASSIFIERS = re.compile(r"For(Sequence|Token)Classification$|RewardModel$")
# Files by which a directory without a config.json is recognized: pattern, what it is (in brief),
# and what to do. The first that matches counts.
_ADAPTER = (
    "adapter_config.json",
    "a LoRA adapter",
    "serve its base model with --enable-lora and name it with --lora-modules",
)
_OTHERS = (
    ("model_index.json", "a diffusers pipeline", "use a model that generates text"),
    ("*.onnx", "ONNX", "use the version of the model in safetensors"),
)
_ORIGINAL = (
    "consolidated*",
    "the original format of Mistral or Meta (consolidated.*)",
    "use the version of the model in Hugging Face's layout, with config.json and model.safetensors",
)
_PICKLED = (
    "*.bin",
    "PyTorch's pickled weights (*.bin)",
    "convert them with `save_pretrained` of transformers; unpickling may run any code",
)
_WITHOUT_CONFIG = (
    _ADAPTER,
    *_OTHERS,
    _ORIGINAL,
    _PICKLED,
    ("*.pth", *_PICKLED[1:]),
    ("*.pt", *_PICKLED[1:]),
)
_WITHOUT_WEIGHTS = (
    _ADAPTER,
    _ORIGINAL,
    _PICKLED,
    ("*.h5", "TensorFlow weights", "use the version of the model in safetensors"),
    ("*.msgpack", "Flax weights", "use the version of the model in safetensors"),
    *_OTHERS,
)


def unsupported_family(
    fields: Fields,
    architectures: list[str],
    model_type: str | None,
    decoders: list[str],
    encoders: list[str],
) -> InvalidModel:
    """Refuses a config.json whose architecture is none of those that are supported, and names
    those of its kind."""
    kind = _kind(fields, architectures, model_type)
    supported = encoders if kind is not None and kind.startswith("an encoder,") else decoders
    if kind is not None and kind.startswith("a classifier,"):
        supported = [each.removesuffix("Model") + CLASSIFIER for each in encoders]
    name = shown(", ".join(architectures) or model_type).strip("'\"")
    can_be = f"supported are {_nearest(name, supported)}"
    if not architectures and model_type is None:
        return InvalidModel(
            f"{fields.path} names no architecture and no model_type, so the model's family is "
            f'unknown; add "architectures", such as [{supported[0]!r}], if it is one of those '
            f"that are supported: {can_be}",
            brief="config.json names no architecture",
        )
    kinds = [kind] if kind else []
    if quantized := quantization_name(fields):
        kinds.append(f"with {quantized} weights")
    noted = f" ({', '.join(kinds)})" if kinds else ""
    return InvalidModel(
        f"{fields.path} names the architecture {name}{noted}, which is not supported; {can_be}",
        brief=f"{name}{noted} is not supported",
    )


def without_config(model: str, names: Collection[str]) -> InvalidModel:
    """Refuses a directory or repository that has no config.json at its top.

    model: its name for the message. names: paths of its files, relative to it.
    """
    if not names:
        return InvalidModel(
            f"{model} is empty; name a directory that has config.json, safetensors and a "
            "tokenizer, or a Hugging Face id",
            brief="empty",
        )
    if error := _recognized(model, names, _WITHOUT_CONFIG):
        return error
    inside = sorted({str(PurePosixPath(n).parent) for n in names if n.endswith("/config.json")})
    if inside:
        return InvalidModel(
            f"{model} has no config.json itself, but its directory {inside[0]} has one; name that "
            "directory",
            brief=f"no config.json, but {inside[0]} has one",
        )
    return InvalidModel(
        f"{model} has no config.json, so it is no model in Hugging Face's layout; name a directory "
        "that has config.json, safetensors and a tokenizer",
        brief="no config.json",
    )


def without_weights(model: str, names: Collection[str]) -> InvalidModel:
    """Refuses one that has a config.json, but neither model.safetensors nor an index of shards."""
    if error := _recognized(model, names, _WITHOUT_WEIGHTS):
        return error
    if others := sorted(name for name in names if fnmatchcase(name, "*.safetensors")):
        return InvalidModel(
            f"{model} has {others[0]}, but neither model.safetensors nor "
            "model.safetensors.index.json; download the model again",
            brief="neither model.safetensors nor an index of shards",
        )
    return InvalidModel(
        f"{model} has no weights; download the model again, or use --load-format dummy for "
        f"random ones ({_READS})",
        brief="no weights",
    )


def not_a_model(path: str) -> InvalidModel:
    """Refuses a path to what is neither a directory nor a GGUF file. path: as the user named it."""
    return InvalidModel(
        f"the model {path!r} is not a directory; name the directory that holds config.json and "
        "the safetensors, or a GGUF file",
        brief="not a directory",
    )


def _recognized(
    model: str, names: Iterable[str], formats: Iterable[tuple[str, str, str]]
) -> InvalidModel | None:
    at_top = [name for name in names if "/" not in name]
    for pattern, what, advice in formats:
        if any(fnmatchcase(name, pattern) for name in at_top):
            return InvalidModel(
                f"{model} is {what}, which is not supported; {advice} ({_READS})"
                if what.startswith("a ")
                else f"{model} has its weights in {what}, which is not supported; {advice} "
                f"({_READS})",
                brief=what,
            )
    return None


def _nearest(name: str, supported: list[str]) -> str:
    """The supported architectures that are most like one, and where all are: a few, since a start
    refuses in one line."""
    near = list(dict.fromkeys([*get_close_matches(name, supported, n=3), *supported]))
    others = f"{len(near) - _NAMED} more, which docs/families.md lists"
    return f"{', '.join(near[:_NAMED])} and {others}"


def _kind(fields: Fields, architectures: list[str], model_type: str | None) -> str | None:
    """In the words of the field, for those who do not know the architecture's name."""
    name = (architectures or [""])[0]
    if fields.get("is_encoder_decoder") is True:
        return "an encoder-decoder"
    if fields.get("vision_config") is not None or re.search(r"VL|Vision|Vit|CLIP", name):
        return "a vision model"
    if fields.get("audio_config") is not None:
        return "an audio model"
    if any(isinstance(fields.get(key), int) and fields.get(key) > 1 for key in EXPERTS):
        return "a mixture of experts"
    if _CLASSIFIERS.search(name):
        return "a classifier, which generates no text"
    if name.endswith("ForMaskedLM") or _ENCODERS.search(f"{model_type or name}".lower()):
        return "an encoder, which generates no text"
    return None
