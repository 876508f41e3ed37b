"""Which quantization a model's files announce, and whether it is served. Imports no tensors."""

import re
from collections.abc import Callable
from pathlib import Path

from penstock.engine.files.json_file import Fields, read_object, shown
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.awq.config import parse_awq
from penstock.engine.models.formats.compressed_tensors.config import parse_compressed_tensors
from penstock.engine.models.formats.config import QuantizationConfig, Settings
from penstock.engine.models.formats.fp4.config import parse_modelopt, parse_mxfp4
from penstock.engine.models.formats.fp8.config import parse_fp8
from penstock.engine.models.formats.gptq.config import parse_gptq

# ModelOpt's, beside a config.json that mostly repeats it.
HF_QUANT_CONFIG = "hf_quant_config.json"
# How config.json announces quantized weights; `quantization` is MLX's.
_KEYS = ("quantization_config", "compression_config", "quantization")
_PARSERS: dict[str, Callable[[Settings], QuantizationConfig]] = {
    "awq": parse_awq,
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
    "gptq": parse_gptq,
    "modelopt": parse_modelopt,
    "modelopt_fp4": parse_modelopt,
    "mxfp4": parse_mxfp4,
}
# Names of methods in the words of the field, for the errors, by what config.json calls them.
_WORDS = (
    *("AQLM", "AWQ", "BitNet", "EETQ", "EXL2", "EXL3", "FP8", "GPTQ", "HIGGS", "HQQ", "ModelOpt"),
    *("MXFP4", "Quark", "Quanto", "QuIP", "SpQR", "torchao", "VPTQ"),
)
_NAMES = {
    **{name.lower(): name for name in _WORDS},
    **{"auto-round": "AutoRound", "fbgemm_fp8": "FBGEMM FP8", "modelopt_fp4": "ModelOpt"},
}


def read_quantization(config: Fields, model_dir: Path) -> QuantizationConfig | None:
    """config: of config.json. None where the weights are plain. Raises InvalidModel."""
    if (found := _announced(config)) is None:
        return _read_modelopt(model_dir / HF_QUANT_CONFIG)
    settings, method = found
    if (parse := _PARSERS.get(method)) is None:
        raise settings.unsupported(_name(method))
    parsed = parse(settings)
    _check_patterns(settings, parsed)
    return parsed


def quantization_name(config: Fields) -> str | None:
    """Returns the name of the format that config.json announces; None where weights are plain."""
    if (found := _announced(config)) is None:
        return None
    return _name(found[1])


def _name(method: str) -> str:
    return _NAMES.get(method) or shown(method).strip("'\"")


def _announced(config: Fields) -> tuple[Settings, str] | None:
    """Returns the settings, and the method."""
    for key in _KEYS:
        value = config.get(key)
        if value is None:
            continue
        content = value if isinstance(value, dict) else {}
        settings = Settings.of(config.path, key, content)
        method = content.get("quant_method")
        if isinstance(method, str) and key != "quantization":
            return settings, method
        if config.get("quantization") is not None:
            return settings, "MLX"
        if any(str(setting).startswith(("load_in_", "bnb_")) for setting in content):
            return settings, "bitsandbytes"
        return settings, "compressed-tensors" if key == "compression_config" else "unknown"
    return None


def _check_patterns(settings: Settings, parsed: QuantizationConfig) -> None:
    """Raises InvalidModel for what is not a regular expression."""
    targets = [target for group in parsed.groups for target in group.targets]
    for target in (*targets, *parsed.ignored):
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise InvalidModel(
                f"{settings.path}: {settings.key} has {shown(target)}, which is no regular "
                f"expression: {error}"
            ) from None


def _read_modelopt(path: Path) -> QuantizationConfig | None:
    content = Fields(path, read_object(path)).mapping("quantization")
    if content.get("quant_algo") is None:
        return None
    return parse_modelopt(Settings.of(path, "quantization", content))
