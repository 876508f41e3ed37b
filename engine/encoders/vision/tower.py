"""`Tower`: an `Encoder` of images, whose patches attend to each other; families complete it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from math import prod
from time import perf_counter
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from penstock.engine.encoders.blocks import (
    Block,
    BlockKind,
    BlockSizes,
    EncoderWeights,
    Norm,
    Product,
    Rotation,
    Sliced,
)
from penstock.engine.encoders.encoder import InsertRows
from penstock.engine.encoders.vision.pixels import Normalisation, Pixels
from penstock.engine.files.json_file import Fields
from penstock.engine.step.model_info import EncoderInfo
from penstock.scheduler.types import Insert

# Larger than those of any tower.
_MAX_LAYERS, MAX_WIDTH, _MAX_SIDE = 512, 2**16, 2**10
_GELU = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}


class Grid(NamedTuple):
    """Frames, and rows and columns of patches."""

    frames: int
    height: int
    width: int


class Keys(NamedTuple):
    """What a family's vision_config calls these."""

    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    eps: str = "layer_norm_eps"
    activation: str = "hidden_act"


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSource:
    """What a tower is made of. outer, vision: config.json, and its part about the tower. images:
    the settings of the image processor. dtype, hidden_size: of the rows that it makes. is_whole:
    see `Insert`."""

    outer: Fields
    vision: Fields
    images: Fields
    weights: EncoderWeights
    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    is_whole: bool


