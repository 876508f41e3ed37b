"""`Membership`: where a rank meets the others: one piece of shared memory, that all inherit.

It has first the group of all ranks, then where there are several stages a group for each, if its
layers are split, and then the links from each stage to the next.
"""

import ctypes
from dataclasses import dataclass

from penstock.engine.ranks.group import Doing
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.link import Link, LinkSize
from penstock.engine.ranks.pipeline import Pipeline
from penstock.engine.ranks.shared_memory import SharedMemoryGroup, group_bytes


@dataclass(frozen=True, slots=True)
class Membership:
    """everyone: all ranks. tensor: those that split the layers of this one's stage; None where it
    has them alone. pipeline: to the stages beside it."""

    everyone: SharedMemoryGroup
    tensor: SharedMemoryGroup | None
    pipeline: Pipeline

    @classmethod
    def join(
        cls,
        library: ctypes.CDLL,
        descriptor: int,
        layout: RankLayout,
        link_size: LinkSize,
        rank: int,
        *,
        timeout_s: float,
    ) -> "Membership":
        """descriptor: of memory of `membership_bytes`. link_size: of links between stages.
        timeout_s: for how long a rank waits for another."""
        doing = Doing()
        own = _Own(library, descriptor, layout, link_size, rank, timeout_s, doing)
        everyone = own.group(0, range(layout.size))
        if layout.num_stages == 1:
            return cls(everyone, everyone, Pipeline())
        stage = layout.stage_of(rank)
        before = own.link(stage - 1, stage - 1) if stage > 0 else None
        after = own.link(stage, stage + 1) if stage < layout.num_stages - 1 else None
        pipeline = Pipeline(stage, layout.num_stages, doing, before, after)
        return cls(everyone, own.tensor_group(stage), pipeline)

    def wait_at_most(self, timeout_s: float) -> None:
        """From now on, for another rank."""
        for group in self._groups:
            group.timeout_s = timeout_s
        for link in self._links:
            link.timeout_s = timeout_s

    def end(self, rank: int) -> None:
        """Ends all waiting of this rank, as that one has ended. May be called in any thread."""
        for group in self._groups:
            group.end(rank)
        for link in self._links:
            link.end()

    def close(self) -> None:
        """Its memory goes with the process."""

    @property
    def _groups(self) -> list[SharedMemoryGroup]:
        return [group for group in (self.everyone, self.tensor) if group is not None]

    @property
    def _links(self) -> list[Link]:
        links = (self.pipeline.before, self.pipeline.after)
        return [link for link in links if link is not None]


@dataclass(frozen=True, slots=True)
class _Own:
    """A rank's view of the memory. See `Membership.join`."""

    library: ctypes.CDLL
    descriptor: int
    layout: RankLayout
    link_size: LinkSize
    rank: int
    timeout_s: float
    doing: Doing

    def group(self, offset: int, members: range) -> SharedMemoryGroup:
        return SharedMemoryGroup(
            self.library,
            self.descriptor,
            members.index(self.rank),
            len(members),
            timeout_s=self.timeout_s,
            offset=offset,
            doing=self.doing,
            layout=self.layout,
            members=members,
        )

    def tensor_group(self, stage: int) -> SharedMemoryGroup | None:
        size = self.layout.tensor_size
        if size == 1:
            return None
        first = self.layout.rank_of(stage, 0)
        offset = _groups_offset(self.library, self.layout)
        offset += stage * group_bytes(self.library, size)
        return self.group(offset, range(first, first + size))

    def link(self, sender: int, other_stage: int) -> Link:
        """From stage `sender` to the next; other_stage: that of the two which is not this one's."""
        layout, part = self.layout, self.layout.tensor_rank_of(self.rank)
        other = layout.rank_of(other_stage, part)
        number = sender * layout.tensor_size + part
        return Link(
            self.library,
            self.descriptor,
            offset=_links_offset(self.library, layout) + number * self.link_size.num_bytes,
            size=self.link_size,
            doing=self.doing,
            me=layout.name_of(self.rank),
            other=(other, layout.name_of(other)),
            timeout_s=self.timeout_s,
        )


def membership_bytes(library: ctypes.CDLL, layout: RankLayout, link_size: LinkSize) -> int:
    """The memory in which the ranks of a layout meet."""
    num_links = (layout.num_stages - 1) * layout.tensor_size
    return _links_offset(library, layout) + num_links * link_size.num_bytes


def _groups_offset(library: ctypes.CDLL, layout: RankLayout) -> int:
    return group_bytes(library, layout.size)


def _links_offset(library: ctypes.CDLL, layout: RankLayout) -> int:
    has_groups = layout.num_stages > 1 and layout.tensor_size > 1
    groups = group_bytes(library, layout.tensor_size) * layout.num_stages if has_groups else 0
    return _groups_offset(library, layout) + groups
