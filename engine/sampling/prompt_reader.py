"""The outputs of prompts: logprobs of their tokens, and one embedding of a whole prompt.

A prompt may run in several steps. Their results are collected here, per slot, until the prompt
ends; a preempted one starts again with a new assignment. Results are combined in one order however
the prompt is split, so they depend on the sequence alone wherever its logits and states do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.sampling.sampler import raw_logprobs
from penstock.scheduler.prompt_logprobs import PackedLogprobs
from penstock.scheduler.types import (
    Pooling,
    PromptOutput,
    PromptOutputRequest,
    ScheduledBatch,
    SlotAssignment,
)

# Logits in memory at a time: 32 MiB of them, and as much again for logprobs. At 151,936 ids that is
# 55 rows, so the output layer's weights are read seldom.
_MAX_LOGITS = 2**23
# States are added as integers, whose sum is the same in any order. After the norm they are seldom
# above 1,000: a million such tokens fit, and the rounding of 2e-10 is below float32's precision.
_INTEGER_ONE = 2.0**32


@dataclass(slots=True)
class _Gathered:
    """The results so far of the prompt in `slot`. state: float64 for Pooling.LAST and FIRST,
    `_INTEGER_ONE` times the sum for MEAN. is_valid: no logit so far is NaN or +inf, and every state
    is finite."""

    requested: PromptOutputRequest
    slot: int
    num_tokens: int
    logprobs: list[PackedLogprobs] = field(default_factory=list)
    state: Tensor | None = None
    is_valid: bool = True


class PromptPart(NamedTuple):
    """Tokens [start, end) of a prompt, which are a step's rows from first_row on."""

    gathered: _Gathered
    start: int
    end: int
    first_row: int

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + self.end - self.start)


class PromptReader:
    def __init__(
        self,
        vocab_size: int,
        to_logits: Callable[[Tensor], Tensor],
        pooled: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """to_logits: (R, hidden_size) to (R, vocab_size) float32. pooled: what a pooled state
        passes through, (hidden_size,) to (size,) float32."""
        self._vocab_size = vocab_size
        self._to_logits = to_logits
        self._pooled = pooled or (lambda state: state)
        self._gathered: dict[int, _Gathered] = {}

    def assign(self, assignment: SlotAssignment) -> None:
        self._gathered.pop(assignment.slot, None)
        if assignment.prompt_request:
            self._gathered[assignment.slot] = _Gathered(
                assignment.prompt_request, assignment.slot, assignment.num_prompt_tokens
            )

    def parts(self, batch: ScheduledBatch, query_starts: list[int]) -> list[PromptPart]:
        """The parts of prompts in this step whose rows' states `read` needs, in this order."""
        if not self._gathered:
            return []
        parts = []
        rows = zip(batch.slots, batch.starts, batch.num_tokens, query_starts[:-1], strict=True)
        for slot, start, num_tokens, first_row in rows:
            gathered = self._gathered.get(slot)
            if gathered is None:
                continue
            end = start + num_tokens
            if gathered.requested == (None, Pooling.LAST):  # only the prompt's last token matters
                first_row, start = first_row + num_tokens - 1, end - 1
                if end < gathered.num_tokens:
                    continue
            parts.append(PromptPart(gathered, start, end, first_row))
        return parts

    def read(
        self, parts: list[PromptPart], states: Tensor, token_table: Tensor
    ) -> tuple[PromptOutput | None, ...]:
        """states: of the parts' rows. Returns the outputs of the prompts that end, None for one
        that is not valid."""
        outputs = []
        split = torch.split(states, [part.end - part.start for part in parts])
        for part, part_states in zip(parts, split, strict=True):
            gathered = part.gathered
            self._take(part, part_states, token_table)
            if part.end == gathered.num_tokens:
                del self._gathered[gathered.slot]
                outputs.append(self._output(gathered) if gathered.is_valid else None)
        return tuple(outputs)

    def _take(self, part: PromptPart, states: Tensor, token_table: Tensor) -> None:
        gathered = part.gathered
        num_logprobs, pooling = gathered.requested
        if num_logprobs is not None:
            # The prompt's last row predicts the output's first token, which is not scored here.
            next_ids = token_table[gathered.slot, part.start + 1 : gathered.num_tokens]
            next_ids = next_ids[: len(states)]
            if len(next_ids):
                self._score(gathered, states[: len(next_ids)], next_ids, num_logprobs)
        if pooling:
            # NaN as an integer would be a number.
            gathered.is_valid &= bool(states.isfinite().all())
        if pooling is Pooling.LAST and part.end == gathered.num_tokens:
            gathered.state = states[-1].double()
        elif pooling is Pooling.FIRST and part.start == 0:
            gathered.state = states[0].double()
        elif pooling is Pooling.MEAN:
            part_sum = (states.double() * _INTEGER_ONE).long().sum(0)
            gathered.state = part_sum if gathered.state is None else gathered.state + part_sum

    def _score(self, gathered: _Gathered, states: Tensor, next_ids: Tensor, num_top: int) -> None:
        """Appends the logprobs of the id that follows each state."""
        size = max(1, _MAX_LOGITS // self._vocab_size)
        slices = zip(torch.split(states, size), torch.split(next_ids, size), strict=True)
        for some, ids in slices:
            logits = self._to_logits(some)
            gathered.is_valid &= bool((logits.amax(-1) < torch.inf).all())  # a NaN is not
            x = raw_logprobs(logits)
            own = x.gather(1, ids.unsqueeze(1))
            ranks = (x > own).sum(-1) + 1
            best = x.topk(min(num_top, self._vocab_size))
            packed = PackedLogprobs(
                best.indices.shape[1],
                _bytes(own, torch.float32),
                _bytes(ranks, torch.int32),
                _bytes(best.indices, torch.int32),
                _bytes(best.values, torch.float32),
            )
            gathered.logprobs.append(packed)

    def _output(self, gathered: _Gathered) -> PromptOutput:
        num_logprobs, pooling = gathered.requested
        embedding = None
        if pooling:
            assert gathered.state is not None
            count = gathered.num_tokens * _INTEGER_ONE if pooling is Pooling.MEAN else 1
            state = (gathered.state.double() / count).float()
            embedding = _bytes(self._pooled(state), torch.float32)
        logprobs = None if num_logprobs is None else PackedLogprobs.joined(gathered.logprobs)
        return PromptOutput(logprobs, embedding)


def _bytes(column: Tensor, dtype: torch.dtype) -> bytes:
    values: bytes = column.to("cpu", dtype).contiguous().numpy().tobytes()
    return values
