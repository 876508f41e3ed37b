"""Rotary position embedding: the table of angles, and the rotation."""

import math

import torch
from torch import Tensor

from penstock.engine.models.config import RopeConfig


def rotary_table(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each (num_positions, head_dim / 2) float32.

    Source of `llama3`: Llama 3.1's apply_scaling, as transformers has it.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        # A wave is scaled by how many periods of it fit the original context.
        turns = rope.original_max_positions * frequencies / (2 * math.pi)
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = ramp.clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / rope.factor
    elif rope.kind == "yarn":
        kept = _yarn_kept(rope, head_dim)
        frequencies = kept * frequencies + (1 - kept) * frequencies / rope.factor
    elif rope.kind == "longrope":
        frequencies = frequencies / torch.tensor(rope.divisors)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.to(device), sin.to(device)


def _yarn_kept(rope: RopeConfig, head_dim: int) -> Tensor:
    """The share of each frequency that is kept unscaled: (head_dim / 2,), from 1 down to 0.

    Source: Peng et al. 2023, section 3.2 (arXiv:2309.00071), as transformers has it.
    """

    def dimension(turns: float) -> float:
        """The one whose wave has this many periods within the original context."""
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(rope.high_freq_factor), dimension(rope.low_freq_factor)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2) - first) / max(last - first, 0.001)
    return 1 - ramp.clamp(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (i, i + head_dim / 2) of x, (T, heads, head_dim); cos, sin: (T, 1, .).

    What float16 cannot hold is NaN. As an infinity, a key could get the weight 0, and the answer
    would be wrong without a sign of it; a NaN reaches the logits.
    """
    left, right = x.float().chunk(2, dim=-1)
    rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
    return rotated + (rotated - rotated) if x.dtype is torch.float16 else rotated
