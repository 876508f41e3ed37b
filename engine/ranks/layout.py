"""`RankLayout`: which part of a model each process has."""

from dataclasses import dataclass

MAX_RANKS = 16  # see native/ranks/ranks.cpp


@dataclass(frozen=True, slots=True)
class RankLayout:
    """num_stages: parts of so many layers each, one after the other. tensor_size: how many ranks
    split each layer of a stage.

    Rank 0, the engine process, has the last stage, because that samples: so ids, grammars and
    logprobs are where the scheduler is, and only the next step's inputs have to go to others.
    """

    tensor_size: int = 1
    num_stages: int = 1

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor_size * self.num_stages

    @property
    def flags(self) -> str:
        """Those that ask for so many ranks, for messages."""
        flags = []
        if self.tensor_size > 1:
            flags.append(f"--tensor-parallel-size {self.tensor_size}")
        if self.num_stages > 1:
            flags.append(f"--pipeline-parallel-size {self.num_stages}")
        return " with ".join(flags)

    def stage_of(self, rank: int) -> int:
        return (rank // self.tensor_size - 1) % self.num_stages

    def tensor_rank_of(self, rank: int) -> int:
        """Which part of its stage's layers it has."""
        return rank % self.tensor_size

    def rank_of(self, stage: int, tensor_rank: int) -> int:
        return (stage + 1) % self.num_stages * self.tensor_size + tensor_rank

    def name_of(self, rank: int) -> str:
        """For people."""
        if self.num_stages == 1:
            return f"rank {rank}"
        return f"rank {rank} (stage {self.stage_of(rank)})"


ONE_RANK = RankLayout()
