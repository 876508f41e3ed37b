"""DRY: penalizes a token that would continue a repetition of what came before.

As llama.cpp has it (after p-e-w's proposal, text-generation-webui#5677): where the last n tokens,
n at least allowed_length, have occurred before, the token that followed them there loses
multiplier * base ** (n - allowed_length) of its logit. A repetition does not reach over a breaker.
"""

import torch
from torch import Tensor

from penstock.engine.memory.host import to_device
from penstock.scheduler.types import Dry

# A longer repetition counts as one of this length: what it costs is beyond any logit by then.
_MAX_LENGTH = 64


class DryPenalty:
    """The penalty of one request."""

    def __init__(self, dry: Dry, vocab_size: int, device: torch.device) -> None:
        """Ids of breakers outside the vocabulary are ignored."""
        self._dry = dry
        breakers = [i for i in dry.breaker_ids if i < vocab_size]
        self._breaks = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._breaks.index_fill_(0, to_device(breakers, torch.int64, device), True)

    def apply(self, x: Tensor, tokens: Tensor, length: int) -> None:
        """Lowers, in place, logits (V,) of what follows the first `length` tokens."""
        dry = self._dry
        known = tokens[:length].long()
        if dry.last_n >= 0:
            known = known[max(0, length - dry.last_n) :]
        if len(known) <= dry.allowed_length:
            return
        lengths = torch.zeros_like(x, dtype=torch.int64)
        lengths.scatter_reduce_(0, known[1:], self._matched(known), "amax")
        excess = (lengths - dry.allowed_length).double()
        penalty = (dry.multiplier * dry.base**excess).clamp(max=torch.finfo(x.dtype).max / 4)
        x.sub_(torch.where(excess >= 0, penalty.to(x.dtype), 0.0))

    def _matched(self, known: Tensor) -> Tensor:
        """How many tokens up to each but the last, (n - 1,), are the last ones: 0 to _MAX_LENGTH.
        No step of it waits for the device."""
        size = min(_MAX_LENGTH, len(known) - 1)
        suffix = known[-size:]
        padded = torch.cat((known.new_full((size - 1,), -1), known[:-1]))
        same = (padded.unfold(0, size, 1) == suffix) & ~self._breaks[suffix]
        return same.flip(1).to(torch.int8).cumprod(1, dtype=torch.int8).sum(1)
