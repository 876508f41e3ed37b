"""`TorchGroup`: ranks by torch.distributed: NCCL between GPUs, gloo as what tests compare with."""

from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from penstock.engine.ranks.group import Doing, RankFailed


class TorchGroup:
    """See `Group`. Sums are in the backend's own order, on all ranks the same."""

    def __init__(
        self, backend: str, directory: Path, rank: int, size: int, *, timeout_s: float
    ) -> None:
        """backend: nccl or gloo. directory: private to the ranks, which find each other in it, so
        that no port is open to anyone. timeout_s: for how long a rank waits for another."""
        self.rank, self.size = rank, size
        self.doing = Doing()
        distributed.init_process_group(
            backend,
            init_method=(directory / "ranks").as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

    def all_reduce(self, tensor: Tensor) -> None:
        with _Failing(self, "all_reduce"):
            distributed.all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        with _Failing(self, "broadcast"):
            distributed.broadcast(tensor, 0)

    def gather(self, tensor: Tensor) -> Tensor | None:
        tensor = tensor.contiguous()
        into = None
        if self.rank == 0:
            into = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with _Failing(self, "gather"):
            distributed.gather(tensor, None if into is None else list(into.unbind()), 0)
        return into

    def barrier(self) -> None:
        with _Failing(self, "barrier"):
            distributed.barrier()

    def close(self) -> None:
        distributed.destroy_process_group()


class _Failing:
    """Names the rank and what it did."""

    def __init__(self, group: TorchGroup, name: str) -> None:
        self._group, self._name = group, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):  # as torch.distributed's errors are
            group = self._group
            raise RankFailed(
                f"rank {group.rank} of {group.size} failed in {group.doing} ({self._name}): "
                f"{str(error).partition(chr(10))[0]}",
                rank=group.rank,
            ) from error
