"""For all kernels of a gated delta net: sizes, gates, and the norm after them."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.activation import silu
from penstock.engine.kernels.sizes import next_power_of_2
from penstock.engine.memory.pool.state_shape import StateShape
from penstock.engine.step.device_step import DeviceStep


class Gates(NamedTuple):
    """values: (T, 2 * num_value_heads), those of beta first. decay, bias: as in `DeltaNet`."""

    values: Tensor
    decay: Tensor
    bias: Tensor


def sizes(shape: StateShape) -> dict[str, int]:
    """The heads' sizes, as all kernels have them; KEYS and VALUES are powers of 2."""
    return {
        "KEY_HEADS": shape.num_key_heads,
        "VALUE_HEADS": shape.num_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "KEYS": max(16, next_power_of_2(shape.key_dim)),
        "VALUES": max(16, next_power_of_2(shape.value_dim)),
    }


def tile_programs(step: DeviceStep) -> int:
    """That take the tiles of a step's chunks in turn. A graph has room for more tiles than there
    mostly are."""
    assert step.state_tiles is not None
    num_tiles = len(step.state_tiles.tiles)
    full = -(-len(step.token_ids) // step.state_tiles.most_tokens)
    return min(num_tiles, full + _FURTHER_TILES)


# Chunks end in tiles that are not full.
_FURTHER_TILES = 8


@triton.jit
def gates_of(gates, decay, bias, token, head, is_token, HEADS: tl.constexpr):
    """A value head's logarithm of decay at these tokens, and its beta. Both are 0 where there
    is no token, which leaves a state as it is. is_token: None where all are there."""
    place = gates + token.to(tl.int64) * (2 * HEADS) + head
    if is_token is None:
        b = tl.load(place)
        a = tl.load(place + HEADS)
    else:
        b = tl.load(place, mask=is_token, other=0.0)
        a = tl.load(place + HEADS, mask=is_token, other=0.0)
    x = a.to(tl.float32) + tl.load(bias + head)
    grown = tl.exp(tl.minimum(x, 20.0))
    # log(1 + e) loses the digits of a small e, and a decay is applied thousands of times.
    logarithm = tl.where(grown < 1e-3, grown * (1.0 - grown * 0.5), tl.log(1.0 + grown))
    softplus = tl.where(x > 20.0, x, logarithm)
    g = tl.load(decay + head) * softplus
    beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
    if is_token is not None:
        g = tl.where(is_token, g, 0.0)
        beta = tl.where(is_token, beta, 0.0)
    return g, beta


@triton.jit
def gated(mean, values, norm, gate, eps):
    """RMSNorm of a head's values, mean being that of their squares, times the gate's SiLU."""
    return values * tl.rsqrt(mean + eps) * norm * silu(gate)
