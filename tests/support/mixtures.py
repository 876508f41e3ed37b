"""A layer's experts with random weights, in a type or as wide as a reference computes."""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.layer import ExpertsLayer
from penstock.engine.models.parts.reader import PartReader, WeightSource
from penstock.engine.models.parts.tensors import NormKind
from tests.support.kernels import DEVICE


@dataclass(frozen=True)
class Drawn(WeightSource):
    """Random tensors, the same for each name. is_wide: whether they are in float32, rounded to
    dtype."""

    dtype: torch.dtype
    is_wide: bool

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(names[0].encode()))
        tensor = torch.randn(shape, generator=generator, device=DEVICE)
        tensor = (tensor / (4 if len(shape) == 1 else shape[1] ** 0.5)).to(self.dtype)
        return tensor.float() if self.is_wide else tensor


def drawn(
    experts: Experts, dtype: torch.dtype = torch.float32, *, is_wide: bool = False
) -> ExpertsLayer:
    return ExpertsLayer(experts, PartReader(Drawn(dtype, is_wide), PlainLinear, NormKind()))
