"""`LaunchedStep`: a step that the device may not have finished, and how long it takes there."""

import time

import torch
from torch import Tensor

from penstock.engine.memory.host import to_host
from penstock.engine.ranks.torch_ranks import SoleDevice, TorchRanks
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.sampling.sampler import ReadLogprobs, failed_rows
from penstock.scheduler.types import FurtherTokens, SampledTokens, TokenLogprobs


class StageTime:
    """How long one stage of a model computes a step, without what it waits for others: on a GPU by
    two events in its stream, else by the host, which computes then."""

    def __init__(self, device: torch.device) -> None:
        """The stage begins."""
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        self._began_s = self._ended_s = time.perf_counter()

    def end(self) -> None:
        """It has launched all that it computes."""
        if self._events is not None:
            self._events[1].record()
        self._ended_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Once the device has passed the end."""
        if self._events is not None:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._ended_s - self._began_s


class LaunchedStep:
    """`PendingTokens` of a step."""

    def __init__(
        self,
        sampled: SampledTokens,
        ids: Tensor,
        slots: list[int],
        logprobs: ReadLogprobs | None,
        grammars: GrammarTable,
        ranks: TorchRanks | SoleDevice,
        stage_time: StageTime | None,
        host_ids: Tensor | None = None,
        firsts: list[int] | None = None,
    ) -> None:
        """sampled: all but the ids and logprobs. ids: (S,) on the device, of the sampling rows,
        whose slots these are. logprobs: reads those of the rows that want them. ranks: those that
        the device waits for. stage_time: where there are stages. host_ids: where the device writes
        the ids too, so that they need no copy. firsts: of a step with drafts, each row's first
        token; ids are as of `accept_drafts` then, and logprobs those of all tokens."""
        self.stage_time = stage_time
        self._ranks = ranks
        self._slots = slots
        self._grammars = grammars
        self._constraints = grammars.constraints(slots)
        self._sampled, self._logprobs, self._firsts = sampled, logprobs, firsts
        self._is_complete = False
        self._ids = to_host(ids) if host_ids is None else host_ids
        self._event = torch.cuda.Event() if ids.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event:
            self._event.record()

    @property
    def step(self) -> int:
        return self._sampled.step

    def wait(self) -> SampledTokens:
        """The first call also advances the grammars by the sampled ids."""
        if self._is_complete:
            return self._sampled
        self.wait_for_device()
        ids, further = self._ids.tolist(), dict[int, FurtherTokens]()
        logprobs = self._logprobs() if self._logprobs else None
        if self._firsts is not None:
            nums, ids = ids
            ids, logprobs, further = _accepted(nums, ids, self._firsts, logprobs)
        failed = failed_rows(ids, self._grammars.advance(self._slots, ids, self._constraints))
        self._logprobs = None
        self._sampled = self._sampled._replace(
            token_ids=ids, failed=failed, logprobs=logprobs, further=further
        )
        if self.stage_time is not None:
            mean_s = self._ranks.mean_computed_s(self.step, self.stage_time.seconds)
            self._sampled = self._sampled._replace(computed_s=mean_s)
        self._is_complete = True
        return self._sampled

    def wait_for_device(self) -> None:
        """Raises RankFailed where the others do not come."""
        if self._event:
            self._ranks.wait_for(self._event)


def _accepted(
    nums: list[int],
    ids: list[int],
    firsts: list[int],
    logprobs: list[TokenLogprobs | None] | None,
) -> tuple[list[int], list[TokenLogprobs | None] | None, dict[int, FurtherTokens]]:
    """The first id of each row, its logprobs, and what follows. nums: of the ids of each row.
    logprobs: after all tokens."""
    further = {}
    for row, (first, num) in enumerate(zip(firsts, nums, strict=False)):
        if num > 1:
            entries = [] if logprobs is None else logprobs[first + 1 : first + num]
            given = [entry for entry in entries if entry is not None]
            further[row] = FurtherTokens(ids[first + 1 : first + num], given or None)
    entries_of_first = None if logprobs is None else [logprobs[first] for first in firsts]
    return [ids[first] for first in firsts], entries_of_first, further
