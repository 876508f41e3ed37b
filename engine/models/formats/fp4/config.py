"""MXFP4 as gpt-oss has it: of experts alone, which are stacked in the file."""

from dataclasses import dataclass

from penstock.engine.models.formats.config import LayerGroup, QuantizationConfig, Settings
from penstock.engine.models.formats.scheme import GroupedScheme

_EXPERTS = "re:.*\\.mlp\\.experts\\..*"
# So many columns share a power of two in the microscaling formats.
_GROUP_SIZE = 32

# Twice the numbers that the codes stand for, so that they are integers; bit 3 is the sign.
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4(GroupedScheme):
    """E2M1, two to a byte, that of the even column in the low half, with a scale for each group.

    weight, scale: the names of the codes and of the groups' scales. global_scale: the name of a
    scale of all groups, whose scales are then e4m3; without it, they are powers of two (E8M0).
    divides: whether it is to be divided by.
    """

    group_size: int
    weight: str
    global_scale: str | None = None
    divides: bool = False
    scale: str = "weight_scale"
    levels = (*_TWICE, *(-level for level in _TWICE))

    @property
    def has_wide_scales(self) -> bool:
        # A power of two is one in float16; e4m3 times a float32 fills a float32.
        return self.global_scale is not None


def parse_mxfp4(settings: Settings) -> QuantizationConfig:
    scheme = Fp4(group_size=_GROUP_SIZE, weight="blocks", scale="scales")
    return QuantizationConfig(
        name="MXFP4",
        groups=(LayerGroup((_EXPERTS,), scheme),),
        ignored=tuple(settings.fields.names("modules_to_not_convert") or ()),
    )
