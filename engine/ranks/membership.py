"""`Membership`: where a rank meets the others: one piece of shared memory, that all inherit.

It has first the group of all ranks, then where there are several stages a group for each, if its
layers are split, and then the links from each stage to the next.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.engine.ranks.group import SoleRank
from penstock.engine.ranks.layout import ONE_RANK, RankLayout
from penstock.engine.ranks.link import Link, LinkSize
from penstock.engine.ranks.pipeline import Pipeline
from penstock.engine.ranks.shared_memory import RankMemory, SharedMemoryGroup, group_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Where a rank is among all; by default it is the only one.

    everyone: all ranks. tensor: those that split the layers of this one's stage. pipeline: to the
    stages beside it. pools: descriptors of memory for the pools of the ranks after the first, where
    rank 0 moves blocks of all.
    """

    layout: RankLayout = ONE_RANK
    everyone: SharedMemoryGroup | SoleRank = field(default_factory=SoleRank)
    tensor: SharedMemoryGroup | SoleRank = field(default_factory=SoleRank)
    pipeline: Pipeline = field(default_factory=Pipeline)
    pools: Sequence[int] = ()
    memory: RankMemory | None = None

    @classmethod
    def join(
        cls, memory: RankMemory, link_size: LinkSize, pools: Sequence[int] = ()
    ) -> "Membership":
        """memory: of `membership_bytes`. link_size: of links between stages."""
        layout, library = memory.layout, memory.library
        everyone = SharedMemoryGroup(memory, range(layout.size))
        tensor: SharedMemoryGroup | SoleRank = everyone
        pipeline = Pipeline(doing=memory.doing)
        if layout.num_stages > 1:
            stage, part = layout.stage_of(memory.rank), layout.tensor_rank_of(memory.rank)

            def link(sender: int, other_stage: int) -> Link:
                number = sender * layout.tensor_size + part
                offset = _links_offset(library, layout) + number * link_size.num_bytes
                return Link(memory, layout.rank_of(other_stage, part), link_size, offset)

            before = link(stage - 1, stage - 1) if stage > 0 else None
            after = link(stage, stage + 1) if stage < layout.num_stages - 1 else None
            pipeline = Pipeline(stage, layout.num_stages, memory.doing, before, after)
            tensor = SoleRank()
            if (size := layout.tensor_size) > 1:
                first = layout.rank_of(stage, 0)
                offset = group_bytes(library, layout.size) + stage * group_bytes(library, size)
                tensor = SharedMemoryGroup(memory, range(first, first + size), offset)
        return cls(
            layout=layout,
            everyone=everyone,
            tensor=tensor,
            pipeline=pipeline,
            pools=pools,
            memory=memory,
        )

    @property
    def rank(self) -> int:
        return self.everyone.rank

    def least(self, numbers: list[int]) -> list[int]:
        """The least of each number that any rank has; the same on all ranks."""
        mine = torch.tensor(numbers)
        every = self.everyone.gather(mine)
        if every is not None:
            mine = every.amin(0)
        self.everyone.broadcast(mine)
        return [int(number) for number in mine]

    def wait_at_most(self, timeout_s: float) -> None:
        """From now on, for another rank."""
        if self.memory is not None:
            self.memory.timeout_s = timeout_s

    def end(self, rank: int) -> None:
        """Ends all waiting of this rank, as that one has ended. May be called in any thread."""
        for each in (self.everyone, self.tensor, self.pipeline.before, self.pipeline.after):
            if each is not None:
                each.end(rank)

    def close(self) -> None:
        """Its memory goes with the process."""


def membership_bytes(library: ctypes.CDLL, layout: RankLayout, link_size: LinkSize) -> int:
    """The memory in which the ranks of a layout meet."""
    num_links = (layout.num_stages - 1) * layout.tensor_size
    return _links_offset(library, layout) + num_links * link_size.num_bytes


def _links_offset(library: ctypes.CDLL, layout: RankLayout) -> int:
    has_groups = layout.num_stages > 1 and layout.tensor_size > 1
    groups = group_bytes(library, layout.tensor_size) * layout.num_stages if has_groups else 0
    return group_bytes(library, layout.size) + groups
