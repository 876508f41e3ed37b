"""compressed-tensors, the format of LLM Compressor: groups of layers, each with its own scheme.

Source of the layouts: the compressors of the package compressed-tensors, 0.20.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from penstock.engine.files.json_file import shown
from penstock.engine.models.formats.config import LayerGroup, QuantizationConfig, Settings
from penstock.engine.models.formats.fp4.config import Fp4
from penstock.engine.models.formats.fp8.config import Fp8, block
from penstock.engine.models.formats.scheme import GroupedScheme, TensorScheme

_NAME = "compressed-tensors"
# Strategies whose scales are one for all or one for each row.
_WHOLE_ROWS = ("tensor", "channel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers(GroupedScheme):
    """Integers with a scale for all, each row or each group. is_packed: in `weight_packed`, as
    unsigned numbers; otherwise `weight` is int8."""

    is_packed: bool


def parse_compressed_tensors(settings: Settings) -> QuantizationConfig:
    fields = settings.fields
    sparsity = Settings.of(settings.path, "sparsity_config", fields.mapping("sparsity_config"))
    sparse = sparsity.fields.text("format")
    if sparse not in (None, "dense"):
        raise settings.unsupported(f"{_NAME} {sparse}")
    if fields.mapping("transform_config"):
        raise settings.unsupported(f"{_NAME} with transforms")
    groups = []
    for name, content in fields.mapping("config_groups").items():
        if not isinstance(content, dict):
            raise fields.wrong(f"config_groups.{name}", "an object", content)
        group = Settings.of(settings.path, f"{settings.key}: config_groups.{name}", content)
        if not group.fields.mapping("weights"):  # of activations or the KV cache alone
            continue
        targets = tuple(group.fields.names("targets") or ())
        groups.append(LayerGroup(targets, _scheme(settings, group, fields.text("format"))))
    has_kv_scales = fields.get("kv_cache_scheme") is not None
    if not groups and not has_kv_scales:
        raise settings.unsupported(f"{_NAME} {fields.text('format') or 'of no groups'}")
    return QuantizationConfig(
        name=_NAME,
        groups=tuple(groups),
        ignored=tuple(fields.names("ignore") or ()),
        has_kv_scales=has_kv_scales,
    )


def _scheme(settings: Settings, group: Settings, default: str | None) -> TensorScheme | None:
    name = group.fields.text("format") or default or "of no format"
    if name == "dense":
        return None
    content = group.fields.mapping("weights")
    weights = Settings.of(settings.path, f"{group.key}.weights", content)
    read = _FORMATS.get(name)
    kind = weights.fields.text("type") or "int"
    if name == "naive-quantized":
        read = _fp8 if kind == "float" else _int8
    if read is None:
        raise settings.unsupported(f"{_NAME} {name}")
    if weights.fields.get("actorder") in ("group", "dynamic", True):
        raise settings.unsupported(f"{_NAME} {name} with actorder 'group'")
    bits = weights.fields.count("num_bits", default=8)
    scheme = read(weights, bits, kind)
    if scheme is None:
        strategy = shown(weights.fields.get("strategy"))
        raise settings.unsupported(f"{_NAME} {name} of {bits} bits, {kind}, strategy {strategy}")
    return scheme


def _fp8(weights: Settings, bits: int, kind: str) -> TensorScheme | None:
    strategy = weights.fields.text("strategy")
    if bits != 8 or kind != "float":
        return None
    if strategy == "block" and (sizes := block(weights, "block_structure")):
        return Fp8(sizes)
    return Fp8() if strategy in _WHOLE_ROWS else None


def _integers(
    weights: Settings, bits: int, kind: str, *, served: tuple[int, ...], is_packed: bool
) -> TensorScheme | None:
    """served: numbers of bits."""
    strategy = weights.fields.text("strategy")
    if bits not in served or kind != "int" or strategy not in (*_WHOLE_ROWS, "group"):
        return None
    group_size = weights.group_size() if strategy == "group" else None
    has_zeros = not weights.fields.flag("symmetric", default=True)
    return Integers(bits=bits, group_size=group_size, has_zeros=has_zeros, is_packed=is_packed)


def _fp4(
    weights: Settings, bits: int, kind: str, *, default: int, global_scale: str | None = None
) -> TensorScheme | None:
    """default: columns of a scale."""
    scheme = Fp4(
        group_size=weights.fields.count("group_size", default=default),
        weight="weight_packed",
        global_scale=global_scale,
        divides=global_scale is not None,
    )
    return scheme if (bits, kind) == (4, "float") else None


_int8 = partial(_integers, served=(8,), is_packed=False)
# None for what is not supported.
_FORMATS: dict[str, Callable[[Settings, int, str], TensorScheme | None]] = {
    "float-quantized": _fp8,
    "int-quantized": _int8,
    "pack-quantized": partial(_integers, served=(4, 8), is_packed=True),
    "mxfp4-pack-quantized": partial(_fp4, default=32),
    "nvfp4-pack-quantized": partial(_fp4, default=16, global_scale="weight_global_scale"),
}
