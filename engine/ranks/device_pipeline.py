"""`DevicePipeline`: how states pass from stage to stage where each rank computes on a GPU.

A stage takes the states from the stage before, computes, and gives its own to the next: all in the
order of its one stream, between two graphs and never in one. Where operations of several
communicators run at the same time, NCCL lets one hold up the other (NVIDIA/nccl#195, #217, #522),
and pipelines have hung that send on a stream of their own, or capture some of the transfers
(vllm-project/vllm#56956, NVIDIA/TensorRT-LLM#12462). Here each rank has its operations in one
order; those of a step go from the first stage to the last, and nothing goes back on the devices:
sampled ids pass through the hosts, with the next step. So no operation waits for a later one.
A stream for transfers alone would gain little: a stage that has sent a step has no other to compute
unless more steps are in flight than there are stages.

A transfer is a broadcast in a group of two, which torch runs in the caller's stream; a single send
or receive it would put in another one.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.ranks.pipeline import PipelineStage
from penstock.engine.ranks.torch_group import TorchGroup


@dataclass(slots=True)
class DevicePipeline(PipelineStage):
    """before, after: of this rank and of that with the same part of the layers in the neighbouring
    stage, the one that sends first; None in the first and in the last stage."""

    before: TorchGroup | None = None
    after: TorchGroup | None = None
    _arrived: Tensor | None = field(default=None, init=False)

    def allocate(
        self, max_num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """For the states of a step, in memory that does not move."""
        if not self.is_first:
            self._arrived = torch.zeros(max_num_tokens, hidden_size, dtype=dtype, device=device)

    def arrived(self, num_tokens: int) -> Tensor:
        """The states that `receive` gets: (num_tokens, hidden_size). They may be written."""
        assert self._arrived is not None, "the first stage, or nothing is allocated"
        return self._arrived[:num_tokens]

    def receive(self, num_tokens: int) -> None:
        """The states of so many tokens, padding included, after the stage before; nothing in the
        first stage. Raises RankFailed."""
        if self.before is not None:
            with self.doing.during(f"waiting for stage {self.stage - 1}"):
                self.before.broadcast(self.arrived(num_tokens))

    def send(self, states: Tensor) -> None:
        """Those after this stage: (tokens that the next one receives, hidden_size). Raises
        RankFailed."""
        assert self.after is not None, "the last stage"
        with self.doing.during(f"waiting for stage {self.stage + 1}"):
            self.after.broadcast(states)
