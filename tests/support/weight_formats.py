"""Weights in codes, and a format and an architecture that no path but the generic one computes."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.formats.kept import OnGpu
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear, packed_nibbles
from penstock.engine.models.layers.linear import Linear, MakeLinear, tensor_bytes
from penstock.engine.models.parts.mlp.config import MLP


class NegatedLinear:
    """Stores -W, in float64."""

    weight_format = "negated"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._negated = -weight.double()
        self._bias = bias
        self.num_bytes = tensor_bytes(self._negated, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y = functional.linear(-x.double(), self._negated).to(x.dtype)
        return y if self._bias is None else y + self._bias


def coded(
    bits: int, group_size: int, *, has_zeros: bool = False, is_ordered: bool = False
) -> MakeLinear:
    """Rounds weights to the nearest code, with a scale for each group from its largest number.

    is_ordered: whether the columns have another order than those of x.
    """

    def make(weight: Tensor, bias: Tensor | None) -> GroupedLinear:
        rows, columns = weight.shape
        order = None
        if is_ordered:
            generator = torch.Generator().manual_seed(columns)
            order = torch.randperm(columns, generator=generator).int()
            weight = weight[:, order]
        groups = -(-columns // group_size)
        padded = functional.pad(weight.float(), (0, groups * group_size - columns))
        grouped = padded.view(rows, groups, group_size)
        most = 2 ** (bits - 1) - 1
        low, zeros = -most - 1, None
        if has_zeros:
            first, last = grouped.amin(-1), grouped.amax(-1)
            scales = ((last - first) / (2 * most + 1)).half()
            zeros = (low - first / scales.float()).round().clamp(low, most)
        else:
            scales = (grouped.abs().amax(-1) / most).half()
        codes = grouped / scales.float().unsqueeze(-1)
        codes = (codes.round() + (0 if zeros is None else zeros.unsqueeze(-1))).clamp(low, most)
        codes = codes.flatten(1)[:, :columns]
        kind = torch.int8
        if bits == 4:
            codes, kind = packed_nibbles(codes + 8), torch.uint8
            zeros = None if zeros is None else zeros + 8
        return GroupedLinear(
            codes.to(kind),
            scales,
            bias,
            group_size=group_size,
            in_features=columns,
            zeros=None if zeros is None else zeros.to(kind),
            order=order,
        )

    return make


def in_fp8(block: tuple[int, int] | None = None) -> MakeLinear:
    """Rounds weights to e4m3, with a scale for each block from its largest number; by default for
    each row."""

    def make(weight: Tensor, bias: Tensor | None) -> Fp8Linear:
        rows, columns = weight.shape
        height, width = block or (1, columns)
        grid = (-(-rows // height), -(-columns // width))
        padded = functional.pad(
            weight.float(), (0, grid[1] * width - columns, 0, grid[0] * height - rows)
        )
        largest = padded.view(grid[0], height, grid[1], width).abs().amax((1, 3))
        scales = largest.clamp(min=1e-6) / torch.finfo(torch.float8_e4m3fn).max
        by_number = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
        codes = (weight.float() / by_number[:rows, :columns]).to(torch.float8_e4m3fn)
        return Fp8Linear(codes, scales, bias, block=(height, width))

    return make


def on_gpu(make_linear: MakeLinear) -> MakeLinear:
    """As a GPU holds the codes of such layers."""

    def make(weight: Tensor, bias: Tensor | None) -> Linear:
        stored = make_linear(weight, bias)
        assert isinstance(stored, GroupedLinear)
        held = OnGpu(weight.device).layer(stored)
        assert held is not None
        return held

    return make


def round_weights(model: nn.Module, make_linear: MakeLinear) -> None:
    """Gives a model of transformers the weights that these linear layers stand for."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            rounded = make_linear(module.weight.data, None)
            assert isinstance(rounded, GroupedLinear)
            # A new parameter, as an output layer may be tied to the embedding.
            module.weight = nn.Parameter(rounded.weight())


class Reversed(MLP):
    """A part that no path computes."""


def reversed_config(config: ModelConfig) -> ModelConfig:
    """The same model with such a part in each layer."""
    mlp = config.layers[0].mlp
    assert mlp is not None
    other = Reversed(hidden_size=mlp.hidden_size, size=mlp.size)
    return replace(config, layers=tuple(replace(each, mlp=other) for each in config.layers))
