"""FP8 as transformers writes it: Qwen's, DeepSeek's and Mistral's own checkpoints."""

from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.config import LINEAR, LayerGroup, QuantizationConfig
from penstock.engine.models.formats.scheme import Fp8
from penstock.engine.models.formats.settings import Settings


def parse_fp8(settings: Settings) -> QuantizationConfig:
    fields = settings.fields
    settings.only("fmt", ("e4m3", "float8_e4m3fn"), "FP8")
    names = ("modules_to_not_convert", "ignored_layers", "ignore")
    ignored = [name for key in names for name in fields.names(key) or ()]
    return QuantizationConfig(
        name="FP8",
        groups=(LayerGroup((LINEAR,), Fp8(block(settings, "weight_block_size"))),),
        ignored=(*ignored, "lm_head"),
        has_kv_scales=fields.get("kv_cache_scheme") is not None,
    )


def block(settings: Settings, name: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale. Raises InvalidModel."""
    value = settings.fields.get(name)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise _not_a_block(settings, name, value)
    return value[0], value[1]


def _not_a_block(settings: Settings, name: str, value: object) -> InvalidModel:
    return settings.fields.wrong(name, "two positive integers, such as [128, 128]", value)
