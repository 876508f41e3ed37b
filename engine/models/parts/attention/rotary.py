"""Rotary position embedding: the tables of angles, and the rotation."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.parts.attention.rope import RopeConfig


class RotatedHeads(Protocol):
    """What the tables follow from; see `Attention`. angles_dim: the dimensions for which they have
    rows, of which the first rotary_dim are rotated, None for all."""

    @property
    def head_dim(self) -> int: ...
    @property
    def angles_dim(self) -> int: ...
    @property
    def rotary_dim(self) -> int | None: ...
    @property
    def rope(self) -> RopeConfig | None: ...
    @property
    def query_scaling(self) -> tuple[float, int] | None: ...
    @property
    def scale(self) -> float | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Rotates the heads of one layer.

    cos, sin: (rows, angles_dim / 2) float32. Of these the first rotary_dim / 2 are angles; the
    others are 0, for dimensions that are not rotated: see `rotate`. query_factors: what queries are
    multiplied by besides, (rows,) float32, or None. axes: (angles_dim / 2,) int64, whether an angle
    is that of a frame, a row or a column, or None where all have one position.
    """

    cos: Tensor
    sin: Tensor
    query_factors: Tensor | None
    rotary_dim: int
    axes: Tensor | None = None

    def at(self, positions: Tensor, angle_positions: Tensor | None = None) -> "Angles":
        """Takes the rows at positions, (T,) int64, of a table with a row for each position.
        angle_positions: see `ModelInput`."""
        factors = None if self.query_factors is None else self.query_factors[positions]
        places: Tensor | tuple[Tensor, Tensor] = positions
        if angle_positions is not None and self.axes is not None:
            columns = torch.arange(len(self.axes), device=positions.device)
            places = angle_positions[self.axes].t(), columns
        return Angles(self.cos[places], self.sin[places], factors, self.rotary_dim)


class RotaryTables:
    """The angles of each layer that has attention, by its index: (num_positions, angles_dim / 2).
    Layers with the same angles share them."""

    def __init__(
        self, layers: Iterable[RotatedHeads | None], num_positions: int, device: torch.device
    ) -> None:
        """layers: None for one without attention."""
        tables: dict[tuple[object, ...], Angles] = {}
        self.layers: dict[int, Angles] = {}
        for index, of in enumerate(layers):
            if of is None:
                continue
            dims = of.head_dim, of.angles_dim, of.rotary_dim
            kind = (of.rope, dims, of.query_scaling, of.scale)
            if kind not in tables:
                tables[kind] = _angles(of, num_positions, device)
            self.layers[index] = tables[kind]

    def at(self, positions: Tensor, angle_positions: Tensor | None = None) -> dict[int, Angles]:
        """The angles of these positions: see `Angles.at`."""
        rows = {table: table.at(positions, angle_positions) for table in {*self.layers.values()}}
        return {index: rows[table] for index, table in self.layers.items()}


def _angles(config: RotatedHeads, num_positions: int, device: torch.device) -> Angles:
    head_dim, rotary_dim = config.angles_dim, config.rotary_dim or config.angles_dim
    factors = _query_factors(config, num_positions)
    factors = None if factors is None else factors.to(device)
    if config.rope is None:  # one row for all positions
        rows = (torch.full((1, head_dim // 2), value, device=device) for value in (1.0, 0.0))
        cos, sin = (row.expand(num_positions, -1) for row in rows)
        return Angles(cos, sin, factors, rotary_dim)
    cos, sin = rotary_table(config.rope, rotary_dim, num_positions, device)
    if rest := (head_dim - rotary_dim) // 2:
        cos, sin = functional.pad(cos, (0, rest), value=1.0), functional.pad(sin, (0, rest))
    return Angles(cos, sin, factors, rotary_dim, _axes(config.rope, cos))


def _axes(rope: RopeConfig, cos: Tensor) -> Tensor | None:
    """Source: recomposition_frequencies of transformers' Qwen3VLTextRotaryEmbedding."""
    if rope.sections is None:
        return None
    axes = cos.new_zeros(cos.shape[1], dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes


def _query_factors(config: RotatedHeads, num_positions: int) -> Tensor | None:
    """Attention computes with the scale head_dim ** -0.5; what differs from it is a factor of the
    queries, as is Llama 4's growth by position."""
    if config.query_scaling is None and config.scale is None:
        return None
    factors = torch.ones(num_positions)
    if config.scale is not None:
        factors *= config.scale * math.sqrt(config.head_dim)
    if config.query_scaling is not None:
        beta, length = config.query_scaling
        periods = torch.arange(num_positions) // length
        factors *= 1 + beta * torch.log1p(periods.float())
    return factors


def rotary_table(
    rope: RopeConfig, rotary_dim: int, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each (num_positions, rotary_dim / 2) float32.

    Source of `llama3`: Llama 3.1's apply_scaling, as transformers has it. Of `longrope` there are
    two sets of divisors, and a sequence that grows from one to the other would need all its keys
    again; so as vLLM does, the long ones are used as soon as a sequence may be longer. For the same
    reason `dynamic` takes theta as it would be in the longest sequence.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    theta, is_long = rope.theta, rope.depends_on(num_positions)
    if rope.kind == "dynamic" and is_long:
        growth = rope.factor * num_positions / rope.original_max_positions - (rope.factor - 1)
        theta *= growth ** (rotary_dim / (rotary_dim - 2))
    frequencies = 1.0 / theta**exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        # A wave is scaled by how many periods of it fit the original context.
        turns = rope.original_max_positions * frequencies / (2 * math.pi)
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = ramp.clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / rope.factor
    elif rope.kind == "yarn":
        kept = _yarn_kept(rope, rotary_dim)
        frequencies = kept * frequencies + (1 - kept) * frequencies / rope.factor
    elif rope.kind == "longrope":
        frequencies = frequencies / torch.tensor(rope.long_divisors if is_long else rope.divisors)
    elif rope.kind == "proportional":
        frequencies[int(rope.share * rotary_dim // 2) :] = 0
        frequencies = frequencies / rope.factor
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.to(device), sin.to(device)


def _yarn_kept(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """The share of each frequency that is kept unscaled: (rotary_dim / 2,), from 1 down to 0.

    Source: Peng et al. 2023, section 3.2 (arXiv:2309.00071), as transformers has it.
    """

    def dimension(turns: float) -> float:
        """The one whose wave has this many periods within the original context."""
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(rope.high_freq_factor), dimension(rope.low_freq_factor)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    # transformers keeps a ramp that falls, where the context is shorter than a turn.
    ramp = (torch.arange(rotary_dim // 2) - first) / ((last - first) or 0.001)
    return 1 - ramp.clamp(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None = None) -> Tensor:
    """Rotates each pair (i, i + rotary_dim / 2) of x, (T, heads, head_dim); cos, sin: (T, 1, .).

    rotary_dim: the whole head by default; the dimensions after it stay as they are. What float16
    cannot hold is NaN. As an infinity, a key could get the weight 0, and the answer would be wrong
    without a sign of it; a NaN reaches the logits.
    """
    if rotary_dim is not None and rotary_dim < x.shape[-1]:
        half = rotary_dim // 2
        rotated = rotate(x[..., :rotary_dim], cos[..., :half], sin[..., :half])
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    left, right = x.float().chunk(2, dim=-1)
    rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
    return rotated + (rotated - rotated) if x.dtype is torch.float16 else rotated
