"""What an executor reports of a quantized model on a device whose peaks are known, so that every
metric exists."""

from dataclasses import fields, replace
from typing import Any

from penstock.engine.executors.scripted import scripted_info
from penstock.engine.step.model_info import ModelInfo, QuantizationInfo


def on_known_hardware() -> ModelInfo:
    """A quantized model on a device whose peaks are known."""
    info = scripted_info()
    peaks: dict[str, Any] = {
        field.name: 1.0 for field in fields(info) if field.name.endswith("_per_s")
    }
    quantization = QuantizationInfo(
        method="int8",
        bits=8,
        bits_per_weight=8.5,
        group_size=32,
        num_tokens=384,
        kl_divergence=1e-4,
        top1_agreement=0.99,
    )
    return replace(info, load_seconds={"weights": 1.0}, quantization=quantization, **peaks)
