"""MXFP4 as gpt-oss has it, of experts alone, which are stacked in the file; and ModelOpt's."""

from dataclasses import dataclass

from penstock.engine.files.json_file import shown
from penstock.engine.models.formats.config import LINEAR, LayerGroup, QuantizationConfig, Settings
from penstock.engine.models.formats.fp8.config import Fp8
from penstock.engine.models.formats.scheme import GroupedScheme, TensorScheme

_EXPERTS = "re:.*\\.mlp\\.experts\\..*"
# So many columns share a power of two in the microscaling formats.
_GROUP_SIZE = 32
_NVFP4_GROUP = 16

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


def parse_modelopt(settings: Settings) -> QuantizationConfig:
    """Parses NVIDIA's ModelOpt, FP8 and NVFP4, whose settings are in config.json or
    hf_quant_config.json. Source of the layout: modelopt/torch/export/quant_utils.py.

    settings: the object with quant_algo, or one that has it under "quantization".
    """
    if settings.fields.get("quantization") is not None:
        content = settings.fields.mapping("quantization")
        settings = Settings.of(settings.path, f"{settings.key}: quantization", content)
    fields = settings.fields
    algorithm = fields.text("quant_algo")
    scheme: TensorScheme
    match (algorithm or "").upper():
        case "FP8" | "FP8_PER_CHANNEL_PER_TOKEN":
            scheme = Fp8()
        case "NVFP4":
            group_size = fields.count("group_size", default=_NVFP4_GROUP)
            scheme = Fp4(group_size=group_size, weight="weight", global_scale="weight_scale_2")
        case _:
            raise settings.unsupported(f"ModelOpt {shown(algorithm)}" if algorithm else "ModelOpt")
    names = ("exclude_modules", "ignore", "modules_to_not_convert")
    kv_cache = ("kv_cache_quant_algo", "kv_cache_scheme")
    return QuantizationConfig(
        name=f"ModelOpt {algorithm}",
        groups=(LayerGroup((LINEAR,), scheme),),
        ignored=tuple(name for key in names for name in fields.names(key) or ()),
        has_kv_scales=any(fields.get(key) is not None for key in kv_cache),
    )
