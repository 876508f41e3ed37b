"""A layer's norms in torch. Source of RMSNorm: Zhang and Sennrich 2019 (arXiv:1910.07467); of
LayerNorm: Ba et al. 2016 (arXiv:1607.06450)."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.parts.norm.config import Norms
from penstock.engine.models.parts.reader import PartLayer


class NormsLayer(PartLayer[Norms]):
    """None where the family has no such norm. input_norm, mlp_norm: of what mixer and MLP read.
    attended_norm, active_norm: of what they give, before it is added. attended_sum_norm,
    active_sum_norm: of the states after it was added. scalar: multiplies what the layer gives,
    (1,)."""

    input_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    attended_norm: Tensor | None = None
    active_norm: Tensor | None = None
    attended_sum_norm: Tensor | None = None
    active_sum_norm: Tensor | None = None
    scalar: Tensor | None = None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension. A weight of another type than x is float32, and so is the product:
    see `NormKind`. Of a norm that is centred, weight has two rows, the second a bias."""
    if weight.dim() == 2:
        scale, bias = weight
        return functional.layer_norm(x.to(weight.dtype), scale.shape, scale, bias, eps).to(x.dtype)
    if weight.dtype is not x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x as it is where there is no norm."""
    return x if weight is None else rms_norm(x, weight, eps)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """The same, in float32 and without a weight."""
    return functional.rms_norm(x.to(torch.float32), x.shape[-1:], None, eps).to(x.dtype)
