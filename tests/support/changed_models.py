"""Models whose parts differ from those of a config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.parts.layer import Layer

_HAVE_STATES = ("norms", "mixer", "mlp", "experts")


def changed(
    config: ModelConfig,
    *,
    num_layers: int | None = None,
    windows: Sequence[int | None] | None = None,
    hidden_size: int | None = None,
    **parts: Mapping[str, Any],
) -> ModelConfig:
    """num_layers: the first ones, in turns where there are more. parts: by the name in `Layer` or
    `ModelConfig`, fields and their values; "mixer" is attention or what is in its place."""
    of_model: dict[str, Mapping[str, Any]] = {
        name: parts.pop(name) for name in ("embedding", "head", "norm") if name in parts
    }
    if hidden_size is not None:
        for name in _HAVE_STATES:
            parts[name] = {**parts.get(name, {}), "hidden_size": hidden_size}
        for name in ("embedding", "head"):
            of_model[name] = {**of_model.get(name, {}), "hidden_size": hidden_size}
    count = num_layers or (config.num_layers if windows is None else len(windows))
    layers = [_layer(config.layers[i % config.num_layers], parts) for i in range(count)]
    if windows is not None:
        layers = [
            _layer(layer, {"mixer": {"window": window}})
            for layer, window in zip(layers, windows, strict=True)
        ]
    fields: dict[str, Any] = {
        name: replace(getattr(config, name), **values) for name, values in of_model.items()
    }
    size = config.hidden_size if hidden_size is None else hidden_size
    return replace(config, layers=tuple(layers), hidden_size=size, **fields)


def _layer(layer: Layer, parts: Mapping[str, Mapping[str, Any]]) -> Layer:
    fields = {name: getattr(layer, name) for name in parts}
    return replace(
        layer,
        **{name: replace(each, **parts[name]) for name, each in fields.items() if each is not None},
    )
