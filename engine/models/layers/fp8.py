"""Linear layers whose weights are FP8 (e4m3), with a scale for each block of them."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import bands, tensor_bytes
from penstock.engine.models.layers.weight_formats import FP8_FORMAT


class Fp8Linear:
    """W[n, k] = scales[n // rows, k // columns] * codes[n, k].

    codes: (out_features, in_features) float8_e4m3fn. scales: float32, one for each block; the last
    block of a column or row may be smaller. block: (rows, columns).
    """

    weight_format = FP8_FORMAT

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, *, block: tuple[int, int]
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.bias = bias
        self.block = block
        grid = tuple(-(-size // step) for size, step in zip(codes.shape, block, strict=True))
        assert scales.shape == grid, (scales.shape, codes.shape, block)
        self.num_bytes = tensor_bytes(codes, scales, bias)

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    def rows(self, first: int, end: int) -> "Fp8Linear":
        """The layer of these rows."""
        height, width = self.block
        bias = None if self.bias is None else self.bias[first:end]
        codes = self.codes[first:end]
        if first % height == 0:
            scales = self.scales[first // height : -(-end // height)]
            return Fp8Linear(codes, scales, bias, block=self.block)
        return Fp8Linear(codes, self.scales_by_row()[first:end], bias, block=(1, width))

    def scales_by_row(self) -> Tensor:
        """(out_features, blocks of columns)"""
        return self.scales.repeat_interleave(self.block[0], dim=0)[: self.out_features]

    def write_weight(self, out: Tensor) -> None:
        """See `StoredLinear`."""
        for start, stop in bands(self.out_features):
            rows = torch.arange(start, stop) // self.block[0]
            scales = self.scales[rows].repeat_interleave(self.block[1], dim=1)
            codes = self.codes[start:stop].float()
            out[start:stop] = codes * scales[:, : codes.shape[1]]

    def __call__(self, x: Tensor) -> Tensor:
        """Slowly: the weights are widened in each call."""
        weight = torch.empty(self.codes.shape, dtype=x.dtype, device=x.device)
        self.write_weight(weight)
        return functional.linear(x, weight, self.bias)
