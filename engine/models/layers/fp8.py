"""Linear layers whose weights are FP8 (e4m3), with a scale for each block of them."""

from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.models.layers.coded import CodesLinear, coded_weight
from penstock.engine.models.layers.linear import bands, tensor_bytes
from penstock.engine.models.layers.weight_formats import FP8_FORMAT, CodedLayout


@dataclass(eq=False)
class Fp8Linear(CodesLinear):
    """W[n, k] = scales[n // rows, k // columns] * codes[n, k].

    codes: (out_features, in_features) float8_e4m3fn. scales: float32, one for each block; the last
    block of a column or row may be smaller. block: (rows, columns).
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    _: KW_ONLY
    block: tuple[int, int]
    weight_format = FP8_FORMAT

    def __post_init__(self) -> None:
        grid = tuple(-(-n // step) for n, step in zip(self.codes.shape, self.block, strict=True))
        assert self.scales.shape == grid, (self.scales.shape, self.codes.shape, self.block)
        self.in_features = self.codes.shape[1]
        self.num_bytes = tensor_bytes(self.codes, self.scales, self.bias)

    @property
    def kind(self) -> Hashable:
        return self.codes.dtype, self.block[1]

    def rows(self, first: int, end: int) -> "Fp8Linear":
        height, width = self.block
        bias = None if self.bias is None else self.bias[first:end]
        codes = self.codes[first:end]
        if first % height == 0:
            scales = self.scales[first // height : -(-end // height)]
            return Fp8Linear(codes, scales, bias, block=self.block)
        return Fp8Linear(codes, self.scales_by_row()[first:end], bias, block=(1, width))

    def joined(self, layers: Sequence["Fp8Linear"], bias: Tensor | None) -> "Fp8Linear":
        height, width = self.block
        are_alike = all(layer.block == self.block for layer in layers)
        if not are_alike or any(layer.out_features % height for layer in layers[:-1]):
            height = 1
        scales = [layer.scales if height > 1 else layer.scales_by_row() for layer in layers]
        # torch concatenates no float8 of every version; bytes it does.
        codes = torch.cat([layer.codes.view(torch.uint8) for layer in layers])
        codes = codes.view(self.codes.dtype)
        return Fp8Linear(codes, torch.cat(scales), bias, block=(height, width))

    def scales_by_row(self) -> Tensor:
        """Returns (out_features, blocks of columns)."""
        return self.scales.repeat_interleave(self.block[0], dim=0)[: self.out_features]

    def coded_weight(self, device: torch.device) -> CodedWeight | None:
        columns = self.in_features
        layout = CodedLayout.fitting(8, self.block[1], columns, has_zeros=False, has_halves=False)
        if layout is None:
            return None
        codes = self.codes.view(torch.uint8)
        return coded_weight(layout, codes, self.scales_by_row(), None, None, device)

    def write_weight(self, out: Tensor) -> None:
        for start, stop in bands(self.out_features):
            rows = torch.arange(start, stop) // self.block[0]
            scales = self.scales[rows].repeat_interleave(self.block[1], dim=1)
            codes = self.codes[start:stop].float()
            out[start:stop] = codes * scales[:, : codes.shape[1]]
