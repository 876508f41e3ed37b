"""MXFP4 as gpt-oss has it: of experts alone, which are stacked in the file."""

from penstock.engine.models.formats.config import LayerGroup, QuantizationConfig
from penstock.engine.models.formats.scheme import Fp4
from penstock.engine.models.formats.settings import Settings

_EXPERTS = "re:.*\\.mlp\\.experts\\..*"
# Of the microscaling formats: columns that share a power of two.
_GROUP_SIZE = 32


def parse_mxfp4(settings: Settings) -> QuantizationConfig:
    scheme = Fp4(_GROUP_SIZE, weight="blocks", scale="scales")
    return QuantizationConfig(
        name="MXFP4",
        groups=(LayerGroup((_EXPERTS,), scheme),),
        ignored=tuple(settings.fields.names("modules_to_not_convert") or ()),
    )
