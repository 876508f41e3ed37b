"""`QuantizationConfig`: which layers a checkpoint stores how, and the `Settings` it is parsed from.

Imports no tensors.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from penstock.engine.files.json_file import Fields, shown
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.scheme import TensorScheme

# The class that all layers have which can be quantized, as checkpoints name it.
LINEAR = "Linear"
# Ranks have some of the columns of these; of all others, some of the rows.
_BY_COLUMNS = (".o_proj", ".out_proj", ".down_proj")
_LAYER = "model.layers."

_ADVICE = (
    "use a version of the model in FP8, AWQ, GPTQ or compressed-tensors, or the float32, float16 "
    "or bfloat16 one"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """path: of the file. key: in it, for messages. fields: of that key's object."""

    path: str
    key: str
    fields: Fields

    @classmethod
    def of(cls, path: object, key: str, content: dict[str, object]) -> "Settings":
        return cls(str(path), key, Fields(f"{path}: {key}", content))

    def unsupported(self, name: str) -> InvalidModel:
        """name: of the format, and what about it is not supported."""
        return InvalidModel(
            f"{self.path} has a {self.key}, so the weights are quantized in the format {name}, "
            f"which is not supported; {_ADVICE}",
            brief=f"{name} weights are not supported",
        )

    def only(self, name: str, allowed: tuple[object, ...], format_name: str) -> None:
        """Raises InvalidModel unless the field is absent or has one of these values."""
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            raise self.unsupported(f"{format_name} with {name} {shown(value)}")

    def group_size(self, name: str = "group_size") -> int | None:
        """Returns None for -1 or null, which mean the whole row."""
        if self.fields.get(name) in (None, -1):
            return None
        return self.fields.count(name)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """targets: names of layers, regular expressions after "re:", or classes. scheme: None where
    they are plain."""

    targets: tuple[str, ...]
    scheme: TensorScheme | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """name: of the format, for people. groups: a layer belongs to the first that names it, or else
    to the first that names its class. ignored: layers that are plain, as in `LayerGroup`.
    has_kv_scales: whether the checkpoint is meant for a quantized KV cache. first_layer, num_ranks:
    where the part of the model begins that `scheme_of_part` is about, and how many ranks have a
    part of each of its layers.

    Names are those of the checkpoint, such as "model.layers.0.self_attn.q_proj".
    """

    name: str
    groups: tuple[LayerGroup, ...]
    ignored: tuple[str, ...] = ()
    has_kv_scales: bool = False
    first_layer: int = 0
    num_ranks: int = 1

    def renamed(self, rename: Callable[[str], str]) -> "QuantizationConfig":
        """With other names of layers; patterns are renamed as names are."""
        groups = (replace(each, targets=tuple(map(rename, each.targets))) for each in self.groups)
        return replace(self, groups=tuple(groups), ignored=tuple(map(rename, self.ignored)))

    def scheme_of(self, layer: str) -> TensorScheme | None:
        """Returns None where config.json says that the layer is plain."""
        if LINEAR in self.ignored or _name(self.ignored, layer):
            return None
        return self.scheme_if_quantized(layer)

    def scheme_of_part(self, layer: str, shape: tuple[int, int]) -> TensorScheme | None:
        """Returns that of a stage's or a rank's part of a layer. layer: counted from the first of
        the stage. shape: (out_features, in_features) of the part."""
        if layer.startswith(_LAYER):
            index, _, rest = layer.removeprefix(_LAYER).partition(".")
            layer = f"{_LAYER}{int(index) + self.first_layer}.{rest}"
        scheme = self.scheme_of(layer)
        if scheme is None or self.num_ranks == 1:
            return scheme
        rows, columns = shape
        if layer.endswith(_BY_COLUMNS):
            return scheme.divided(0, columns)
        return scheme.divided(rows, 0)

    def scheme_if_quantized(self, layer: str) -> TensorScheme | None:
        """Returns that of a layer whose tensors show that it is quantized, even if it is ignored.
        None where no group has it."""
        for group in self.groups:
            if _name(group.targets, layer):
                return group.scheme
        for group in self.groups:
            if LINEAR in group.targets:
                return group.scheme
        return None


def _name(targets: tuple[str, ...], layer: str) -> bool:
    """Returns whether any target names this layer: in full, in part ("mlp", "lm_head"), with
    wildcards ("model.layers.0.*") or by a regular expression, which must match its beginning."""
    names, patterns = _by_kind(targets)
    parts = layer.split(".")
    ends = range(1, len(parts) + 1)
    # Looked up, as a mixture has tens of thousands of layers, and checkpoints hundreds of names.
    if names and any(".".join(parts[i:end]) in names for end in ends for i in range(end)):
        return True
    return any(_matches(pattern, layer) for pattern in patterns)


@lru_cache
def _by_kind(targets: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names, and patterns of them."""
    patterns = tuple(
        target for target in targets if target.startswith("re:") or any(c in target for c in "*?[")
    )
    return frozenset(targets) - frozenset(patterns), patterns


def _matches(pattern: str, layer: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), layer) is not None
    return fnmatchcase(layer, pattern)
