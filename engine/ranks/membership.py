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
    has them alone. pipeline: None where there is one stage."""

    everyone: SharedMemoryGroup
    tensor: SharedMemoryGroup | None
    pipeline: Pipeline | None

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

        def group(offset: int, members: range) -> SharedMemoryGroup:
            return SharedMemoryGroup(
                library,
                descriptor,
                members.index(rank),
                len(members),
                timeout_s=timeout_s,
                offset=offset,
                doing=doing,
                layout=layout,
                members=members,
            )

        def link(stage: int, other: int) -> Link:
            """From this stage to the next."""
            number = stage * layout.tensor_size + layout.tensor_rank_of(rank)
            return Link(
                library,
                descriptor,
                offset=_links_offset(library, layout) + number * link_size.num_bytes,
                size=link_size,
                doing=doing,
                me=layout.name_of(rank),
                other=(other, layout.name_of(other)),
                timeout_s=timeout_s,
            )

        everyone = group(0, range(layout.size))
        if layout.num_stages == 1:
            return cls(everyone, everyone, None)
        stage, part = layout.stage_of(rank), layout.tensor_rank_of(rank)
        tensor = None
        if layout.tensor_size > 1:
            first = layout.rank_of(stage, 0)
            offset = _groups_offset(library, layout)
            offset += stage * group_bytes(library, layout.tensor_size)
            tensor = group(offset, range(first, first + layout.tensor_size))
        before = after = None
        if stage > 0:
            before = link(stage - 1, layout.rank_of(stage - 1, part))
        if stage < layout.num_stages - 1:
            after = link(stage, layout.rank_of(stage + 1, part))
        pipeline = Pipeline(stage, layout.num_stages, everyone, doing, before, after)
        return cls(everyone, tensor, pipeline)

    def wait_at_most(self, timeout_s: float) -> None:
        """From now on, for another rank."""
        self.everyone.timeout_s = timeout_s
        if self.tensor is not None:
            self.tensor.timeout_s = timeout_s
        for link in self._links:
            link.timeout_s = timeout_s

    def end(self, rank: int) -> None:
        """Ends all waiting of this rank, as that one has ended. May be called in any thread."""
        self.everyone.end(rank)
        if self.tensor is not None:
            self.tensor.end(rank)
        for link in self._links:
            link.end()

    @property
    def _links(self) -> list[Link]:
        pipeline = self.pipeline
        links = (pipeline.before, pipeline.after) if pipeline is not None else ()
        return [link for link in links if link is not None]


def membership_bytes(library: ctypes.CDLL, layout: RankLayout, link_size: LinkSize) -> int:
    """Of the memory in which the ranks of a layout meet."""
    num_links = (layout.num_stages - 1) * layout.tensor_size
    return _links_offset(library, layout) + num_links * link_size.num_bytes


def _groups_offset(library: ctypes.CDLL, layout: RankLayout) -> int:
    return group_bytes(library, layout.size)


def _links_offset(library: ctypes.CDLL, layout: RankLayout) -> int:
    has_groups = layout.num_stages > 1 and layout.tensor_size > 1
    of_groups = group_bytes(library, layout.tensor_size) * layout.num_stages if has_groups else 0
    return _groups_offset(library, layout) + of_groups