class Tower(ABC):
    """See `penstock.engine.encoders.encoder.Encoder`. Patches are in the order in which the image
    processor of the family has them; where it has none, row after row.

    prefix, blocks_prefix: of the names of all tensors, and then of blocks'. default_norm: means and
    deviations where no file says any. has_channels_last: whether a patch has its bytes by pixel,
    and not by channel.
    pooled: how many patches, in a row and in a column, become one row of the decoder. max_patches:
    of an image. deepstack: after which blocks there are rows for layers of the decoder. info: who
    loads it sets it.
    """

    kind: ClassVar[BlockKind]
    prefix: ClassVar[str]
    blocks_prefix: ClassVar[str]
    keys: ClassVar[Keys]
    default_norm: ClassVar[Normalisation | None] = None
    has_channels_last: ClassVar[bool] = False
    patch: Product
    pooled: int
    max_patches: int
    deepstack: tuple[int, ...] = ()
    info: EncoderInfo

    def __init__(self, source: TowerSource) -> None:
        """Raises InvalidModel."""
        vision = source.vision
        self.device, self.dtype, self.weights = source.device, source.dtype, source.weights
        self.hidden_size, self.is_whole = source.hidden_size, source.is_whole
        self.pixels = Pixels.read(source.images, self.default_norm)
        self.side = vision.count("patch_size", default=16, most=_MAX_SIDE)
        self.sizes = self._read_sizes(vision)
        has_bounds = vision.flag("use_clipped_linears")
        self.blocks = [
            Block(
                replace(self.kind, has_bounds=has_bounds),
                self.sizes,
                self.weights,
                f"{self.prefix}{self.blocks_prefix}{index}.",
            )
            for index in range(vision.count(self.keys.layers, most=_MAX_LAYERS))
        ]

    def _read_sizes(self, vision: Fields) -> BlockSizes:
        keys, hidden = self.keys, vision.count("hidden_size", most=MAX_WIDTH)
        heads = vision.count(keys.heads, most=hidden)
        activation = vision.text(keys.activation) or "gelu_pytorch_tanh"
        if activation not in _GELU:
            raise vision.wrong(keys.activation, " or ".join(map(repr, _GELU)), activation)
        if hidden % heads:
            raise vision.wrong("hidden_size", f"a multiple of its {heads} heads", hidden)
        return BlockSizes(
            hidden_size=hidden,
            num_heads=heads,
            head_dim=vision.count("head_dim", default=hidden // heads, most=MAX_WIDTH),
            inner_size=vision.count("intermediate_size", most=MAX_WIDTH),
            eps=vision.number(keys.eps, 1e-6),
            gelu=_GELU[activation],
        )

    def places(self, grid: Grid) -> Tensor:
        """The row and the column of each patch: (2, N) int64."""
        patches = torch.arange(prod(grid), device=self.device)
        _, row, column = torch.unravel_index(patches, grid)
        return torch.stack((row, column))

    @abstractmethod
    def positions(self, places: Tensor, grid: Grid) -> Tensor:
        """What is added to embedded patches at some places, (2, rows): (rows, hidden_size)."""

    def rotation(self, places: Tensor) -> Rotation | None:
        return None

    @abstractmethod
    def finish(self, states: Tensor, grid: Grid) -> Sliced:
        """Makes the decoder's rows of what the last block gives."""

    def stacked(self, states: Tensor, index: int) -> Sliced:
        """Makes the rows of deepstack[index]."""
        raise NotImplementedError

    def numbers(self, patches: Tensor) -> Tensor:
        """What the first layer reads of bytes, (rows, bytes), in float32."""
        return self.pixels.numbers(patches, has_channels_last=self.has_channels_last)

    def described(self, weight_bytes: int) -> EncoderInfo:
        products = [each.weight.numel() for each in self.weights.products]
        of_blocks = [each.weight.numel() for block in self.blocks for each in block.products]
        per_patch = sum(of_blocks) + self.patch.weight.numel()
        per_token = sum(products) - per_patch
        return EncoderInfo(
            weight_bytes=weight_bytes,
            flops_per_patch=2 * (per_patch + per_token // self.pooled**2),
            flops_per_pair=self.sizes.flops_per_pair * len(self.blocks),
            bytes_per_token=self.hidden_size * self.dtype.itemsize * (1 + len(self.deepstack)),
            max_patches=self.max_patches,
            is_whole=self.is_whole,
        )

    def begin(self, insert: Insert) -> "TowerEncoding":
        """See `Encoder`."""
        grid, patch_bytes = Grid(*insert.patch_grid), self.patch.weight.shape[1]
        wanted = (prod(grid), patch_bytes)
        assert insert.patches == wanted and len(insert.content) == prod(wanted), insert[1:4]
        assert insert.num_tokens * self.pooled**2 == prod(grid), (insert.num_tokens, grid)
        patches = torch.frombuffer(bytearray(insert.content), dtype=torch.uint8)
        return TowerEncoding(self._encode(patches.view(wanted).to(self.device), grid))

    def _encode(self, patches: Tensor, grid: Grid) -> Generator[None, None, InsertRows]:
        num, frame, dtype = len(patches), grid.height * grid.width, self.weights.dtype
        states = torch.empty(num, self.sizes.hidden_size, dtype=dtype, device=self.device)
        places = self.places(grid)
        for rows in self.weights.cut.parts(num):
            embedded = yield from self.patch(self.numbers(patches[rows]).to(dtype))
            states[rows] = embedded + self.positions(places[:, rows], grid).to(dtype)
            yield
        rotation, stacks = self.rotation(places), []
        for index, block in enumerate(self.blocks):
            yield from block.run(states, range(frame, num + 1, frame), rotation)
            if index in self.deepstack:
                stack = yield from self.stacked(states, self.deepstack.index(index))
                stacks.append(stack.to(self.dtype))
        finished = yield from self.finish(states, grid)
        return InsertRows(finished.to(self.dtype), torch.stack(stacks) if stacks else None)

    def by_rows(self, x: Tensor, *steps: Product | Callable[[Tensor], Tensor]) -> Sliced:
        """What all the steps make of x, (tokens, size), in their order: (tokens, hidden_size)."""
        out = x.new_empty(len(x), self.hidden_size)
        for rows in self.weights.cut.parts(len(x)):
            part = x[rows]
            for step in steps:
                part = (yield from step(part)) if isinstance(step, Product) else step(part)
            out[rows] = part
        return out

    def average(self, states: Tensor, grid: Grid, norm: Norm | None = None) -> Sliced:
        """Averages squares of patches: (tokens, hidden_size) float32."""
        side, columns, hidden = self.pooled, grid.width // self.pooled, states.shape[1]
        strips = states.view(-1, side * grid.width, hidden)
        out = torch.empty(len(strips), columns, hidden, device=self.device)
        for index, strip in enumerate(strips):
            squares = (strip if norm is None else norm(strip)).view(side, columns, side, hidden)
            out[index] = squares.float().mean((0, 2))
            yield
        return out.flatten(0, 1)


class TowerEncoding:
    """See `penstock.engine.encoders.encoder.Encoding`."""

    def __init__(self, slices: Generator[None, None, InsertRows]) -> None:
        self._slices = slices
        self._rows: InsertRows | None = None

    @property
    def rows(self) -> InsertRows:
        assert self._rows is not None, "it is not complete"
        return self._rows

    @torch.inference_mode()
    def run(self, budget_s: float) -> bool:
        end = perf_counter() + budget_s
        while self._rows is None:
            try:
                next(self._slices)
            except StopIteration as done:
                self._rows = done.value
            if perf_counter() >= end:
                break
        return self._rows is not None
