"""AWQ as AutoAWQ writes it.

Source of the layout: `WQLinear_GEMM` of AutoAWQ (awq/modules/linear/gemm.py).
"""

from dataclasses import dataclass

from penstock.engine.models.formats.config import LINEAR, LayerGroup, QuantizationConfig, Settings
from penstock.engine.models.formats.scheme import GroupedScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(GroupedScheme):
    """`qweight`, `qzeros` and `scales` with K first, packed along N in AWQ's own order."""

    has_zeros: bool = True


def parse_awq(settings: Settings) -> QuantizationConfig:
    fields = settings.fields
    for name in ("version", "checkpoint_format", "format"):
        settings.only(name, ("gemm", "GEMM"), "AWQ")
    bits = "bits" if fields.get("bits") is not None else "w_bit"
    settings.only(bits, (4,), "AWQ")
    settings.only("zero_point", (True,), "AWQ")
    size = "group_size" if fields.get("group_size") is not None else "q_group_size"
    ignored = fields.names("modules_to_not_convert") or []
    return QuantizationConfig(
        name="AWQ",
        groups=(LayerGroup((LINEAR,), Awq(group_size=settings.group_size(size))),),
        ignored=(*ignored, "lm_head"),
    )
