"""`Place`: which part of a model this process has, among those that compute it together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.gathered import least
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.ranks.group import Group, SoleRank
from penstock.engine.ranks.layout import ONE_RANK, RankLayout
from penstock.engine.ranks.membership import Membership
from penstock.engine.ranks.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Place:
    """rank: of `layout.size`. group: the ranks that split each layer of this one's stage; None
    where it has them alone. pipeline: to the stages beside it, on a CPU. everyone: all ranks of all
    stages. least: of each number the least that any rank has. rank_pools: see
    `penstock.engine.loading.rank_pools`."""

    layout: RankLayout = ONE_RANK
    rank: int = 0
    group: Group | None = None
    everyone: Group = field(default_factory=SoleRank)
    pipeline: Pipeline = field(default_factory=Pipeline)
    least: Callable[[list[int]], list[int]] = list
    rank_pools: Sequence[int] = ()

    @classmethod
    def on_cpu(
        cls, membership: Membership, layout: RankLayout, rank_pools: Sequence[int] = ()
    ) -> "Place":
        everyone = membership.everyone
        return cls(
            layout,
            everyone.rank,
            membership.tensor,
            everyone,
            membership.pipeline,
            lambda numbers: least(everyone, numbers),
            rank_pools,
        )

    @property
    def is_alone(self) -> bool:
        return self.layout.size == 1

    @property
    def is_first(self) -> bool:
        """Whether it samples, and the others follow it."""
        return self.rank == 0

    def shard(self, whole: ModelConfig) -> Shard:
        """This rank's part of each layer. Raises InvalidConfig."""
        return Shard(whole, self.layout.tensor_rank_of(self.rank), self.layout.tensor_size)

    def stage(self, model: ModelConfig) -> Stage:
        """Its layers. Raises InvalidConfig."""
        return Stage(model, self.layout.stage_of(self.rank), self.layout.num_stages)


ALONE = Place()
