"""`CodePolicy`: which layers stay codes on a path through a model, and what they take there."""

from collections.abc import Collection
from typing import Protocol

import torch

from penstock.engine.models.formats.scheme import Scheme
from penstock.engine.models.layers.linear import Linear, StoredLinear


class CodePolicy(Protocol):
    def layer(self, linear: StoredLinear) -> Linear | None:
        """Returns the layer as the path computes it; None where it is to be made plain."""
        ...

    def num_bytes(self, scheme: Scheme, out_features: int, in_features: int) -> int | None:
        """Returns what that layer takes, without its bias, if this is how a file stores it."""
        ...


class AsStored:
    """Keeps the layers of some formats as they are: see `CodePolicy`."""

    def __init__(self, formats: Collection[str] = ()) -> None:
        """formats: the weight formats that the path computes."""
        self._formats = formats

    def layer(self, linear: StoredLinear) -> Linear | None:
        return linear if linear.weight_format in self._formats else None

    def num_bytes(self, scheme: Scheme, out_features: int, in_features: int) -> int | None:
        if scheme.weight_format not in self._formats:
            return None
        return scheme.num_bytes(out_features, in_features)


class OnGpu:
    """Keeps all codes whose groups fit the kernels: see `CodePolicy`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def layer(self, linear: StoredLinear) -> Linear | None:
        return linear.on_gpu(self._device)

    def num_bytes(self, scheme: Scheme, out_features: int, in_features: int) -> int | None:
        layout = scheme.gpu_layout(in_features)
        return None if layout is None else layout.num_bytes(out_features)
