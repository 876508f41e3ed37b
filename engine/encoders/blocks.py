"""`Block`: attention among the tokens of a sequence, and an MLP, computed in slices.

What computes is a generator that yields after every slice, so that who runs it may go on later. How
work is cut follows from shapes alone: a result does not depend on when it was interrupted. Knows
nothing of images.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.parts.reader import WeightSource

# Yields after each slice, and returns the result.
Sliced: TypeAlias = Generator[None, None, Tensor]
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
# Products of fewer rows or columns than this take longer than what they are made of.
_LEAST = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """rows: the most that are computed at once. operations: of a slice, about."""

    rows: int
    operations: int

    def parts(self, num_rows: int) -> Iterator[slice]:
        return _parts(0, num_rows, self.rows)

    def most(self, operations: int) -> int:
        """How many columns or rows of so many operations each a slice has."""
        return max(_LEAST, self.operations // operations // _LEAST * _LEAST)


def _parts(start: int, stop: int, most: int) -> Iterator[slice]:
    for first in range(start, stop, most):
        yield slice(first, min(first + most, stop))


class Rotation(NamedTuple):
    """What queries and keys are rotated by: (N, parts, pairs) float32 each. A head is so many
    parts of the same size, and a pair is of a part's first half and its second."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def by(cls, angles: Tensor) -> "Rotation":
        return cls(angles.cos(), angles.sin())

    def of(self, x: Tensor, rows: slice) -> Tensor:
        """x: (rows, heads, head_dim)."""
        cos, sin = (each[rows, None] for each in self)
        parts = x.float().view(*x.shape[:-1], cos.shape[-2], 2, cos.shape[-1])
        first, second = parts.unbind(-2)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(turned, dim=-2).flatten(-3).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A layer norm, or one by root mean square."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    is_rms: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        shape = x.shape[-1:]
        if self.is_rms:
            return functional.rms_norm(x, shape, self.weight, self.eps)
        return functional.layer_norm(x, shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A linear layer. weight: (out_features, in_features), in any type: products are in that of x.
    bounds: least and most of what it reads, and of what it gives, or None."""

    weight: Tensor
    bias: Tensor | None
    bounds: Tensor | None
    cut: Cut

    def __call__(self, x: Tensor) -> Sliced:
        """x: (rows, in_features)."""
        weight, bias, bounds = self.weight, self.bias, self.bounds
        if bounds is not None:
            x = x.clamp(bounds[0], bounds[1])
        out = x.new_empty(len(x), len(weight))
        for part in _parts(0, len(weight), self.cut.most(2 * x.numel())):
            own = None if bias is None else bias[part]
            out[:, part] = functional.linear(x, weight[part].to(x.dtype), own)
            yield
        return out if bounds is None else out.clamp_(bounds[2], bounds[3])


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Reads what an encoder consists of. dtype: what it computes in; matrices stay in the type of
    the source. products: all linear layers that have been read."""

    source: WeightSource
    dtype: torch.dtype
    cut: Cut
    products: list[Product] = field(default_factory=list)

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        return self.source.read((size,), name, dtype=dtype).to(dtype)

    def table(self, name: str, *shape: int) -> Tensor:
        """One of which few rows are used; it stays in the type of the source."""
        return self.source.read(shape, name)

    def norm(self, name: str, size: int, eps: float, *, is_rms: bool = False) -> Norm:
        weight = self.vector(f"{name}.weight", size)
        return Norm(weight, None if is_rms else self.vector(f"{name}.bias", size), eps, is_rms)

    def product(
        self,
        name: str,
        outputs: int,
        *inputs: int,
        has_bias: bool = True,
        has_bounds: bool = False,
    ) -> Product:
        """inputs: the further dimensions of the tensor: more than one where it is a convolution
        whose windows do not overlap."""
        weight = self.source.read((outputs, *inputs), f"{name}.weight").flatten(1)
        bias = self.vector(f"{name}.bias", outputs) if has_bias else None
        return self._product(weight, bias, self._bounds(name) if has_bounds else None)

    def transposed(self, name: str, inputs: int, outputs: int) -> Product:
        """One without a bias, of a tensor with a row for each input."""
        return self._product(self.source.read((inputs, outputs), name).t().contiguous())

    def _product(
        self, weight: Tensor, bias: Tensor | None = None, bounds: Tensor | None = None
    ) -> Product:
        product = Product(weight, bias, bounds, self.cut)
        self.products.append(product)
        return product

    def _bounds(self, name: str) -> Tensor:
        """A layer that has any is one of a module of this name."""
        layer = name.removesuffix(".linear")
        names = (f"{layer}.{bound}" for bound in _BOUNDS)
        return self.source.read((len(_BOUNDS),), *names, dtype=self.dtype).to(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """How the blocks of a family are made, and what a checkpoint calls their tensors.

    norms: of what attention reads, and the MLP; post_norms: of what these give. qkv: one tensor of
    queries, keys and values, or three. up: one, or gate and up. head_norms: of queries and keys;
    where there are any, values have one without weights. scale: of scores, or None for one over the
    root of head_dim. has_bounds: see `Product`.
    """

    norms: tuple[str, str]
    qkv: tuple[str, ...]
    output: str
    up: tuple[str, ...]
    down: str
    post_norms: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()
    is_rms: bool = False
    has_bias: bool = True
    has_bounds: bool = False
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """inner_size: of the MLP. gelu: "tanh", or "none" where it is computed exactly."""

    hidden_size: int
    num_heads: int
    head_dim: int
    inner_size: int
    eps: float
    gelu: str

    @property
    def flops_per_pair(self) -> int:
        """Of attention, of a token to another."""
        return 4 * self.num_heads * self.head_dim


class Block:
    def __init__(
        self, kind: BlockKind, sizes: BlockSizes, weights: EncoderWeights, prefix: str
    ) -> None:
        """prefix: of the names of its tensors."""
        self._kind, self._sizes, self._cut = kind, sizes, weights.cut
        hidden, inner = sizes.hidden_size, sizes.inner_size
        attended = sizes.num_heads * sizes.head_dim

        def norm(name: str, size: int = hidden) -> Norm:
            return weights.norm(prefix + name, size, sizes.eps, is_rms=kind.is_rms)

        def product(name: str, outputs: int, inputs: int) -> Product:
            flags = {"has_bias": kind.has_bias, "has_bounds": kind.has_bounds}
            return weights.product(prefix + name, outputs, inputs, **flags)

        self._norms = [norm(name) for name in kind.norms]
        self._post_norms = [norm(name) for name in kind.post_norms]
        self._head_norms = [norm(name, sizes.head_dim) for name in kind.head_norms]
        if kind.head_norms:
            self._head_norms.append(Norm(None, None, sizes.eps, is_rms=True))
        rows = 3 * attended // len(kind.qkv)
        self._qkv = [product(name, rows, hidden) for name in kind.qkv]
        self._output = product(kind.output, hidden, attended)
        self._up = [product(name, inner, hidden) for name in kind.up]
        self._down = product(kind.down, hidden, inner)
        self.products = [*self._qkv, self._output, *self._up, self._down]

    def run(self, states: Tensor, ends: Iterable[int], rotation: Rotation | None) -> Iterator[None]:
        """Replaces states, (N, hidden_size), of sequences one after another. ends: of each, the
        row after its last. Tokens attend to all of their sequence."""
        sizes, num = self._sizes, len(states)
        q, k, v = (states.new_empty(sizes.num_heads, num, sizes.head_dim) for _ in range(3))
        for rows in self._cut.parts(num):
            yield from self._project(states, rows, rotation, (q, k, v))
        start = 0
        for end in ends:
            yield from self._attend(q, k, v, start, end)
            start = end
        for rows in self._cut.parts(num):
            x = yield from self._output(q[:, rows].transpose(0, 1).flatten(1))
            states[rows] += self._post_norms[0](x) if self._post_norms else x
            x = yield from self._mlp(self._norms[1](states[rows]))
            states[rows] += self._post_norms[1](x) if self._post_norms else x

    def _project(
        self, states: Tensor, rows: slice, rotation: Rotation | None, to: tuple[Tensor, ...]
    ) -> Iterator[None]:
        """Writes queries, keys and values."""
        sizes = self._sizes
        x = self._norms[0](states[rows])
        products: list[Tensor] = []
        for layer in self._qkv:
            products += [(yield from layer(x))]
        heads = torch.cat(products, -1).view(len(x), 3, sizes.num_heads, sizes.head_dim)
        for index, each in enumerate(to):
            own = heads[:, index]
            if self._head_norms:
                own = self._head_norms[index](own)
            if rotation is not None and index < 2:
                own = rotation.of(own, rows)
            each[:, rows] = own.transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, start: int, end: int) -> Iterator[None]:
        """Replaces the queries of a sequence by what they find."""
        head_dim, length = self._sizes.head_dim, end - start
        per_row = 4 * head_dim * length
        num_heads = max(1, self._cut.operations // (per_row * length))
        most = self._cut.most(per_row * min(num_heads, len(q)))
        for first in range(0, len(q), num_heads):
            own = slice(first, first + num_heads)
            keys, values = (each[None, own, start:end] for each in (k, v))
            for rows in _parts(start, end, most):
                queries = q[None, own, rows]
                q[own, rows] = functional.scaled_dot_product_attention(
                    queries, keys, values, scale=self._kind.scale
                )[0]
                yield

    def _mlp(self, x: Tensor) -> Sliced:
        up = yield from self._up[0](x)
        up = functional.gelu(up, approximate=self._sizes.gelu)
        for layer in self._up[1:]:
            up *= yield from layer(x)
        return (yield from self._down(up))
