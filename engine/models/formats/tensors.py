"""`LayerTensors`: the tensors of one quantized layer, checked as they are taken; or made up."""

import torch
from torch import Tensor

from penstock.engine.files.tensor_files import TensorFiles, is_finite
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.cut import CannotCut, Cut
from penstock.engine.models.formats.scheme import GroupedScheme
from penstock.engine.models.layers.grouped import GroupedLinear

# Scales have these types; the last has powers of two alone.
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
# The standard deviation of what random codes stand for, by their bits, and of E2M1's levels.
_STD_OF_CODES = {4: 4.6, 8: 74.0}
_STD_OF_LEVELS = 5.9


class LayerTensors:
    """Tensors are taken whole, and then cut: they are mapped, so what is not used is not read."""

    def __init__(
        self, files: TensorFiles, layer: str, in_features: int, cut: Cut | None = None
    ) -> None:
        """layer: its name in the checkpoint. in_features: of the whole. cut: the part that is to be
        read; None for all."""
        self._files = files
        self._cut = cut or Cut()
        self.layer = layer
        self.in_features = in_features

    @property
    def columns(self) -> int:
        """How many columns the part has that is to be read."""
        return self.in_features if self._cut.columns is None else self._cut.columns.size

    def part(
        self, name: str, tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Tensor:
        """Returns what is to be read of a tensor. rows, columns: along which dimension,
        and how many an element holds. Raises InvalidModel."""
        try:
            return self._cut.columns_of(self._cut.rows_of(tensor, *rows), *columns)
        except CannotCut as error:
            raise self.wrong(name, str(error)) from None

    def groups(self, table: Tensor, size: int) -> tuple[Tensor, int]:
        """Returns the part of a table (out_features, groups), and the size of its groups."""
        return self._cut.groups_of(self._cut.rows_of(table), size)

    def blocks(self, table: Tensor, block: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Returns the part of a table of blocks of rows and columns, and the size of its blocks."""
        rows, height = self._cut.blocks_of(table, block[0])
        blocks, width = self._cut.groups_of(rows, block[1])
        return blocks, (height, width)

    def has(self, name: str) -> bool:
        return f"{self.layer}.{name}" in self._files

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], dims: int | None = 2) -> Tensor:
        """dims: how many dimensions it must have; None for any number. Raises InvalidModel."""
        full = f"{self.layer}.{name}"
        tensor = self._files.get(full)
        if tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype) for dtype in dtypes)
            raise self._files.wrong_dtype(full, tensor, f"the quantization implies {allowed}")
        if dims is not None and tensor.dim() != dims:
            raise self.wrong(name, f"has {tensor.dim()} dimensions, not {dims}")
        return tensor

    def codes(self, name: str, dtype: torch.dtype, per_element: int = 1) -> Tensor:
        """(out_features, columns), where an element of a row holds so many columns."""
        tensor = self.take(name, (dtype,))
        self.check(name, tensor, (len(tensor), -(-self.in_features // per_element)))
        return tensor

    def scales(
        self, name: str, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = SCALE_DTYPES
    ) -> Tensor:
        """float32 or float16, of one of these shapes; one of () also allows a single element. uint8
        holds powers of two, E8M0. Raises InvalidModel."""
        tensor = self.take(name, dtypes, None)
        fits = tuple(tensor.shape) in shapes or (() in shapes and tensor.numel() == 1)
        if not fits:
            raise self._files.wrong_shape(f"{self.layer}.{name}", tensor, shapes[-1])
        if tensor.dtype is torch.uint8:
            tensor = tensor.view(torch.float8_e8m0fnu)
        scales = tensor if tensor.dtype is torch.float16 else tensor.float()
        self.check_finite(name, scales)
        return scales

    def grouped(
        self,
        codes: Tensor,
        scales: Tensor,
        group_size: int,
        zeros: Tensor | None = None,
        levels: Tensor | None = None,
        order: Tensor | None = None,
    ) -> GroupedLinear:
        """Returns the layer that these make, without its bias."""
        return GroupedLinear(
            codes,
            scales,
            None,
            group_size=group_size,
            in_features=self.columns,
            zeros=zeros,
            levels=levels,
            order=order,
        )

    def check_finite(self, name: str, scales: Tensor) -> None:
        """Raises InvalidModel that names the tensor from which the scales are."""
        if scales.numel() and not is_finite(scales):
            raise self._files.not_finite(f"{self.layer}.{name}", "download the model again")

    def check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Raises InvalidModel for another shape."""
        if tuple(tensor.shape) != shape:
            raise self._files.wrong_shape(f"{self.layer}.{name}", tensor, shape)

    def wrong(self, name: str, why: str) -> InvalidModel:
        """why: what the tensor has or is, and what to do."""
        return InvalidModel(f"the tensor '{self.layer}.{name}' in {self._files.directory} {why}")


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Numbers of 4 or 8 bits in the last dimension, the first in the lowest bits: uint8. packed:
    int32."""
    in_bytes = packed.contiguous().view(torch.uint8)  # of little-endian machines, as all are today
    if bits == 8:
        return in_bytes
    return torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(-2)


def signed(codes: Tensor) -> Tensor:
    """0 to 255 as -128 to 127."""
    return (codes.contiguous() ^ 128).view(torch.int8)


def made_up_grouped(
    scheme: GroupedScheme,
    shape: tuple[int, int],
    bias: Tensor | None,
    std: float,
    generator: torch.Generator,
) -> GroupedLinear:
    """See `TensorScheme.made_up`."""
    rows, columns = shape
    bits, levels, device = scheme.bits, scheme.levels, generator.device
    group_size = scheme.group_size or columns
    groups = (rows, -(-columns // group_size))
    stored = (rows, -(-columns * bits // 8))
    codes = torch.randint(0, 256, stored, dtype=torch.uint8, generator=generator, device=device)
    middle, kind = (0, torch.int8) if bits == 8 else (8, torch.uint8)
    dtype = torch.float32 if scheme.has_wide_scales else torch.float16
    scale = std / (_STD_OF_LEVELS if levels else _STD_OF_CODES[bits])
    return GroupedLinear(
        codes.view(kind),
        torch.full(groups, scale, dtype=dtype, device=device),
        bias,
        group_size=group_size,
        in_features=columns,
        zeros=torch.full(groups, middle, dtype=kind, device=device) if scheme.has_zeros else None,
        levels=torch.tensor(levels, dtype=torch.int8) if levels else None,
    )
