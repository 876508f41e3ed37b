"""`TorchGroup`: some of the ranks that compute on GPUs, by torch.distributed.

By NCCL where each rank has a GPU of its own: its operations run in the stream's order, and a CUDA
graph may hold them. By gloo where ranks share one device, which NCCL refuses: through this
machine's memory, and the host waits in each.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.ranks.group import Doing
from penstock.engine.ranks.peers import Peers
from penstock.engine.ranks.small_sums import SmallSums

# torch's name for it: since 2.13, and before.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class TorchGroup:
    """See `Group`. Tensors are contiguous and on this process's device.

    With NCCL the operations return before they are done, sums are of the tensors' type in an order
    of NCCL's, equal on all ranks, and a rank that is missing is noticed in `wait_for`.

    small_sums: set once all ranks have them, for tensors that they take.
    """

    small_sums: SmallSums | None = None

    def __init__(
        self,
        peers: Peers,
        members: Sequence[int],
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        by_nccl: bool,
    ) -> None:
        """members: of all ranks those in it, this one too; the first is its rank 0, and only where
        they ascend it can `gather`. process_group: of them, None for that of all."""
        self.rank, self.size = members.index(peers.rank), len(members)
        self.process_group = process_group
        self._source = sorted(members).index(members[0])  # torch sorts them
        self.can_gather = list(members) == sorted(members)
        self._peers = peers
        self._device = device
        self._by_nccl = by_nccl

    @property
    def doing(self) -> Doing:
        return self._peers.doing

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may hold its operations."""
        return self._by_nccl

    def all_reduce(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "a copy would be summed"
        group, small = self.process_group, self.small_sums
        if small is not None and small.takes(tensor):
            self._call("all_reduce", tensor, small.all_reduce)
            return
        self._call("all_reduce", tensor, lambda each: dist.all_reduce(each, group=group))

    def broadcast(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "a copy would be written"
        group, source = self.process_group, self._source
        self._call(
            "broadcast", tensor, lambda each: dist.broadcast(each, group=group, group_src=source)
        )

    def gather(self, tensor: Tensor) -> Tensor | None:
        assert self.can_gather, "the parts would be in another order"
        # To all of them: where it is captured, that is better known to work than NCCL's gather.
        mine = tensor.cpu() if self._copies else tensor.contiguous()
        parts = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        with self._peers.failures("gather"):
            getattr(dist, ALL_GATHER)(parts, mine, group=self.process_group)
        if self.rank:
            return None
        return parts.to(tensor.device).view(self.size, *tensor.shape)

    def barrier(self) -> None:
        """Waits for the device too."""
        self.all_reduce(one := torch.ones(1, dtype=torch.int32, device=self._device))
        if one.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._peers.wait_for(event)

    @property
    def _copies(self) -> bool:
        """gloo takes the tensors of a processor."""
        return not self._by_nccl and self._device.type == "cuda"

    def _call(self, name: str, tensor: Tensor, operation: Callable[[Tensor], object]) -> None:
        """In place."""
        with self._peers.failures(name):
            if self._copies:
                copy = tensor.cpu()
                operation(copy)
                tensor.copy_(copy)
            else:
                operation(tensor)
