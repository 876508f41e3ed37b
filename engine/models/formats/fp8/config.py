"""FP8 as transformers writes it: Qwen's, DeepSeek's and Mistral's own checkpoints."""

from dataclasses import dataclass, replace
from math import gcd

from penstock.engine.models.formats.config import LINEAR, LayerGroup, QuantizationConfig, Settings
from penstock.engine.models.formats.scheme import FLOAT32_BYTES, TensorScheme
from penstock.engine.models.layers.weight_formats import FP8_FORMAT, CodedLayout


@dataclass(frozen=True, slots=True)
class Fp8(TensorScheme):
    """`weight` e4m3 (N, K), times a scale for all of it, for each row or for each block. block:
    rows and columns; None for one scale or one for each row."""

    block: tuple[int, int] | None = None
    weight_format = FP8_FORMAT

    @property
    def columns_of_scale(self) -> int | None:
        return self.block[1] if self.block else None

    def num_bytes(self, out_features: int, in_features: int) -> int:
        rows, columns = self.block or (1, in_features)
        scales = -(-out_features // rows) * -(-in_features // columns)
        return out_features * in_features + FLOAT32_BYTES * scales

    def gpu_layout(self, in_features: int) -> CodedLayout | None:
        columns = self.columns_of_scale or in_features
        return CodedLayout.fitting(8, columns, in_features, has_zeros=False, has_halves=False)

    def divided(self, rows: int, columns: int) -> "Fp8":
        if self.block is None:
            return self
        return replace(self, block=(gcd(self.block[0], rows), gcd(self.block[1], columns)))


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
    """Returns the rows and columns that share a scale. Raises InvalidModel."""
    value = settings.fields.get(name)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise settings.fields.wrong(name, "two positive integers, such as [128, 128]", value)
    return value[0], value[1]
