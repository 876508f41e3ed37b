"""Linear layers in torch, by weight format."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.memory.hardware import widens_products

# Takes a weight in the model's type and a bias.
MakeLinear = Callable[[Tensor, Tensor | None], "Linear"]

# Rows of a weight of which a copy in float32 is small.
_WIDENED_ROWS = 512


class Linear(Protocol):
    """y = x W^T + b for x of (T, in_features). A call computes it on every device, if slowly."""

    @property
    def weight_format(self) -> str:
        """How W is stored; linear layers of one format have the same tensors."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes that a product must read: W as it is stored, its scales if any, and b."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class StoredLinear(Linear, Protocol):
    """A linear layer as a checkpoint stores it, which can be made plain."""

    @property
    def out_features(self) -> int: ...

    def rows(self, first: int, end: int) -> "StoredLinear":
        """Returns the layer of these outputs alone. Its tensors are views."""
        ...

    def on_gpu(self, device: torch.device) -> "StoredLinear | None":
        """Returns the layer that a GPU's kernels compute; None where none computes its codes."""
        ...

    def write_weight(self, out: Tensor) -> None:
        """Writes W, rounded to the type of out: (out_features, in_features), on any device."""
        ...


class JoinableLinear(StoredLinear, Protocol):
    """One that becomes part of a layer that is stacked from several."""

    @property
    def kind(self) -> Hashable:
        """Layers of one kind can be joined."""
        ...

    def joined(self, layers: Sequence[Any], bias: Tensor | None) -> "StoredLinear":
        """Returns one layer of the rows of all these, which are of this one's kind. Its codes are
        copies, as what is mapped from a file is not in memory yet."""
        ...


@dataclass(eq=False)
class PlainLinear:
    """weight: (out_features, in_features), as in the checkpoint."""

    weight: Tensor
    bias: Tensor | None
    weight_format = "plain"
    kind = "plain"

    def __post_init__(self) -> None:
        self.num_bytes = tensor_bytes(self.weight, self.bias)
        self.in_features = self.weight.shape[-1]

    @property
    def out_features(self) -> int:
        return len(self.weight)

    def rows(self, first: int, end: int) -> "PlainLinear":
        bias = None if self.bias is None else self.bias[first:end]
        return PlainLinear(self.weight[first:end], bias)

    def joined(self, layers: Sequence["PlainLinear"], bias: Tensor | None) -> "PlainLinear":
        weights = [layer.weight for layer in layers]
        return PlainLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def on_gpu(self, device: torch.device) -> "PlainLinear":
        return self

    def write_weight(self, out: Tensor) -> None:
        out.copy_(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """The weight in oneDNN's blocked layout, packed once at load; the original is not kept.

    `functional.linear` repacks a bfloat16 weight in every call, which for a few rows costs more
    than the product itself. These two operators are torch's own (Inductor emits them), but private.
    """

    weight_format = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_bytes = tensor_bytes(weight, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return y


class WidenedLinear(PlainLinear):
    """weight: float16 or bfloat16. Products are of float32, for processors that cannot multiply
    matrices of the type: few can in float16, and on x86 none without AVX-512 in bfloat16.

    For those torch has a loop that takes four times as long as a product of float32 for 256 rows.
    A copy in float32 for each product costs less; to keep it would take three times the memory.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # So few rows take torch's loop less time than the copy, on AVX2: see loadtest/LOG.md.
        self._most_plain_rows = 1 if self.weight.dtype is torch.float16 else 24

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= self._most_plain_rows:  # they sum in float32 too
            return functional.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)


class StackedLinear:
    """Layers of different formats that read the same x: y is theirs, one after the other."""

    weight_format = "stacked"

    def __init__(self, parts: Sequence[StoredLinear]) -> None:
        self.parts = tuple(parts)
        self.num_bytes = sum(part.num_bytes for part in parts)

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    def rows(self, first: int, end: int) -> "StackedLinear":
        parts, start = [], 0
        for part in self.parts:
            low, high = max(first - start, 0), min(end - start, part.out_features)
            if low < high:
                parts.append(part.rows(low, high))
            start += part.out_features
        return StackedLinear(parts)

    def on_gpu(self, device: torch.device) -> "StackedLinear | None":
        parts = [each for part in self.parts if (each := part.on_gpu(device)) is not None]
        return StackedLinear(parts) if len(parts) == len(self.parts) else None

    def write_weight(self, out: Tensor) -> None:
        sizes = [part.out_features for part in self.parts]
        for part, rows in zip(self.parts, torch.split(out, sizes), strict=True):
            part.write_weight(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def stacked(layers: Sequence[JoinableLinear], bias: Tensor | None) -> StoredLinear:
    """Returns the layer of all rows of these: neighbours of one kind become one layer."""
    parts: list[StoredLinear] = []
    start = 0
    for _, group in groupby(layers, key=lambda layer: layer.kind):
        alike = list(group)
        end = start + sum(layer.out_features for layer in alike)
        parts.append(alike[0].joined(alike, None if bias is None else bias[start:end]))
        start = end
    return parts[0] if len(parts) == 1 else StackedLinear(parts)


def bands(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yields the first row, and the first after it, of each band that is widened at a time."""
    for start in range(0, num_rows, _WIDENED_ROWS):
        yield start, min(start + _WIDENED_ROWS, num_rows)


def tensor_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def cpu_linear(dtype: torch.dtype, *, has_experts: bool) -> MakeLinear:
    """Returns the fastest linear layer of torch on a processor, for weights of this type.

    has_experts: whether a layer may be one of several that are stacked, whose rows are taken one
    by one.
    """
    if has_experts:
        return PlainLinear
    if widens_products(dtype):
        return WidenedLinear
    return PackedLinear if _can_pack() else PlainLinear


def _can_pack() -> bool:
    """Returns whether this torch has the private operators of `PackedLinear`."""
    return (
        torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
