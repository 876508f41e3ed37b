"""Which layers of a model share a pool of keys and values, and how large each pool is. Imports no
tensors.

Layers with a sliding window need the blocks of its tokens alone, whatever the length of a sequence;
so those of one window have a pool, and the other layers have one (`scheduler.cache.groups`).
Layers with a recurrence have a pool of states, which is the last.
`divide` says how the memory is divided between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from penstock.engine.memory.pool.kv_shape import KVShape
from penstock.engine.memory.pool.state_shape import StateShape
from penstock.scheduler.groups import KVGroup, StateGroup

# Each pool of layers with a window may have this share of the memory so that short sequences, as
# many as may run, are not held up by it: the others, of which there are more in a long one, have
# the rest.
_MOST_FOR_SHORT = 0.1
# States for each sequence: its own, and snapshots where its prompt and its answer end.
_STATES_EACH = 3
# Tokens of a sequence for which there are as many states as keys and values: of a conversation.
_TYPICAL_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class KVLayout:
    """windows: of the groups, where there is one without a window that one first. group_of: the
    group of each layer of the model; after those with windows comes that of recurrent states.
    state: of those, None where there are none."""

    windows: tuple[int | None, ...]
    group_of: tuple[int, ...]
    state: StateShape | None = None

    @classmethod
    def of(
        cls,
        windows: Sequence[int | None],
        max_model_len: int,
        recurrent: Sequence[bool] = (),
        state: StateShape | None = None,
    ) -> "KVLayout":
        """windows: of each layer. One that no sequence outgrows is none. recurrent: for each layer,
        whether it has a recurrence and no window; empty where none has. state: of these layers."""
        each = [None if window is None or window >= max_model_len else window for window in windows]
        are = recurrent or [False] * len(windows)
        found = {window for window, is_one in zip(each, are, strict=True) if not is_one}
        groups = sorted(found, key=lambda window: -1 if window is None else window)
        group_of = [
            len(groups) if is_one else groups.index(window)
            for window, is_one in zip(each, are, strict=True)
        ]
        return cls(tuple(groups), tuple(group_of), state)

    def layers_of(self, group: int, kv: KVShape) -> list[int]:
        """Those of its layers that have keys and values, or a state, of their own."""
        return [layer for layer in kv.own_layers if self.group_of[layer] == group]

    def pools(self, kv: KVShape, block_size: int, itemsize: int) -> "list[GroupPool]":
        """kv: of the whole model. itemsize: see `KVHeads`."""
        pools = []
        for group, window in enumerate(self.windows):
            heads = [kv.heads[layer] for layer in self.layers_of(group, kv)]
            num_bytes = block_size * sum(each.bytes_per_token(itemsize) for each in heads)
            pools.append(GroupPool(KVGroup(0, window), block_size, num_bytes))
        if self.state is not None:
            pools.append(GroupPool(StateGroup(0), block_size, self.state.num_bytes))
        return pools


@dataclass(frozen=True, slots=True)
class GroupPool:
    """A group before its pool has a size. block_bytes: of one block in all of its layers, or of one
    state."""

    group: KVGroup | StateGroup
    block_size: int
    block_bytes: int

    def most_blocks(self, num_tokens: int) -> int:
        """That one sequence of this length needs at once."""
        return self.group.most_blocks(num_tokens, self.block_size)

    @property
    def num_below(self) -> float:
        """How many of its blocks a tier needs for each block of keys and values without a window:
        of states, the snapshots of a conversation for all of its blocks."""
        if isinstance(self.group, StateGroup):
            return (_STATES_EACH - 1) * self.block_size / _TYPICAL_LENGTH
        return 1.0


def bytes_needed(pools: Sequence[GroupPool], num_tokens: int) -> int:
    return sum(pool.most_blocks(num_tokens) * pool.block_bytes for pool in pools)


def longest_that_fits(pools: Sequence[GroupPool], budget: int, limit: int) -> int:
    """The most tokens of one sequence, whole blocks of them or the limit."""
    size = pools[0].block_size
    least, most = 0, -(-limit // size)
    while least < most:
        middle = (least + most + 1) // 2
        if bytes_needed(pools, middle * size) <= budget:
            least = middle
        else:
            most = middle - 1
    return min(least * size, limit)


def divide(
    pools: Sequence[GroupPool],
    budget: int,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_step_tokens: int,
) -> list[int]:
    """The blocks of each pool. One sequence of max_model_len must fit the budget.

    A state is of a whole sequence. So a pool of states is as the length of a conversation needs it,
    and each of its sequences has two snapshots besides; max_num_seqs of them are enough.
    """
    if len(pools) == 1 or not isinstance(pools[-1].group, StateGroup):
        return _divide_windows(pools, budget, max_model_len, max_num_seqs, max_step_tokens)
    *others, states = pools
    typical = min(max_model_len, _TYPICAL_LENGTH)
    each = bytes_needed(others, typical) + _STATES_EACH * states.block_bytes
    wanted = _STATES_EACH * min(max_num_seqs, budget // each)
    spare = budget - bytes_needed(pools, max_model_len)
    num_states = 1 + min(max(0, wanted - 1), spare // states.block_bytes)
    left = budget - num_states * states.block_bytes
    counts = _divide_windows(others, left, max_model_len, max_num_seqs, max_step_tokens)
    return [*counts, num_states]


def _divide_windows(
    pools: Sequence[GroupPool],
    budget: int,
    max_model_len: int,
    max_num_seqs: int,
    max_step_tokens: int,
) -> list[int]:
    """The blocks of pools of keys and values.

    Sequences of one length use up all pools at the same time if the pools are as that length needs
    them: each has blocks in proportion to what such a sequence needs at once. Shorter ones run out
    of blocks for windows first, longer ones of the others. That length is here the geometric mean
    of the shortest window and max_model_len: as many times longer than the one as it is shorter
    than the other. A pool for a window has more where a tenth of the memory gives all max_num_seqs
    sequences, and a step of max_step_tokens, what they need of it.
    """
    if len(pools) == 1:
        return [budget // pools[0].block_bytes]
    windows = [
        pool.group.window
        for pool in pools
        if isinstance(pool.group, KVGroup) and pool.group.window is not None
    ]
    typical = isqrt(min(windows) * max_model_len)
    share = budget / bytes_needed(pools, typical)
    counts = []
    spare = budget - bytes_needed(pools, max_model_len)
    for pool in pools[1:]:
        least = pool.most_blocks(max_model_len)
        for_all = max_num_seqs * least + -(-max_step_tokens // pool.block_size)
        affordable = int(budget * _MOST_FOR_SHORT / (len(pools) - 1)) // pool.block_bytes
        wanted = max(int(share * pool.most_blocks(typical)), min(for_all, affordable))
        more = min(max(0, wanted - least), spare // pool.block_bytes)
        spare -= more * pool.block_bytes
        counts.append(least + more)
    first = pools[0].most_blocks(max_model_len) + spare // pools[0].block_bytes
    # No position has use for more blocks than the first pool has.
    return [first, *(min(count, first) for count in counts)]
