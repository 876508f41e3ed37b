"""Which class of transformers computes a model, by the source of the installed package alone: a
model that has none is refused before its weights are downloaded, and nothing is imported for it.

What only the class itself shows is found when it is loaded.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from penstock.engine.config import ModelImpl
from penstock.engine.files.json_file import Fields, shown
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.parse import quantization_name

logger = logging.getLogger(__name__)

# How the classes of decoders end; those of text and images are other ones.
_DECODER = r"\w*(?:ForCausalLM|LMHeadModel)"
# A file has this name if its classes call the registry of attention functions.
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
# These layer_types attend to all keys, or by position. Others keep a state in place of
# keys and values, or choose keys by their content, which no short prompt shows.
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_CHOOSES_KEYS = re.compile(r"Indexer\b|index_topk")


class UnsupportedClass(InvalidModel):
    """A class of transformers whose answers would be wrong here, or that cannot be called."""

    def __init__(self, architecture: str, why: str) -> None:
        super().__init__(
            f"the architecture {architecture} has no implementation of our own, and cannot be "
            f"computed by transformers' class either: {why}",
            brief=f"{architecture} is not supported",
        )


@contextmanager
def calling(architecture: str, failure: str = "does not run on a step of ours") -> Iterator[None]:
    """Whatever a class raises when it is called as ours means that it cannot be. failure: what it
    then does, in words."""
    try:
        yield
    except InvalidModel:
        raise
    except Exception as error:
        if "out of memory" in str(error).lower():
            raise
        logger.debug("the class %s failed", architecture, exc_info=True)
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedClass(
            architecture, f"it {failure} ({type(error).__name__}: {reason})"
        ) from error


@dataclass(frozen=True, slots=True)
class TransformersClass:
    """family: as config.json has it. architecture: the class's name."""

    family: str
    architecture: str
    model_impl: ClassVar[ModelImpl] = ModelImpl.TRANSFORMERS


def find_class(fields: Fields) -> TransformersClass | None:
    """None where transformers has no decoder of this name. Raises InvalidModel for one that cannot
    be served. fields: of config.json."""
    found = _find(fields)
    if found is None:
        return None
    served, source = found
    if _REGISTRY not in source:
        raise UnsupportedClass(served.architecture, "it computes attention itself")
    if fields.get("is_encoder_decoder") is True:
        raise UnsupportedClass(served.architecture, "it is the decoder beside an encoder")
    if name := quantization_name(fields):
        raise InvalidModel(
            f"{fields.path} says that the weights are quantized, in the format {name}; the "
            f"architecture {served.architecture} has no implementation of our own, and "
            "transformers' class is served with plain weights alone: use the float32, float16 or "
            "bfloat16 version of the model",
            brief=f"{served.architecture} with {name} weights is not supported",
        )
    if _CHOOSES_KEYS.search(source):
        raise UnsupportedClass(
            served.architecture, "in long sequences its layers choose some of the keys by an index"
        )
    check_kinds(served, fields.get("layer_types"))
    return served


def check_kinds(served: TransformersClass, layer_types: object) -> None:
    """Raises UnsupportedClass. layer_types: as config.json has it."""
    for kind in layer_types if isinstance(layer_types, list) else ():
        if kind not in _KINDS:
            raise UnsupportedClass(
                served.architecture,
                f"its layers of the kind {shown(kind)} do not attend to all keys before a token, "
                "or to the last ones",
            )


def _find(fields: Fields) -> tuple[TransformersClass, str] | None:
    """The class, and the source of its file."""
    family = fields.text("model_type") or ""
    names = fields.names("architectures") or []
    if names:
        wanted = [re.escape(name) for name in names if re.fullmatch(_DECODER, name)]
    else:
        wanted = [_DECODER] if family else []
    if not wanted:
        return None
    pattern = re.compile(rf"^class ({'|'.join(wanted)})\(.*GenerationMixin", re.MULTILINE)
    for path in _sources(family, only_its_own=not names):
        source = path.read_text(encoding="utf-8")
        if match := pattern.search(source):
            return TransformersClass(family or match[1], match[1]), source
    return None


def _sources(family: str, *, only_its_own: bool) -> Iterator[Path]:
    """Yields files of transformers' models, this family's first."""
    spec = find_spec("transformers")
    assert spec and spec.origin, "transformers is not installed"
    folder = Path(spec.origin).parent / "models"
    module = re.sub(r"\W", "_", family)
    own = folder / module / f"modeling_{module}.py"
    if own.is_file():
        yield own
    if not only_its_own:
        yield from sorted(folder.glob("*/modeling_*.py"))
