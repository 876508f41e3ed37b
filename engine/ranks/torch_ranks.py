"""`TorchRanks`: where a rank that computes on a GPU meets the others, as
`penstock.engine.ranks.membership.Membership` is on a CPU.

All are connected by torch.distributed, over this machine's loopback interface alone.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.engine.ranks.board import Board
from penstock.engine.ranks.device_pipeline import DevicePipeline
from penstock.engine.ranks.group import SoleRank
from penstock.engine.ranks.layout import ONE_RANK, RankLayout
from penstock.engine.ranks.peers import Peers
from penstock.engine.ranks.rendezvous import Rendezvous
from penstock.engine.ranks.small_sums import small_sums
from penstock.engine.ranks.torch_group import TorchGroup

# For torch's own watchdog, which would end the process without a sentence. The limit of a step is
# `timeout_s`, and a process that ends is noticed by who started it.
_NO_LIMIT = timedelta(days=1)
_LOOK_S = 0.01
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Records of each operation would cost the host time.
    "TORCH_FR_BUFFER_SIZE": "0",
    # Else every operation of every graph keeps memory for the buffers that it was captured with.
    "NCCL_GRAPH_REGISTER": "0",
    # All ranks are on this machine.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


class TorchRanks(Peers):
    """One for a process. everyone: all ranks. tensor: those that split the layers of this one's
    stage. pipeline: to the stages beside it."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        device: torch.device,
        board: Board,
        layout: RankLayout,
        *,
        alone: bool,
    ) -> None:
        """alone: each rank has its device for itself. Waits until all ranks are connected. Raises
        RankFailed."""
        assert layout.size == rendezvous.size, (layout, rendezvous.size)
        super().__init__(rank, layout, board, _NO_LIMIT.total_seconds())
        self._device = device
        self._by_nccl = alone
        self._rendezvous = rendezvous
        self._num_told = 0
        self._last_computed_s: dict[int, float] = {}
        self.closed = threading.Event()
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        with self.failures("connect"):
            dist.init_process_group(
                "nccl" if alone else "gloo",
                store=rendezvous.store,
                rank=rank,
                world_size=layout.size,
                timeout=_NO_LIMIT,
                device_id=device if alone else None,
            )
        self.everyone = self._group(range(layout.size), None)
        self._groups = [self.everyone]
        _warm_up(self.everyone, device)
        self.tensor: TorchGroup | SoleRank = self.everyone
        self.pipeline = DevicePipeline()
        if layout.num_stages > 1:
            self.tensor, self.pipeline = self._join_stage()
        if alone and isinstance(self.tensor, TorchGroup):
            group = self.tensor.process_group
            self.tensor.small_sums = small_sums(
                self.tensor, group, device, layout.size, lambda ok: self.least([ok]) == [1]
            )

    def wait_at_most(self, timeout_s: float) -> None:
        """From now on, for another rank."""
        self.timeout_s = timeout_s
        if not self._by_nccl:  # whose watchdog would end the process
            for group in self._groups:
                limit = timedelta(seconds=timeout_s)
                dist.distributed_c10d._set_pg_timeout(limit, group.process_group)

    def least(self, numbers: list[int]) -> list[int]:
        """The least of each number that any rank has. The host waits for all, not the device."""
        number, self._num_told = self._num_told, self._num_told + 1
        self._rendezvous.tell(self.rank, number, numbers)
        began_s = time.monotonic()
        while (told := self._rendezvous.told(number)) is None:
            self.check(began_s)
            time.sleep(_LOOK_S)
        return [min(each) for each in zip(*told, strict=True)]

    def has_computed(self, step: int, seconds: float) -> None:
        """Tells the others how long this rank's stage took for a step."""
        self._board.record(self.rank, step, seconds)

    def mean_computed_s(self, step: int, own_s: float) -> float:
        """How long a stage took for a step, of all stages. own_s: this rank's. One that has not
        told it yet, a matter of microseconds, counts as in the step before."""
        layout = self.layout
        ranks = [layout.rank_of(stage, 0) for stage in range(layout.num_stages)]
        total_s = 0.0
        for rank in ranks:
            known_s = own_s if rank == self.rank else self._board.computed_s(rank, step)
            if known_s is not None:
                self._last_computed_s[rank] = known_s
            total_s += self._last_computed_s.get(rank, own_s)
        return total_s / len(ranks)

    def abort(self) -> None:
        """Makes the device wait no more either. May be called in any thread."""
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """Ends this rank's part in it."""
        self.closed.set()
        if self._by_nccl:
            self.abort()  # others may have ended, whom `destroy` would wait for
        else:
            dist.destroy_process_group()

    def _join_stage(self) -> tuple[TorchGroup | SoleRank, DevicePipeline]:
        """Every rank makes all groups, in one order, also those that it is not in."""
        layout, tensor_ranks = self.layout, range(self.layout.tensor_size)
        tensor: TorchGroup | None = None
        if layout.tensor_size > 1:
            for stage in range(layout.num_stages):
                group = self._new_group([layout.rank_of(stage, part) for part in tensor_ranks])
                tensor = group or tensor
        before = after = None
        for stage in range(1, layout.num_stages):
            for part in tensor_ranks:
                group = self._new_group(
                    [layout.rank_of(stage - 1, part), layout.rank_of(stage, part)]
                )
                if group is not None and group.rank == 0:
                    after = group
                elif group is not None:
                    before = group
        # From the first stage to the last: a rank hears of the stage before and then tells the
        # next, so that none waits in a circle.
        for each in (tensor, before, after):
            if each is not None:
                _warm_up(each, self._device)
        return tensor or SoleRank(), DevicePipeline(
            layout.stage_of(self.rank), layout.num_stages, self.doing, before, after
        )

    def _new_group(self, members: Sequence[int]) -> TorchGroup | None:
        """None where this rank is not in it."""
        with self.failures("connect"):
            made = dist.new_group(sorted(members), timeout=_NO_LIMIT)
        if self.rank not in members:
            return None
        group = self._group(members, made)
        self._groups.append(group)
        return group

    def _group(self, members: Sequence[int], process_group: dist.ProcessGroup | None) -> TorchGroup:
        return TorchGroup(self, members, process_group, self._device, by_nccl=self._by_nccl)


class SoleDevice:
    """`TorchRanks` of one process, which waits for its device alone."""

    rank, layout = 0, ONE_RANK

    def __init__(self) -> None:
        self.everyone = self.tensor = SoleRank()
        self.pipeline = DevicePipeline()

    def at(self, step: int, phase: str) -> None:
        """Nobody asks where it is."""

    def least(self, numbers: list[int]) -> list[int]:
        return numbers

    def wait_for(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def mean_computed_s(self, step: int, own_s: float) -> float:
        return own_s


SOLE_DEVICE = SoleDevice()


def _warm_up(group: TorchGroup, device: torch.device) -> None:
    """NCCL connects the ranks in the first operation of a kind, which no graph may hold."""
    numbers = torch.zeros(group.size, device=device)
    group.broadcast(numbers)
    if group.can_gather:
        group.gather(numbers)
    group.barrier()
