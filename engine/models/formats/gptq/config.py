"""GPTQ as AutoGPTQ and GPTQModel write it: symmetric, in 4 or 8 bits.

Source of the layout: `pack` in AutoGPTQ's auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; of
`dynamic`, GPTQModel's README.
"""

from dataclasses import dataclass
from typing import Any

from penstock.engine.files.json_file import shown
from penstock.engine.models.formats.config import LINEAR, LayerGroup, QuantizationConfig, Settings
from penstock.engine.models.formats.scheme import GroupedScheme

# By checkpoint_format: what is to be added to the zeros that are stored.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(GroupedScheme):
    """`qweight` packed along K, `qzeros` along N, symmetric.

    zero_offset: 1 where the zeros are stored less one, as in the format's first version, or 0.
    """

    zero_offset: int = 1


def parse_gptq(settings: Settings) -> QuantizationConfig:
    fields = settings.fields
    version = fields.text("checkpoint_format") or "gptq"
    if version not in _ZERO_OFFSETS:
        raise settings.unsupported(f"GPTQ with checkpoint_format {shown(version)}")
    groups, ignored = [], []
    for pattern, changes in fields.mapping("dynamic").items():
        name = f"re:{pattern[2:] if pattern[:2] in ('+:', '-:') else pattern}"
        if pattern.startswith("-:"):
            ignored.append(name)
        else:
            groups.append(LayerGroup((name,), _scheme(settings, changes, version)))
    groups.append(LayerGroup((LINEAR,), _scheme(settings, {}, version)))
    if not fields.flag("lm_head"):
        ignored.append("lm_head")
    return QuantizationConfig(name="GPTQ", groups=tuple(groups), ignored=tuple(ignored))


def _scheme(settings: Settings, changes: Any, version: str) -> Gptq:
    """changes: those of `dynamic`, to the settings of all other layers."""
    if not isinstance(changes, dict):
        raise settings.fields.wrong("dynamic", "objects by regular expression", changes)
    keys = ("bits", "group_size", "sym", "desc_act")
    content = {key: settings.fields.get(key) for key in keys} | changes
    layer = Settings.of(settings.path, settings.key, content)
    bits = layer.fields.count("bits", default=4)
    if bits not in (4, 8):
        raise settings.unsupported(f"GPTQ of {bits} bits")
    if not layer.fields.flag("sym", default=True):
        raise settings.unsupported("asymmetric GPTQ")
    group_size = layer.group_size()
    if layer.fields.flag("desc_act") and group_size is not None:
        raise settings.unsupported("GPTQ with desc_act and groups")
    return Gptq(bits=bits, group_size=group_size, zero_offset=_ZERO_OFFSETS[version])
