"""`DeviceStep`: the tensors of one step whose lengths are known on the device alone.

It is to a GPU what `penstock.engine.step.model_input.ModelInput` is to a CPU.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from penstock.engine.step.model_input import InsertedRows


class AdapterTiles(NamedTuple):
    """The tokens of a step that have an adapter, in tiles of at most `rows` that share one.

    order: int32, the tokens, tile after tile. slots, firsts, counts: (tiles,) int32, the slot of
    each tile's adapter, where its tokens begin in the order, and how many they are; 0 for a tile
    that only pads a graph.
    """

    order: Tensor
    slots: Tensor
    firsts: Tensor
    counts: Tensor
    rows: int


class StateTiles(NamedTuple):
    """The prefill chunks of a step as layers with a recurrence compute them: in tiles of at most
    most_tokens consecutive tokens, one after the other.

    counts: (2,) int32, of chunks and of tiles, after which the lists only pad a graph. chunks: (C,
    4) int32: a chunk's row, its first token, its first tile and the one after its last. tiles: (N,
    4) int32: a tile's first token and the one after its last, its chunk, and the state that becomes
    a snapshot of the sequence after it, or -1.
    """

    most_tokens: int
    counts: Tensor
    chunks: Tensor
    tiles: Tensor

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.counts, self.chunks, self.tiles


class DraftSizes(NamedTuple):
    """Of steps in which decodes have drafts. tokens: to how many they are padded, ascending.
    queries: the most tokens of a row, a power of two."""

    tokens: tuple[int, ...]
    queries: int

    @property
    def most_tokens(self) -> int:
        return self.tokens[-1]


class DecodeQueries(NamedTuple):
    """The tokens of decodes that have drafts. firsts, counts: (R,) int32, each row's first token
    and how many it has, 0 for a row that is none. most: of a row, a power of two."""

    firsts: Tensor
    counts: Tensor
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """One step's tokens on the device, ragged by row; the host knows only the tensors' sizes.

    token_ids, positions: (T,) int32. kv_slots: (T,) int64. slots, context_lens: (R,) int32, one
    entry a row. The first num_decodes rows have one token each; chunk_starts, (R - num_decodes +
    1,) int32, are the offsets of the other rows into the tokens after those. block_tables: (all
    slots, max_blocks) int32.

    decode_lens, (num_decodes,) int32: given if the host does not know which rows are decodes. Of
    the first num_decodes rows, decodes have their length here and others have 0; chunk_starts then
    covers all rows and all tokens, (R + 1,), with no tokens for decodes.

    Where a model's layers are in several groups, each with a pool of its own, kv_slots and
    block_tables are of the first; more_groups has those of the others. group: whose they are in one
    of `group_steps`. adapters: the tokens that have a LoRA adapter; None where none may. Of layers
    with a recurrence, the first entry of a slot's block table is its state; state_tiles: of
    the rows after the decodes, None where there are none, or no such layers. queries: where decodes
    have drafts; all rows are decodes then.

    rotary_positions: (T,) int32, what tokens are rotated by in a model whose images have positions
    of their own, None for positions. The others are given in steps with chunks of sequences with
    inserts alone, which are in no graph: inserted, angle_positions, reaches: as of `ModelInput`,
    reaches int32. angles: cosines and sines of these tokens, (T, head_dim / 2) float32 each, which
    the model makes of angle_positions; rotary_positions are rows of them then.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    slots: Tensor
    context_lens: Tensor
    num_decodes: int
    chunk_starts: Tensor | None
    block_tables: Tensor
    decode_lens: Tensor | None = None
    more_groups: tuple[tuple[Tensor, Tensor], ...] = ()
    group: int = 0
    adapters: AdapterTiles | None = None
    state_tiles: StateTiles | None = None
    queries: DecodeQueries | None = None
    rotary_positions: Tensor | None = None
    inserted: InsertedRows | None = None
    angle_positions: Tensor | None = None
    reaches: Tensor | None = None
    angles: tuple[Tensor, Tensor] | None = None

    @property
    def rotations(self) -> Tensor:
        """(T,) int32: which row of the angles each token has."""
        return self.positions if self.rotary_positions is None else self.rotary_positions

    def token_ids_or(self, pad_id: int) -> Tensor:
        """As of `ModelInput`."""
        if self.inserted is None:
            return self.token_ids
        return self.token_ids.index_fill(0, self.inserted.at, pad_id)

    @property
    def group_steps(self) -> "list[DeviceStep]":
        """As the layers of each group see it."""
        others = [
            replace(self, kv_slots=kv_slots, block_tables=tables, group=group)
            for group, (kv_slots, tables) in enumerate(self.more_groups, 1)
        ]
        return [self, *others]

    @property
    def lens_of_decodes(self) -> Tensor:
        """(num_decodes,) int32, 0 for a row that is none."""
        return (
            self.context_lens[: self.num_decodes] if self.decode_lens is None else self.decode_lens
        )

    @property
    def first_chunk(self) -> int:
        """The first row of chunk_starts, which is also the token that its offsets start from."""
        return self.num_decodes if self.decode_lens is None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """It turns a layer's projection into queries, keys and values.

    cos, sin: (max_positions, head_dim / 2) float32, of which one row may stand for all. query_norm,
    key_norm: (head_dim,), or None. query_factors: (max_positions,) float32, what queries are
    multiplied by, or None. rotary_dim: of a head's dimensions, those that are rotated, the first;
    None for all.

    kv_parts: of keys and values, what the projection has after the queries: 2 for both; 1 where
    values are the keys before these are normed and rotated; 0 where the layer reads those of
    another layer. norms_values: whether values are normed too, without a weight; queries and keys
    have a norm then.
    """

    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float
    query_factors: Tensor | None = None
    rotary_dim: int | None = None
    kv_parts: int = 2
    norms_values: bool = False


def rotation_arguments(rotation: Rotation | None, head_dim: int) -> dict[str, Any]:
    """The arguments that kernels which rotate have in common, by name."""
    if rotation is None:
        tensors = ("cos", "sin", "query_norm", "key_norm", "query_factors")
        sizes = {"angles_stride": 0, "ROTARY_DIM": head_dim, "KV_PARTS": 2}
        return dict.fromkeys(tensors) | sizes | {"eps": 0.0, "NORMS_VALUES": False}
    return {
        "cos": rotation.cos,
        "sin": rotation.sin,
        "query_norm": rotation.query_norm,
        "key_norm": rotation.key_norm,
        "query_factors": rotation.query_factors,
        "eps": rotation.eps,
        "angles_stride": rotation.cos.stride(0),
        "ROTARY_DIM": rotation.rotary_dim or head_dim,
        "KV_PARTS": rotation.kv_parts,
        "NORMS_VALUES": rotation.norms_values,
    }
