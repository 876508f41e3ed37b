"""GPTQ as AutoGPTQ and GPTQModel write it, in 4 or 8 bits.

Source of the layout: `pack` in AutoGPTQ's auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; of
`dynamic`, GPTQModel's README; of the versions, `convert_gptq_v1_to_v2_format_module` in its
gptqmodel/utils/model.py.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from penstock.engine.files.json_file import shown
from penstock.engine.models.formats.config import LINEAR, LayerGroup, QuantizationConfig, Settings
from penstock.engine.models.formats.scheme import GroupedScheme, TensorScheme
from penstock.engine.models.layers.weight_formats import (
    BY_COLUMN_FORMAT,
    CodedLayout,
    integer_format,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from penstock.engine.models.layers.linear import StoredLinear

# By checkpoint_format: what is to be added to the zeros that are stored.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_EXPERTS = r"re:.*\.experts\."


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(GroupedScheme):
    """`qweight` packed along K, `qzeros` along N.

    zero_offset: 1 where the zeros are stored less one, as in the format's first version, or 0.
    is_ordered: whether `g_idx` may have a column in any group, as desc_act leaves it. is_by_column:
    whether the columns that are read cannot be put in the order of their groups then, so that each
    gets a scale of its own, and no path computes with the codes.
    """

    zero_offset: int = 1
    is_ordered: bool = False
    is_by_column: bool = False

    @property
    def weight_format(self) -> str:
        whole = integer_format(self.bits, not self.has_zeros)
        return BY_COLUMN_FORMAT if self.is_by_column else whole

    def gpu_layout(self, in_features: int) -> CodedLayout | None:
        return None if self.is_ordered else GroupedScheme.gpu_layout(self, in_features)

    def divided(self, rows: int, columns: int) -> Self:
        if self.is_ordered:  # some of the columns have more of one group than of another
            return replace(self, is_by_column=self.is_by_column or columns > 0)
        return GroupedScheme.divided(self, rows, columns)

    def made_up(
        self, shape: tuple[int, int], bias: "Tensor | None", std: float, generator: "Generator"
    ) -> "StoredLinear":
        return TensorScheme.made_up(self, shape, bias, std, generator)


def parse_gptq(settings: Settings) -> QuantizationConfig:
    fields = settings.fields
    version = fields.text("checkpoint_format") or fields.text("format") or "gptq"
    if version not in _ZERO_OFFSETS:
        raise settings.unsupported(f"GPTQ with checkpoint_format {shown(version)}")
    groups, ignored = [], []
    for pattern, changes in fields.mapping("dynamic").items():
        name = f"re:{pattern[2:] if pattern[:2] in ('+:', '-:') else pattern}"
        if pattern.startswith("-:"):
            ignored.append(name)
        else:
            groups.append(LayerGroup((name,), _scheme(settings, changes, version)))
    scheme = _scheme(settings, {}, version)
    if scheme.is_ordered:  # experts read the same states, and each orders them otherwise
        groups.append(LayerGroup((_EXPERTS,), replace(scheme, is_by_column=True)))
    groups.append(LayerGroup((LINEAR,), scheme))
    if not fields.flag("lm_head"):
        ignored.append("lm_head")
    return QuantizationConfig(name="GPTQ", groups=tuple(groups), ignored=tuple(ignored))


def _scheme(settings: Settings, changes: Any, version: str) -> Gptq:
    """changes: those of `dynamic`, to the settings of all other layers."""
    if not isinstance(changes, dict):
        raise settings.fields.wrong("dynamic", "objects by regular expression", changes)
    keys = ("bits", "group_size", "sym", "desc_act", "static_groups")
    content = {key: settings.fields.get(key) for key in keys} | changes
    layer = Settings.of(settings.path, settings.key, content)
    bits = layer.fields.count("bits", default=4)
    if bits not in (4, 8):
        raise settings.unsupported(f"GPTQ of {bits} bits")
    group_size, flag = layer.group_size(), layer.fields.flag
    return Gptq(
        bits=bits,
        group_size=group_size,
        has_zeros=not flag("sym", default=True),
        zero_offset=_ZERO_OFFSETS[version],
        is_ordered=flag("desc_act") and group_size is not None and not flag("static_groups"),
    )
