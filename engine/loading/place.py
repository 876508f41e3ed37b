"""`Place`: which part of a model this process has, among those that compute it together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.ranks.group import Group
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Place:
    """group: of the ranks that split each layer, pipeline: where there are several stages; None
    where this process is the only one. rank_pools: see `penstock.engine.loading.rank_pools`."""

    group: Group | None = None
    pipeline: Pipeline | None = None
    rank_pools: Sequence[int] = field(default=())

    @property
    def everyone(self) -> Group | None:
        """All ranks of all stages."""
        return self.pipeline.everyone if self.pipeline else self.group

    @property
    def is_alone(self) -> bool:
        return self.everyone is None

    @property
    def rank(self) -> int:
        """Among all."""
        return 0 if self.everyone is None else self.everyone.rank

    @property
    def is_first(self) -> bool:
        """Whether it samples, and the others follow it."""
        return self.rank == 0

    @property
    def num_ranks(self) -> int:
        return 1 if self.everyone is None else self.everyone.size

    @property
    def layout(self) -> RankLayout:
        tensor_size = self.group.size if self.group else 1
        return RankLayout(tensor_size, self.pipeline.num_stages if self.pipeline else 1)

    def barrier(self) -> None:
        """Waits until all are here."""
        if self.everyone is not None:
            self.everyone.barrier()

    def shard(self, whole: ModelConfig) -> Shard:
        """This rank's part of each layer. Raises InvalidConfig."""
        return (
            Shard(whole)
            if self.group is None
            else Shard(whole, self.group.rank, self.layout.tensor_size)
        )

    def stage(self, model: ModelConfig) -> Stage:
        """Its layers. Raises InvalidConfig."""
        pipeline = self.pipeline
        if pipeline is None:
            return Stage(model, 0, 1)
        return Stage(model, pipeline.stage, pipeline.num_stages)


ALONE = Place()
