"""`Amounts`: what one step makes the device and the host do. The inputs of a step model."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """The layers whose tokens attend to the same number of positions: `window`, the token's own
    included, or None for all before it.

    Over all layers of the group, kv_bytes_per_token: keys and values of one position, as they are
    read; held_bytes_per_token: as they are held in memory, where that is less because layers share
    them; flops_per_pair: one (query, key) pair.
    """

    window: int | None
    kv_bytes_per_token: int
    flops_per_pair: int
    held_bytes_per_token: int | None = None

    @property
    def held_bytes(self) -> int:
        """The bytes of one position in memory."""
        held = self.held_bytes_per_token
        return self.kv_bytes_per_token if held is None else held


class Amounts(NamedTuple):
    """Those of one step. Bytes and operations are the least that a correct step reads and computes.

    tokens: through the linear layers, padding included. decode_kv_bytes, prefill_kv_bytes: keys and
    values that decodes and that chunks read. attention_flops: of chunks, beyond one query a key.
    chunks: sequences that run one. sampled: rows of the output layer. prefill_tokens: of chunks,
    without padding.
    """

    tokens: int
    weight_bytes: int
    decode_kv_bytes: int
    prefill_kv_bytes: int
    attention_flops: int
    sequences: int
    chunks: int
    sampled: int
    prefill_tokens: int


# A second of the device, and of the host, is spent on these. The order is that of the rows below.
DEVICE_UNITS = (
    "step",
    "weight_byte",
    "token_below_knee",
    "token_above_knee",
    "decode_kv_byte",
    "prefill_kv_byte",
    "attention_flop",
    "sequence",
    "chunk",
    "sampled_row",
)
HOST_UNITS = ("step", "sequence", "chunk", "prefill_token")


def device_row(amounts: Amounts, knee: int) -> tuple[int, ...]:
    """How many of each of DEVICE_UNITS the step has.

    knee: tokens from which on one more costs another time. A device first reads weights and then
    multiplies, so that its time bends there: the roofline, in two lines.
    """
    tokens = amounts.tokens
    below = tokens if tokens < knee else knee
    return (
        1,
        amounts.weight_bytes,
        below,
        tokens - below,
        amounts.decode_kv_bytes,
        amounts.prefill_kv_bytes,
        amounts.attention_flops,
        amounts.sequences,
        amounts.chunks,
        amounts.sampled,
    )


def host_row(amounts: Amounts) -> tuple[int, ...]:
    """How many of each of HOST_UNITS the step has."""
    return (1, amounts.sequences, amounts.chunks, amounts.prefill_tokens)
