"""NVIDIA's ModelOpt: FP8 and NVFP4, whose settings are in config.json or hf_quant_config.json.

Source of the layout: modelopt/torch/export/quant_utils.py.
"""

from penstock.engine.files.json_file import shown
from penstock.engine.models.formats.config import LINEAR, LayerGroup, QuantizationConfig, Settings
from penstock.engine.models.formats.fp4.config import Fp4
from penstock.engine.models.formats.fp8.config import Fp8
from penstock.engine.models.formats.scheme import TensorScheme

_NVFP4_GROUP = 16


def parse_modelopt(settings: Settings) -> QuantizationConfig:
    """settings: the object with quant_algo, or one that has it under "quantization"."""
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
